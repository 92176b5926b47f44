"""Target and draft of randomly drawn architectures and formats: the text is that of K = 0."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from checkpoints import LLAMA3_ROPE, LONG_ROPE, YARN_ROPE, make_checkpoint, perturb_checkpoint
from hf_reference import generate, load
from hypothesis import given
from hypothesis import strategies as st
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.models.registry import FAMILIES
from specrs.sampling import SamplingParams
from sweep import sweep

from engine.harness import build, config, make_prompts, poison, run
from engine.test_equivalence import engine_settings

VOCAB = 61
LONGEST = 20
BY_TYPE = {
    family.model_type: family
    for family in FAMILIES.values()
    if not family.has_states and family.model_type != "gemma4_text"
}
"""Families that may be target and draft. `test_hybrids` has those whose layers have states."""


@dataclass(frozen=True)
class Architecture:
    """A drawn checkpoint: family, sizes, and how it is loaded."""

    family: str
    sizes: dict[str, int]
    fields: dict[str, Any]
    quantization: str | None

    def write(self, path: Path, seed: int) -> Path:
        """Write the checkpoint to `path`."""
        fields = self.sizes | self.fields
        return make_checkpoint(path, self.family, seed=seed, vocab=VOCAB, with_tokenizer=False, **fields)


def drawn_sizes(draw: st.DrawFn, *, grouped: bool) -> dict[str, int]:
    """Draw sizes; with `grouped`, sizes that INT4 quantization can divide into groups."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "layers": draw(st.integers(1, 4)),
        "kv_heads": kv_heads,
        "group": group,
        "head_dim": 32 if grouped else 2 * draw(st.sampled_from([2, 4, 5, 8, 9])),
        # Some families want whole heads of it.
        "hidden": (32 if grouped else 8) * kv_heads * group,
        "intermediate": 32 * draw(st.integers(1, 2)) if grouped else draw(st.integers(9, 50)),
    }


def drawn_rope(draw: st.DrawFn, family: str, dim: int) -> dict[str, Any]:
    """Draw a RoPE object of a kind that the family has, for heads of `dim` features."""
    kind, theta = draw(st.sampled_from(BY_TYPE[family].rope_kinds)), {"rope_theta": 500.0}
    if kind == "longrope":
        return LONG_ROPE | {field: LONG_ROPE[field][: dim // 2] for field in ("short_factor", "long_factor")}
    if BY_TYPE[family].query_scaling:
        length = {"original_max_position_embeddings": draw(st.sampled_from([3, 64]))}
        return YARN_ROPE | length | {"llama_4_scaling_beta": draw(st.sampled_from([0, 0.6]))}
    plain = {"rope_type": kind, "factor": 3.0} | theta if kind != "default" else {"rope_type": kind} | theta
    return {"llama3": LLAMA3_ROPE, "yarn": YARN_ROPE | {"truncate": draw(st.booleans())}}.get(kind, plain)


def drawn_windows(draw: st.DrawFn, family: str, layers: int) -> dict[str, Any]:
    """Draw the fields with which the family declares windows."""
    kind, window = BY_TYPE[family].windows, draw(st.sampled_from([2, 5, 13, 40]))
    if kind == "chunks":
        return {"attention_chunk_size": window, "floor_scale": draw(st.sampled_from([3, 64]))}
    if kind is None or (kind not in ("pattern", "alternating") and draw(st.booleans())):
        return {"sliding_window": None} if kind == "all" else {}
    fields: dict[str, Any] = {"sliding_window": window}
    if kind in ("switched", "chosen", "unrotated"):
        fields["use_sliding_window"] = True
    if kind in ("chosen", "pattern", "alternating"):
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        fields["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    return fields


def drawn_experts(draw: st.DrawFn, family: str, layers: int, *, grouped: bool) -> dict[str, Any]:
    """Draw the number of experts and the layers that have them."""
    known = BY_TYPE[family].experts
    if known is None:
        return {}
    count = draw(st.integers(2, 6))
    fields: dict[str, Any] = {known.count: count, "num_experts_per_tok": draw(st.integers(1, min(count, 4)))}
    if known.intermediate_size != "intermediate_size":
        fields[known.intermediate_size] = 32 if grouped else draw(st.integers(7, 40))
    if known.dense_layers:
        fields["decoder_sparse_step"] = draw(st.integers(1, 2))
        fields["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), max_size=1))
        fields["norm_topk_prob"] = draw(st.booleans())
    if known.listed_layers:
        fields["interleave_moe_layer_step"] = draw(st.integers(1, 2))
        fields["intermediate_size_mlp"] = 32 if grouped else draw(st.integers(7, 40))
    return fields


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Draw a family, its sizes, and what else the family lets vary."""
    family = draw(st.sampled_from(sorted(BY_TYPE)))
    known, quantization = BY_TYPE[family], draw(st.sampled_from([None, None, "int8", "int4", "fp8"]))
    grouped = quantization == "int4"
    sizes = drawn_sizes(draw, grouped=grouped)
    if family == "phi3":
        # Whose LongRoPE transformers checks as of heads that make up hidden_size.
        sizes["head_dim"] = sizes["hidden"] // (sizes["kv_heads"] * sizes["group"])
    fields: dict[str, Any] = {"tie": draw(st.booleans())}
    fields["rope_parameters"] = drawn_rope(draw, family, sizes["head_dim"])
    fields |= drawn_windows(draw, family, sizes["layers"])
    fields |= drawn_experts(draw, family, sizes["layers"], grouped=grouped)
    if known.unrotated_layers:
        bits = st.lists(st.integers(0, 1), min_size=sizes["layers"], max_size=sizes["layers"])
        fields["no_rope_layers"] = draw(bits)
    for field, allowed in (("attention_bias", known.has_attention_bias), ("mlp_bias", known.has_mlp_bias)):
        if allowed:
            fields[field] = draw(st.booleans())
    return Architecture(family, sizes, fields, quantization)


@dataclass(frozen=True)
class Job:
    """A request; `sampled` if it draws with a seed of its own."""

    prompt: int
    k: int | None
    max_tokens: int
    sampled: bool
    wait: int


def jobs(k: int) -> st.SearchStrategy[list[Job]]:
    job = st.builds(
        Job,
        st.integers(0, 8),
        st.one_of(st.none(), st.integers(0, k)),
        st.integers(1, LONGEST),
        st.booleans(),
        st.integers(0, 3),
    )
    return st.lists(job, min_size=1, max_size=6)


PROMPTS = [[token % VOCAB for token in prompt] for prompt in make_prompts()[:9]]


def submit(engine: Engine, index: int, job: Job, engine_k: int) -> Request:
    """Submit a request. Seeds depend on the request, so that no two have the same noise."""
    params = SamplingParams(
        temperature=0.9 if job.sampled else 0.0,
        top_p=0.95 if job.sampled else 1.0,
        seed=index if job.sampled else None,
        max_tokens=job.max_tokens,
        num_speculative_tokens=None if engine_k == 0 else job.k,
        ignore_eos=True,
        detokenize=False,
    )
    request = Request(index, PROMPTS[job.prompt], params, num_speculative_tokens=engine_k)
    engine.add_request(request)
    return request


def make(
    target: tuple[Path, str | None], draft: tuple[Path, str | None] | None, k: int, dtype: str, **fields: object
) -> Engine:
    """Make an engine. `target` and `draft` are pairs of folder and `quantization`."""
    (model, quantization), (drafting, own) = target, draft or (None, None)
    made = config(
        model,
        drafting,
        k=k,
        dtype=dtype,
        rule="coupled",
        quantization=quantization,
        draft_quantization=own,
        **fields,
    )
    return build(made, load_weights(made))


def alone(target: tuple[Path, str | None], dtype: str, index: int, job: Job) -> list[int]:
    """Return the text of a request that runs alone, without drafts, with its prompt in one chunk."""
    engine = make(target, None, 0, dtype, max_num_batched_tokens=512)
    assert engine.runner.is_native == (dtype == "float32")
    engine.runner.rule = "coupled"
    request = submit(engine, index, job, 0)
    run(engine)
    return request.output_token_ids


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@sweep(18)
@given(data=st.data())
def test_text_is_that_of_k_0(dtype: str, data: st.DataObject) -> None:
    """Check that the text is that of K = 0, greedy and sampled: eager in float64, and by native passes in fp32, there
    to the bit."""
    check(dtype, data.draw)


def check(dtype: str, draw: Callable[..., Any]) -> None:
    target = draw(architectures(), label="target")
    kind = draw(st.sampled_from(["close", "close", "other", "equal"]), label="draft")
    other = draw(architectures(), label="its architecture") if kind == "other" else target
    k = draw(st.integers(1, 6), label="K")
    fields, requests = draw(engine_settings(), label="engine"), draw(jobs(k), label="requests")
    with TemporaryDirectory() as folder:
        model = target.write(Path(folder) / "target", 1), target.quantization
        source = {
            "close": lambda: perturb_checkpoint(model[0], Path(folder) / "close", noise=0.05, seed=2),
            "other": lambda: other.write(Path(folder) / "other", 3),
            "equal": lambda: model[0],
        }[kind]()
        draft_format = draw(st.sampled_from([other.quantization, None]), label="draft's format")
        engine = make(model, (source, draft_format), k, dtype, **fields)
        poison(engine)
        submitted = []
        for i, job in enumerate(requests):
            submitted.append(submit(engine, i, job, k))
            for _ in range(job.wait):
                engine.step()
        run(engine)
        for i, (job, made) in enumerate(zip(requests, submitted, strict=True)):
            assert made.output_token_ids == alone(model, dtype, i, job), f"request {i}"
        # Others depend on the length of what transformers is fed.
        of_length = target.fields["rope_parameters"]["rope_type"] in ("dynamic", "longrope")
        if dtype == "float64" and target.quantization is None and not requests[0].sampled and not of_length:
            text = generate(load(model[0]), PROMPTS[requests[0].prompt], requests[0].max_tokens)
            assert submitted[0].output_token_ids == text

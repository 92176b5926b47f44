"""Models with gated delta nets or short convolutions that are divided among ranks: logits, states and texts of one
process, with snapshots, preemption and drafts."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from hf_reference import load
from hybrid_reference import float64
from models.harness import Feeder
from mtp_reference import add_head, fit
from specrs import LLM, SamplingParams
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.errors import InvalidConfigError, UnsupportedConfigError
from specrs.models.base import Model
from specrs.models.loader import open_checkpoint
from specrs.models.shards import Shard, ShardedTensors
from specrs.models.torch_loader import load_model
from torch import Tensor

from parallel.harness import engine_on_threads
from parallel.threads import on_ranks

VOCAB, TOKENS = 61, 11
SHAPE: dict[str, Any] = {"vocab": VOCAB, "hidden": 48, "intermediate": 48, "kv_heads": 2, "group": 1, "head_dim": 16}
KINDS = ["linear_attention", "linear_attention", "full_attention"]
THREE = {"linear_num_key_heads": 3, "linear_num_value_heads": 9, "kv_heads": 1, "group": 3}
CONVS = {"layer_types": ["conv", "full_attention", "conv"]}
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Qwen3.5": ("qwen3_5_text", 2, {}),
    "Qwen3.5, three value heads each": ("qwen3_5_text", 3, THREE),
    "Qwen3.5, experts": ("qwen3_5_moe_text", 2, {}),
    "Qwen3-Next": ("qwen3_next", 2, {"mlp_only_layers": [0]}),
    "Qwen3-Next on four ranks": (
        "qwen3_next",
        4,
        {"group": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    ),
    "LFM2": ("lfm2", 2, CONVS),
    "LFM2, experts, on three ranks": (
        "lfm2_moe",
        3,
        CONVS | {"kv_heads": 1, "group": 3, "moe_intermediate_size": 33, "conv_L_cache": 4},
    ),
}
FILES = ("Qwen3.5", "Qwen3.5, three value heads each", "Qwen3-Next", "LFM2", "LFM2, experts, on three ranks")
"""Variants that are also read from GGUF files, whose delta nets have other orders of heads."""


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """Compute everything in float64. Sums of ranks in another order then differ by 1e-14."""
    with float64():
        yield


def make(path: Path, variant: str, **fields: Any) -> Path:
    family, _, own = VARIANTS[variant]
    return make_checkpoint(path, family, seed=5, layers=3, **({"layer_types": KINDS} | SHAPE | own | fields))


def feed(model: Model) -> Tensor:
    """Feed a prompt in two chunks with a snapshot in the first, drafts of which one is accepted, the text after them,
    and the text from the snapshot again."""
    draw = random.Random(0)
    ids = [draw.randrange(VOCAB) for _ in range(30)]
    feeder = Feeder(model)
    found = [
        feeder.feed({0: [(ids[p], p) for p in range(15)]}, prompts=True, snapshots=((0, 9, 4),)),
        feeder.feed({0: [(ids[p], p) for p in range(15, 20)]}, prompts=True),
        feeder.feed({0: [(ids[20], 20), (ids[21], 21), (7, 22), (8, 23)]}),
        feeder.feed({0: [(ids[p], p) for p in range(22, 25)]}),
    ]
    feeder.cache.states.restore(0, 4)
    found.append(feeder.feed({0: [(ids[p], p) for p in range(9, 30)]}, prompts=True))
    return torch.cat(found)


def check_logits(path: Path, size: int) -> None:
    """Check that logits on ranks are those of the whole model up to the order of sums in float64: 3e-14 was
    measured."""
    whole = feed(load_model(path, dtype="float64"))
    first, *others = on_ranks(size, lambda ranks: feed(load_model(path, dtype="float64", device=ranks)))
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-12)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_whole_model(variant: str, tmp_path: Path) -> None:
    check_logits(make(tmp_path, variant), VARIANTS[variant][1])


@pytest.mark.parametrize("variant", FILES)
def test_logits_of_gguf_files_are_those_of_the_whole_model(variant: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", variant, vocab=400, mlp_only_layers=[])
    check_logits(write_gguf(source, tmp_path / "model.gguf"), VARIANTS[variant][1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rank_holds_its_part(variant: str, tmp_path: Path) -> None:
    """Check that the parts of all tensors have the shapes that follow from a rank's configuration, and that a rank has
    its share of a request's states."""
    size = VARIANTS[variant][1]
    config, checkpoint = open_checkpoint(make(tmp_path, variant), None, "auto")
    for shard in (Shard(rank, size) for rank in range(size)):
        parts, shapes = ShardedTensors(checkpoint, config, shard), shard.tensor_shapes(config)
        assert {name: parts.mapped(name).shape for name in shapes} == shapes
        assert shard.of_config(config).state_bytes == tuple(count // size for count in config.state_bytes)


@pytest.mark.parametrize(
    ("variant", "fields", "size", "field"),
    [
        ("Qwen3.5", {"kv_heads": 4}, 4, "linear_num_key_heads=2"),
        ("Qwen3.5", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}, 4, "num_attention_heads=2"),
        ("LFM2", {"hidden": 50, "kv_heads": 4}, 4, "hidden_size=50"),
        ("Qwen3.5", {"kv_heads": 3, "group": 2}, 2, "num_key_value_heads=3"),
        (
            "Qwen3.5, experts",
            {"shared_expert_intermediate_size": 57},
            2,
            "shared_expert_intermediate_size=57",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_rejected_before_any_rank_starts(
    variant: str, fields: dict[str, Any], size: int, field: str, tmp_path: Path
) -> None:
    folder = make(tmp_path, variant, **fields)
    config = EngineConfig(model=str(folder), tensor_parallel_size=size, device="cpu")
    message = rf"^tensor_parallel_size={size}: .* has {field}; allowed: its divisors"
    with pytest.raises(UnsupportedConfigError, match=message):
        build_engine(config, lead=lambda *_: pytest.fail("started"))


_random = random.Random(3)
# The last prompts begin like the second.
PROMPTS = [[_random.randrange(1, VOCAB) for _ in range(length)] for length in (6, 21, 12)]
PROMPTS += [PROMPTS[1][:17] + PROMPTS[0], PROMPTS[1]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
SEEDED = replace(GREEDY, temperature=1.0, seed=9)
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "earlier texts": {"method": "suffix", "num_speculative_tokens": 3},
    "a draft model": {"method": "draft_model", "num_speculative_tokens": 2},
    "the head": {"method": "mtp", "num_speculative_tokens": 3},
    "the head, some ids": {"method": "mtp", "num_speculative_tokens": 3, "draft_vocab_size": 40},
    "the head in parts": {"method": "mtp", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a target, whose MTP head was trained on the target's texts, and a draft model with the target's
    attention layer."""
    made = tmp_path_factory.mktemp("hybrids")
    add_head(make(made / "target", "Qwen3.5"), seed=4)
    make_checkpoint(made / "draft", "qwen3", seed=2, layers=1, **SHAPE)
    with float64():
        known = [prompt + text for prompt, text in zip(PROMPTS[:3], plain(made)[0][:3], strict=True)]
    fit(made / "target", load(made / "target", torch.float32), known, steps=16)
    return made


def settings(folder: Path, drafter: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    speculative = None
    if drafter is not None:
        model = {"model": str(folder / "draft")} if drafter["method"] == "draft_model" else {}
        speculative = drafter | model | {"rejection_sample_method": "coupled"}
    sizes = {"max_model_len": 48, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    own = {"model": str(folder / "target"), "dtype": "float64", "device": "cpu", "speculative_config": speculative}
    return own | sizes | fields


def texts(llm: LLM) -> tuple[list[list[int]], list[float]]:
    """Return greedy and seeded texts of all prompts, and the log probabilities of all of their tokens."""
    found, logprobs = [], []
    for params in (GREEDY, SEEDED):
        for output in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False):
            text = output.outputs[0]
            assert text.logprobs is not None
            found.append(text.token_ids)
            logprobs += [of[token].logprob for token, of in zip(text.token_ids, text.logprobs, strict=True)]
    return found, logprobs


@cache
def plain(folder: Path) -> tuple[list[list[int]], list[float]]:
    """Return the texts of one process without drafts and prefix caching, one request at a time."""
    return texts(LLM(**settings(folder, None, max_num_seqs=1, enable_prefix_caching=False)))


def check_texts(llm: LLM, folder: Path) -> None:
    """Check texts, and log probabilities up to the rounding of logits to float32."""
    (found, logprobs), (expected, known) = texts(llm), plain(folder)
    assert found == expected
    assert logprobs == pytest.approx(known, abs=1e-5)


def on_two_ranks(given: dict[str, Any]) -> contextlib.AbstractContextManager[Engine]:
    return engine_on_threads(EngineConfig.from_kwargs(tensor_parallel_size=2, **given))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_is_that_of_one_process(drafter: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check texts with drafts, in chunks, with prefix hits, and in a pool too small for all requests."""
    monkeypatch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 8)
    monkeypatch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)
    small = {"num_gpu_blocks_override": 14, "num_reserved_decode_tokens": 0}
    with on_two_ranks(settings(folder, DRAFTERS[drafter], **small)) as engine:
        llm, cached = LLM.from_engine(engine), [0]
        for _ in range(2):
            check_texts(llm, folder)
            cached.append(llm.stats().num_cached_tokens)
        engine.scheduler.check_integrity()
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert cached[2] > 2 * cached[1] > 0
    assert drafter == "none" or stats.accepted_tokens > 0


@pytest.mark.parametrize("variant", ["LFM2", "LFM2, experts, on three ranks"])
def test_texts_of_short_convolutions(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check texts with drafts, in chunks, with prefix hits, and in a pool too small for all requests."""
    monkeypatch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 8)
    monkeypatch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)
    make(tmp_path / "target", variant)
    small = {"num_gpu_blocks_override": 14, "num_reserved_decode_tokens": 0}
    given = settings(tmp_path, DRAFTERS["earlier texts"], **small)
    with engine_on_threads(EngineConfig.from_kwargs(tensor_parallel_size=VARIANTS[variant][1], **given)) as engine:
        llm = LLM.from_engine(engine)
        check_texts(llm, tmp_path)
        check_texts(llm, tmp_path)
        stats = llm.stats()
    assert stats.accepted_tokens > 0
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if "the head" in name])
def test_drafts_of_a_head_are_those_of_one_process(drafter: str, folder: Path) -> None:
    given = settings(folder, DRAFTERS[drafter])
    with on_two_ranks(given) as engine:
        split = LLM.from_engine(engine)
        check_texts(split, folder)
    given["speculative_config"]["draft_tensor_parallel_size"] = 1
    whole = LLM(**given)
    check_texts(whole, folder)
    assert split.stats().acceptance_histogram == whole.stats().acceptance_histogram


def test_ranks_of_a_machine_share_its_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that two ranks of a machine hold the states of as many requests, and as many snapshots, as one process. A
    rank has half of each state and half of the memory."""
    row, _ = load_model(folder / "target").state_bytes
    for module in ("backend", "kv_memory"):
        monkeypatch.setattr(f"specrs.backends.cpu.{module}.host_memory", lambda: 40 * row)
    given = settings(folder, None, max_num_seqs=None)
    whole = build_engine(EngineConfig.from_kwargs(**given)).config
    assert (whole.max_num_seqs, whole.state_cache_memory_bytes) == (10, 6 * row)
    with on_two_ranks(given) as engine:
        assert (engine.config.max_num_seqs, engine.config.state_cache_memory_bytes) == (10, 3 * row)
        check_texts(LLM.from_engine(engine), folder)
    with pytest.raises(InvalidConfigError, match=r"max_num_seqs=41: each request has .* allowed: at most 40"):
        build_engine(EngineConfig.from_kwargs(tensor_parallel_size=2, **given | {"max_num_seqs": 41}))


def test_embeddings(folder: Path) -> None:
    whole = LLM(**settings(folder, None))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    expected = [output.outputs.embedding for output in whole.embed(prompts, use_tqdm=False)]
    with on_two_ranks(settings(folder, None)) as engine:
        found = LLM.from_engine(engine).embed(prompts, use_tqdm=False)
    for output, other in zip(found, expected, strict=True):
        assert output.outputs.embedding == pytest.approx(other, abs=1e-6)

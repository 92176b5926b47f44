"""The CUDA runner against the CPU runner, step for step. Triton's interpreter runs the kernels.

Up to 64 rows take the fused kernels. The pair is as small as kernels allow, because a launch of the interpreter takes
a millisecond for each program.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoints import make_checkpoint, perturb_checkpoint
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.drafters.model import ModelPasses
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.ring import Header, RingSlot
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.core import DRAFTER_DEVICE, DRAFTERS
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.kernels.kv_scales import KVScales
from specrs.models.torch_decoder import TorchDecoder
from specrs.outputs import EngineStats
from specrs.sampling import SamplingParams
from specrs.speculative_config import SpeculativeConfig
from triton.runtime.interpreter import InterpretedFunction

from backends.cuda_engines import PROMPTS, SMALL, K, generate, serve_by_cuda, written_tensors

VOCAB = 61


@dataclasses.dataclass
class Pair:
    """A tiny pair in the weight layouts of both runners, and the same with weights changed by far more than rounding
    changes a pass."""

    target: Path
    draft: Path
    cpu: Weights
    gpu: Weights
    nudged: Weights

    def engine(
        self,
        *,
        gpu: bool,
        monkeypatch: pytest.MonkeyPatch,
        rule: str = "rejection",
        nudged: bool = False,
        method: str = "draft_model",
        **fields: Any,
    ) -> Engine:
        speculative = SpeculativeConfig(
            model=str(self.draft), num_speculative_tokens=K, rejection_sample_method=rule, max_model_len=30
        )
        if "ngram" in method:
            speculative = SpeculativeConfig(
                method=method,
                model=str(self.draft) if "draft_model" in method else None,
                num_speculative_tokens=K,
                prompt_lookup_min=1,
                prompt_lookup_max=2,
                rejection_sample_method=rule,
            )
            fields["max_steps_in_flight"] = 1
        # On a CPU torch computes the passes.
        config = EngineConfig(
            model=str(self.target),
            dtype="float32",
            speculative_config=speculative,
            enforce_eager=not gpu,
            **(SMALL | fields),
        )
        with monkeypatch.context() as patch:
            if gpu:
                serve_by_cuda(patch)
            return build_engine(config, self.nudged if nudged else self.gpu if gpu else self.cpu)


SHAPE = {"layers": 1, "hidden": 32, "intermediate": 32, "kv_heads": 1, "head_dim": 16, "vocab": VOCAB}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def make_pair(folder: Path, family: str = "qwen3", **fields: Any) -> Pair:
    target = make_checkpoint(folder / "target", family, seed=1, **(SHAPE | fields))
    return load_pair(folder, target, perturb_checkpoint(target, folder / "draft", noise=0.3, seed=2))


def load_pair(folder: Path, target: Path, draft: Path) -> Pair:
    config = EngineConfig(
        model=str(target),
        device="cpu",
        dtype="float32",
        enforce_eager=True,
        speculative_config=SpeculativeConfig(model=str(draft), num_speculative_tokens=K),
    )
    cpu = load_weights(config)
    gpu = load_weights(config)
    off = [perturb_checkpoint(p, folder / f"nudged_{p.name}", noise=1e-5, seed=3) for p in (target, draft)]
    speculative = SpeculativeConfig(model=str(off[1]), num_speculative_tokens=K)
    nudged = load_weights(
        EngineConfig(
            model=str(off[0]), device="cpu", dtype="float32", enforce_eager=True, speculative_config=speculative
        )
    )
    return Pair(target, draft, cpu, gpu, nudged)


def with_quantized_cache(pair: Pair, codes: torch.dtype) -> Pair:
    """Return the pair with KV caches quantized to the dtype `codes`. Their scales are no powers of two."""

    def quantized(weights: Weights) -> Weights:
        models = []
        for model in weights.models:
            held = cast("TorchDecoder", model).weights
            layers = tuple(dataclasses.replace(layer, kv_scales=KVScales(0.03, 0.07)) for layer in held.layers)
            models.append(TorchDecoder(dataclasses.replace(held, layers=layers, cache_dtype=codes)))
        return Weights(models[0], LoadedDraftModel(models[1]))

    return dataclasses.replace(pair, cpu=quantized(pair.cpu), gpu=quantized(pair.gpu), nudged=quantized(pair.nudged))


def assert_no_ties(pair: Pair, theirs: list[Request], params: list[SamplingParams], **settings: Any) -> None:
    """Check that no token of the sample depends on rounding: with weights changed by more than rounding, the tokens are
    the same."""
    prompts = [request.prompt_token_ids for request in theirs]
    nudged = generate(pair.engine(gpu=False, nudged=True, **settings), params, len(theirs[0].output_token_ids), prompts)
    for one, other in zip(nudged, theirs, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert one.acceptance.histogram == other.acceptance.histogram


def assert_same(mine: list[Request], theirs: list[Request]) -> None:
    for ours, reference in zip(mine, theirs, strict=True):
        assert ours.error is None
        assert ours.output_token_ids == reference.output_token_ids
        assert ours.acceptance.histogram == reference.acceptance.histogram
        assert (ours.logprobs is None) == (reference.logprobs is None)
        for got, expected in zip(ours.logprobs or (), reference.logprobs or (), strict=True):
            assert (got.token_id, got.rank, got.top_ids) == (expected.token_id, expected.rank, expected.top_ids)
            assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)


def assert_same_counts(ours: EngineStats, cpus: EngineStats) -> None:
    """Check that all counts are equal except one: a GPU runs draft passes that no row needs, because it does not know
    where texts end."""
    assert ours.draft_passes >= cpus.draft_passes
    assert dataclasses.replace(ours, draft_passes=cpus.draft_passes) == cpus


GREEDY = SamplingParams(temperature=0.0)
# These tokens in this order, if each draft is penalised by those before it.
PENALISED = SamplingParams(
    temperature=0.0,
    presence_penalty=2.0,
    frequency_penalty=2.0,
    logit_bias={3: 20.0, 8: 19.2, 15: 18.4, 20: 17.6, 27: 16.8},
)


def test_kernels_are_launched_on_the_stream_of_the_runner(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the runner launches on its own stream's device, in whatever thread, because Triton launches on the
    thread's current device."""
    engine, own = pair.engine(gpu=True, monkeypatch=monkeypatch), object()
    entered: list[object] = []
    launch, current = InterpretedFunction.run, []

    @contextlib.contextmanager
    def stream(chosen: object) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        entered.append(current[-1] if current else None)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(engine.runner, "_stream", own)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(InterpretedFunction, "run", run)
    generate(engine, [GREEDY] * 3, 2)
    assert len(entered) > 40
    assert all(one is own for one in entered)


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        ("rejection", [GREEDY, GREEDY.replace(num_speculative_tokens=1), GREEDY]),
        # Drafts of the CPU are cut exactly, those of a GPU on a grid: without a cut, both draw the same drafts.
        ("rejection", [SamplingParams(temperature=0.8), GREEDY, SamplingParams(temperature=1.3)]),
        ("coupled", [SamplingParams(temperature=0.8, top_p=0.9), GREEDY, SamplingParams(temperature=0.9, top_k=9)]),
        (
            "coupled",
            [
                SamplingParams(temperature=0.9, presence_penalty=0.7, logit_bias={3: 2.0}, logprobs=2),
                SamplingParams(temperature=0.0, repetition_penalty=1.3, bad_words=None),
                SamplingParams(temperature=0.7, min_tokens=3, stop_token_ids=list(range(20)), prompt_logprobs=1),
            ],
        ),
    ],
    ids=["greedy", "rejection", "coupled", "adjusted"],
)
def test_same_tokens(pair: Pair, rule: str, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [pair.engine(gpu=gpu, rule=rule, monkeypatch=monkeypatch) for gpu in (True, False)]
    assert isinstance(engines[0].runner, CudaRunner)
    mine, theirs = (generate(engine, params) for engine in engines)
    assert_no_ties(pair, theirs, params, rule=rule, monkeypatch=monkeypatch)
    assert_same(mine, theirs)
    assert_same_counts(engines[0].stats(), engines[1].stats())
    assert sum(sum(request.acceptance.histogram) for request in mine) > 0


@pytest.mark.parametrize(("codes", "rule"), [(torch.float8_e4m3fn, "rejection"), (torch.float8_e5m2, "coupled")])
def test_a_quantized_cache(pair: Pair, codes: torch.dtype, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check quantized KV caches of target and draft, whose scales are no powers of two. Unwritten positions hold
    NaN."""
    as_codes = with_quantized_cache(pair, codes)
    params = [GREEDY, SamplingParams(temperature=0.8) if rule == "coupled" else GREEDY, GREEDY]
    engines = [as_codes.engine(gpu=gpu, rule=rule, monkeypatch=monkeypatch) for gpu in (True, False)]
    runner = engines[0].runner
    assert isinstance(runner, CudaRunner)
    for cache in (runner.ctx.kv_cache, cast("ModelPasses", runner.ctx.drafter).kv_cache):
        assert {layer.dtype for layer in cache.layers} == {codes}
        for layer in cache.layers:
            layer.fill_(torch.nan)
    mine, theirs = (generate(engine, params) for engine in engines)
    assert_same(mine, theirs)
    assert_same_counts(engines[0].stats(), engines[1].stats())
    assert sum(sum(request.acceptance.histogram) for request in mine) > 0


def test_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check layers with a window of 6. Blocks outside the window go to other requests while their request goes on: the
    pool has no room for three texts."""
    pair = make_pair(tmp_path, "mistral", sliding_window=6)
    engines = [pair.engine(gpu=gpu, monkeypatch=monkeypatch, num_gpu_blocks_override=13) for gpu in (True, False)]
    runner = engines[0].runner
    assert isinstance(runner, CudaRunner)
    assert runner.ctx.draft_start is not None
    prompts = [PROMPTS[0] + [8, 8, 19, 30, 2], PROMPTS[1], PROMPTS[2]]
    mine, theirs = (generate(engine, [GREEDY] * 3, 8, prompts) for engine in engines)
    assert_same(mine, theirs)
    assert runner.ctx.draft_start.any(), "the draft was fed the window of a prompt alone"
    assert sum(sum(request.acceptance.histogram) for request in mine) > 0


@pytest.mark.parametrize(
    "family",
    ["olmo2", "phi3", "granite", "smollm3", "gemma3_text", "qwen3_moe", "mixtral", "ministral3", "llama4_text"],
)
def test_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check each family with a layer of every kind that it has, such as a layer without RoPE in SmolLM3 and two kinds
    of RoPE in Gemma."""
    fields = {"layers": 1 + (family in ("smollm3", "gemma3_text", "llama4_text")), "hidden": 32, "group": 2}
    pair = make_pair(tmp_path, family, **fields)
    engines = [pair.engine(gpu=gpu, monkeypatch=monkeypatch) for gpu in (True, False)]
    assert isinstance(engines[0].runner, CudaRunner)
    mine, theirs = (generate(engine, [GREEDY] * 2, 3, PROMPTS[1:]) for engine in engines)
    assert_same(mine, theirs)
    assert sum(sum(request.acceptance.histogram) for request in mine) > 0


NARROW = [7, 9, 12]  # tokens of the first prompts: what they allow is drafted, and often stands


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_drafts_that_the_record_brings(pair: Pair, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check drafts from the host, which come in the record: verification without draft passes and draft buffers, for
    every kind of row."""
    params = [
        SamplingParams(temperature=0.8, allowed_token_ids=NARROW),
        GREEDY.replace(num_speculative_tokens=2),
        SamplingParams(temperature=1.1, top_k=3),
    ]
    settings: dict[str, Any] = {"rule": rule, "method": "ngram", "monkeypatch": monkeypatch}
    engines = [pair.engine(gpu=gpu, **settings) for gpu in (True, False)]
    runner = engines[0].runner
    assert isinstance(runner, CudaRunner)
    assert runner.ctx.buffers.draft_logits.numel() == 0
    assert not list(runner.buckets.draft_passes())
    mine, theirs = (generate(engine, params, 9) for engine in engines)
    assert_no_ties(pair, theirs, params, **settings)
    assert_same(mine, theirs)
    assert_same_counts(engines[0].stats(), engines[1].stats())
    assert sum(sum(request.acceptance.histogram[1:]) for request in mine) > 0
    plain = [own.replace(num_speculative_tokens=0) for own in params]
    for with_drafts, without in zip(mine, generate(pair.engine(gpu=False, **settings), plain, 9), strict=True):
        assert with_drafts.output_token_ids == without.output_token_ids


# The other two pairs would take the interpreter a minute more.
@pytest.mark.parametrize(("rule", "adjusted"), [("rejection", False), ("coupled", True)])
def test_drafts_of_the_host_next_to_drafts_of_passes(
    pair: Pair, rule: str, adjusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check steps that mix drafts from the host with drafts of a draft model, have one of them alone, or rows without
    drafts; for every kind of row."""
    params = [
        SamplingParams(temperature=0.8, allowed_token_ids=NARROW if adjusted else None),
        GREEDY,
        SamplingParams(temperature=1.2, presence_penalty=0.5 if adjusted else 0.0),
    ]
    settings: dict[str, Any] = {"rule": rule, "method": "ngram,draft_model", "monkeypatch": monkeypatch}
    engines = [pair.engine(gpu=gpu, **settings) for gpu in (True, False)]
    seen: list[frozenset[int]] = []

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        record, count = slot.record_arrays, header.num_decode
        pairs = zip(record["seq_drafter"][:count], record["seq_k"][:count], strict=True)
        seen.append(frozenset(int(drafter) for drafter, k in pairs if k))

    engines[0].watch = watch
    mine, theirs = (generate(engine, params, 16) for engine in engines)
    assert_no_ties(pair, theirs, params, **settings)
    assert_same(mine, theirs)
    assert_same_counts(engines[0].stats(), engines[1].stats())
    ngram = DRAFTERS.index("ngram")
    assert frozenset((DRAFTER_DEVICE, ngram)) in seen
    assert frozenset((ngram,)) in seen
    if rule == "coupled":
        plain = [own.replace(num_speculative_tokens=0) for own in params]
        for with_drafts, without in zip(mine, generate(pair.engine(gpu=False, **settings), plain, 16), strict=True):
            assert with_drafts.output_token_ids == without.output_token_ids


def test_predictions_next_to_drafts_of_passes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a request's own predictions reach the device next to drafts of a draft model, with one step in
    flight."""
    settings: dict[str, Any] = {"max_steps_in_flight": 1, "monkeypatch": monkeypatch}
    plain = generate(pair.engine(gpu=False, **settings), [GREEDY] * 3, 12)
    params = [GREEDY, GREEDY.replace(prediction=plain[1].output_token_ids), GREEDY]
    mine, theirs = (generate(pair.engine(gpu=gpu, **settings), params, 12) for gpu in (True, False))
    assert_same(mine, theirs)
    assert [request.output_token_ids for request in mine] == [request.output_token_ids for request in plain]
    assert mine[1].num_predicted_tokens >= K
    assert mine[1].acceptance.histogram[K] > 0


def test_drafts_are_penalised_by_drafts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = (
        generate(pair.engine(gpu=gpu, monkeypatch=monkeypatch), [PENALISED] * 3, 8) for gpu in (True, False)
    )
    assert_no_ties(pair, theirs, [PENALISED] * 3, monkeypatch=monkeypatch)
    assert_same(mine, theirs)
    assert any(sum(request.acceptance.histogram[2:]) for request in mine), "two drafts in a row were accepted"


def test_a_drafter_that_raises_costs_drafts_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a drafter that raises costs only the drafts of its step: in the pass over committed tokens, and in
    later passes of two steps."""
    engine = pair.engine(gpu=True, rule="coupled", monkeypatch=monkeypatch, max_steps_in_flight=1)
    calls = 0
    assert isinstance(engine.drafter, ModelPasses)
    model = engine.drafter.model
    forward = type(model).forward

    def raising(own: Any, *args: Any, **fields: Any) -> Any:
        nonlocal calls
        found = forward(own, *args, **fields)
        calls += own is model  # the target's passes are of the same class
        if own is model and calls in (1, 6, 11):
            raise RuntimeError("forward")
        return found

    monkeypatch.setattr(type(model), "forward", raising)
    params = [GREEDY, GREEDY.replace(presence_penalty=0.3), SamplingParams(temperature=0.9)]
    mine = generate(engine, params, 9)
    plain = [own.replace(num_speculative_tokens=0) for own in params]
    theirs = generate(pair.engine(gpu=False, rule="coupled", monkeypatch=monkeypatch), plain, 9)
    assert [request.output_token_ids for request in mine] == [request.output_token_ids for request in theirs]
    assert engine.stats().draft_errors == {"draft_model": 3}
    assert engine.stats().drafts > 2


def test_nothing_depends_on_stale_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reference = (pair.engine(gpu=gpu, monkeypatch=monkeypatch) for gpu in (True, False))
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    execute = runner.execute

    def poisoned(*args: Any) -> None:
        poison(runner)
        execute(*args)

    with torch.inference_mode():
        for cache in (runner.kv_cache, runner.ctx.drafter.kv_cache):  # type: ignore[union-attr]
            for layer in cache.layers:
                layer.fill_(torch.nan)
    monkeypatch.setattr(runner, "execute", poisoned)
    theirs = generate(reference, [GREEDY] * 3, 4)
    assert_no_ties(pair, theirs, [GREEDY] * 3, monkeypatch=monkeypatch)
    assert_same(generate(engine, [GREEDY] * 3, 4), theirs)


@torch.inference_mode()
def poison(runner: CudaRunner) -> None:
    """Fill buffers, workspaces and results, which a step must not read before it writes them, with NaN or invalid
    values. Counters stay zero."""
    ctx = runner.ctx
    constant = {"uniform_start", "draft_logits"}
    tensors = [tensor for name, tensor in ctx.buffers.tensors().items() if name not in constant]
    tensors += [ctx.record.results, ctx.buffers.draft_logits]
    assert isinstance(ctx.drafter, ModelPasses)
    for model in (ctx.target, ctx.drafter.model):
        assert isinstance(model, CudaDecoder)
        tensors += written_tensors(model.workspace)
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**30))

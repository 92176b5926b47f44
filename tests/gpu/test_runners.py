"""Whole, chained and eager steps on a GPU: the same tokens, no synchronisation, no allocation, no stale reads."""

import warnings

import pytest
import torch
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.drafters.model import ModelPasses
from specrs.backends.cuda.runner import CudaRunner
from specrs.core import InvalidResultsError
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.errors import EngineError
from specrs.sampling import SamplingParams

from .conftest import MakeEngine
from .texts import GREEDY, VOCAB, K, exhaust, generate, share_of_equal, submit

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=50)


def runner_of(engine: Engine) -> CudaRunner:
    assert isinstance(engine.runner, CudaRunner)
    return engine.runner


def only_chained(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(runner_of(engine).buckets, "whole", lambda *_: None)
    return engine


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_three_runners_write_the_same(
    make_engine: MakeEngine, rule: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = [params, params.replace(num_speculative_tokens=2), GREEDY, params, params.replace(num_speculative_tokens=0)]
    whole = generate(make_engine(rule=rule), batch)
    assert generate(only_chained(make_engine(rule=rule), monkeypatch), batch) == whole
    # Eager steps are not padded: other row counts, so other tiles of the same sums; only fp32 near-ties may differ.
    eager = generate(make_engine(rule=rule, enforce_eager=True), batch)
    assert share_of_equal(eager, whole) > 0.95
    assert generate(make_engine(rule=rule), batch) == whole, "the same steps give the same bits"


@pytest.mark.parametrize("k", [0, 1, K])
def test_the_cpu_loop_writes_the_same(make_engine: MakeEngine, k: int) -> None:
    batch = [GREEDY.replace(num_speculative_tokens=k)] * 6
    # fp32 products add in other orders: texts part at near-ties only.
    assert share_of_equal(generate(make_engine(), batch), generate(make_engine("cpu"), batch)) > 0.97


def test_coupled_text_does_not_depend_on_k(make_engine: MakeEngine) -> None:
    texts = [generate(make_engine(rule="coupled"), [SAMPLED.replace(num_speculative_tokens=k)] * 6) for k in (0, 1, K)]
    for text in texts[1:]:
        assert share_of_equal(text, texts[0]) > 0.95


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_steady_state_neither_waits_nor_allocates(make_engine: MakeEngine, params: SamplingParams) -> None:
    engine = make_engine()
    submit(engine, [params] * 4, 350)
    for _ in range(20):
        engine.step()
    refuse_synchronisation()
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        steps = engine.runner.num_target_passes
        while engine.runner.num_target_passes < steps + 50:
            engine.step()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    finally:
        torch.cuda.set_sync_debug_mode("default")


def refuse_synchronisation() -> None:
    """Make every call that waits for the device raise. PyTorch warns once that this mode is a beta feature."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode", category=UserWarning)
        torch.cuda.set_sync_debug_mode("error")


def test_two_hundred_iterations_allocate_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    submit(engine, [GREEDY.replace(num_speculative_tokens=0)], 300)
    for _ in range(20):
        engine.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(200):
        engine.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_poison_between_steps_has_no_effect(make_engine: MakeEngine, params: SamplingParams) -> None:
    expected = generate(make_engine(), [params] * 3)
    engine = make_engine()
    runner, execute = runner_of(engine), engine.runner.execute

    def poisoned(*args: object) -> None:
        torch.cuda.synchronize()
        poison(runner)
        torch.cuda.synchronize()
        execute(*args)  # type: ignore[arg-type]

    engine.runner.execute = poisoned  # type: ignore[method-assign]
    assert generate(engine, [params] * 3) == expected


@torch.inference_mode()
def poison(runner: CudaRunner) -> None:
    ctx = runner.ctx
    tensors = [t for name, t in ctx.buffers.tensors().items() if name != "uniform_start"] + [ctx.record.results]
    scratch = ctx.scratch
    tensors += [getattr(scratch, name) for name in scratch.__slots__]
    assert isinstance(ctx.drafter, ModelPasses)
    for model in (ctx.target, ctx.drafter.model):
        assert isinstance(model, CudaDecoder)
        for name in ("hidden", "normed", "delta", "qkv", "attended", "gate_up", "activated", "partials", "stats"):
            tensors.append(getattr(model.workspace, name))
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**30))


def test_a_row_driven_past_its_limit_stays_in_its_blocks(make_engine: MakeEngine) -> None:
    """Check that a row driven past its limit stays in its blocks. The host plans it once more before it learns the end;
    the device stops at its own limit, and the neighbour's KV keeps its bits."""
    engine = make_engine()
    requests = submit(engine, [GREEDY] * 2, 200)
    while any(not request.output_token_ids for request in requests):
        engine.step()
    torch.cuda.synchronize()
    ctx = runner_of(engine).ctx
    with torch.inference_mode():
        row = int(ctx.state.num_tokens[:2].argmax())
        ctx.state.limit[row] = ctx.state.num_tokens[row] + 1
        neighbour = ctx.state.block_table[1 - row, : int(ctx.state.num_tokens[1 - row]) // engine.config.block_size]
        before = [layer[neighbour].clone() for layer in ctx.kv_cache.layers]
        length = int(ctx.state.limit[row])
    with pytest.raises(InvalidResultsError, match="finish_reason"):
        exhaust(engine)
    torch.cuda.synchronize()
    assert int(ctx.state.num_tokens[row]) == length
    assert not bool(ctx.state.active[row])
    for layer, was in zip(ctx.kv_cache.layers, before, strict=True):
        assert layer[neighbour].equal(was)


def test_nan_ends_one_request_and_leaves_the_others(make_engine: MakeEngine) -> None:
    """Check that NaN in one request's KV block ends that request with a reason; other requests and the prefix cache
    stay clean."""
    expected = generate(make_engine(), [GREEDY] * 2)
    engine = make_engine()
    requests = submit(engine, [GREEDY] * 2, 60)
    while any(not request.output_token_ids for request in requests):
        engine.step()
    torch.cuda.synchronize()
    ctx = runner_of(engine).ctx
    with torch.inference_mode():
        length = len(requests[0].prompt_token_ids)
        rows = [r for r in range(2) if int(ctx.state.tokens[r, 0]) == requests[0].prompt_token_ids[0]]
        ctx.kv_cache.layers[0][ctx.state.block_table[rows[0], (length - 1) // engine.config.block_size]] = torch.nan
    while engine.has_unfinished():
        engine.step()
    assert isinstance(requests[0].error, EngineError)
    assert "not finite" in str(requests[0].error)
    assert requests[1].error is None
    assert requests[1].output_token_ids == expected[1]
    assert generate(engine, [GREEDY] * 2) == expected, "no poisoned block is found by its prefix"


@pytest.mark.parametrize("max_num_seqs", [8, 32])
def test_merged_steps_write_the_same(
    make_engine: MakeEngine, max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that prompts that arrive one after the other run in verification passes, with more than 64 rows for 32
    requests, and write the same."""
    texts, merged = [], list[bool]()
    for merges in (True, False):
        engine = make_engine(max_num_seqs=max_num_seqs, num_gpu_blocks_override=600)
        if not merges:
            monkeypatch.setattr(runner_of(engine).buckets, "merged", lambda *_: None)
        engine.watch = lambda slot, _header, _ms: merged.append(slot.merged)
        requests = []
        for i in range(max_num_seqs):
            prompt = [(7 * i + 3 * j) % VOCAB for j in range(3 + i % 20)]
            params = GREEDY.replace(max_tokens=60, ignore_eos=True)
            requests.append(Request(i, prompt, params, num_speculative_tokens=K, seed=i))
            engine.add_request(requests[-1])
            engine.step()
        exhaust(engine)
        assert all(request.error is None for request in requests)
        texts.append([request.output_token_ids for request in requests])
        assert (sum(merged) > 4) == merges
        merged.clear()
    assert share_of_equal(*texts) > 0.95


def test_a_batch_beyond_the_buckets_warns_once(make_engine: MakeEngine) -> None:
    engine = make_engine(cudagraph_capture_sizes=(1, 2))
    assert runner_of(engine).buckets.batches == [1, 2]
    with pytest.warns(UserWarning, match="beyond the captured sizes") as caught:
        texts = generate(engine, [GREEDY] * 5)
    assert len(caught) == 1
    assert share_of_equal(texts, generate(make_engine(), [GREEDY] * 5)) > 0.95


def test_every_graph_is_captured(make_engine: MakeEngine) -> None:
    runner = runner_of(make_engine())
    graphs, buckets = runner.graphs, runner.buckets
    assert graphs is not None
    assert buckets.batches == [1, 2, 4, 8]
    merged, chunks = list(buckets.merged_shapes()), list(buckets.chunk_shapes())
    assert merged
    assert chunks
    assert all(shape in graphs for shape in merged)
    assert all((kind, shape) in graphs for kind in ("prompts", "catch up") for shape in chunks)
    for shape in buckets.whole_shapes():
        assert shape in graphs
    for batch, i, logits_mode in buckets.draft_passes():
        assert ("draft", batch, i, logits_mode) in graphs
    for batch, rows, greedy in buckets.verify_passes():
        assert ("verify", batch, rows, greedy) in graphs


def test_memory_is_sized_from_what_is_left(make_engine: MakeEngine) -> None:
    engine = make_engine(num_gpu_blocks_override=None, gpu_memory_utilization=0.2)
    assert engine.scheduler.num_blocks == 8 * (512 // 16), "no more than every request can use"
    free, total = torch.cuda.mem_get_info()
    assert free > 0.5 * total
    with pytest.raises(Exception, match=r"gpu_memory_utilization=.*GiB too little"):
        make_engine(num_gpu_blocks_override=None, gpu_memory_utilization=1e-4)

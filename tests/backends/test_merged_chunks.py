"""Prompt chunks in the verification pass, after its rows: the CPU runner's tokens, and for decoding sequences the bits
that they have without chunks.

As in `test_cuda_runner`, kernels are run by Triton's interpreter, and a replay runs what it would replay.
"""

import dataclasses
from typing import Any

import pytest
import specrs.backends.cuda.attention as attention
import torch
from engine.harness import poison as fill_pools
from specrs.backends.cuda import build, products, shapes
from specrs.backends.cuda.chunk_buffers import ChunkBuffers
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.iteration import run_merged, verify_pass
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.cuda.shapes import MERGED_ROWS, ChunkShape, LogitsMode, MergedRows, MergedShape
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.kernels.cuda.attention_config import MAX_VERIFY_ROWS
from specrs.models.inputs import ChunkRows, PassInputs
from specrs.models.torch_decoder import TorchFacts
from specrs.sampling import SamplingParams

from .cuda_engines import Graphs, K, give_graphs
from .test_cuda_groups import one_group
from .test_cuda_groups import pair as grouped  # noqa: F401 (a fixture)
from .test_cuda_runner import GREEDY, Pair, assert_same, assert_same_counts, pair, poison  # noqa: F401 (a fixture)

# One and two tokens, what fits after verification, and what does not.
PROMPTS = [[5, 9, 2, 33, 7], [60], [8, 8, 19, 30, 2, 40, 3, 22, 12], [7, 1], [11] * 26]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)
FIELDS: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 60}


NUM_TOKENS = 6


def arrive(engine: Engine, params: list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[Request]:
    """Let each prompt arrive one step after the previous one, and run all to their ends."""
    requests = [
        Request(i, prompt, own.replace(max_tokens=NUM_TOKENS, ignore_eos=True), num_speculative_tokens=K, seed=100 + i)
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]
    for request in requests:
        engine.add_request(request)
        engine.step()
    while engine.has_unfinished():
        engine.step()
    engine.scheduler.check_integrity()
    return requests


def merged(graphs: Graphs) -> list[MergedShape]:
    return [key for key in graphs.replayed if isinstance(key, MergedShape)]


@pytest.mark.parametrize(
    ("rule", "params", "fields"),
    [
        ("rejection", [GREEDY] * 5, {}),
        ("rejection", [GREEDY] * 5, {"max_num_batched_tokens": 12}),
        ("coupled", [SAMPLED, GREEDY, SAMPLED, SAMPLED, GREEDY], {}),
        ("rejection", [own.replace(num_speculative_tokens=0) for own in (GREEDY, SAMPLED) * 2 + (GREEDY,)], {}),
        ("rejection", [GREEDY] * 5, {"method": "ngram"}),
    ],
    ids=["greedy", "short chunks", "sampled", "without drafts", "drafts of the host"],
)
def test_same_tokens(
    pair: Pair,  # noqa: F811
    rule: str,
    params: list[SamplingParams],
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check tokens, with invalid values in buffers and workspaces before every step."""
    mine, theirs = (pair.engine(gpu=gpu, rule=rule, monkeypatch=monkeypatch, **(FIELDS | fields)) for gpu in (1, 0))
    graphs = give_graphs(mine)
    runner = mine.runner
    assert isinstance(runner, CudaRunner)
    if "method" not in fields:
        execute = runner.execute

        def poisoned(*args: Any) -> None:
            poison(runner)
            execute(*args)

        monkeypatch.setattr(runner, "execute", poisoned)
    rode: list[bool] = []
    mine.watch = lambda slot, header, ms: rode.append(slot.merged)  # what such steps take is not learnt from
    assert_same(arrive(mine, params), arrive(theirs, params))
    assert sum(rode) == len(merged(graphs))
    ours, cpus = mine.stats(), theirs.stats()
    assert cpus.target_passes - ours.target_passes == len(merged(graphs)) > 1
    assert_same_counts(dataclasses.replace(ours, target_passes=cpus.target_passes), cpus)


def few_rows(patch: pytest.MonkeyPatch) -> None:
    """Treat passes of more than 8 rows as those whose products are not fused, and divide the row counts of all graphs
    by eight."""
    totals, more = (tuple(size // 8 for size in sizes) for sizes in (MERGED_ROWS.totals, MERGED_ROWS.more))
    patch.setattr(build, "MERGED_ROWS", MergedRows(totals, more))
    patch.setattr(shapes, "_LEAST_CHUNK_ROWS", 1)
    patch.setattr(products, "MAX_ROWS", 8)


def wide_texts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Request], list[Request], list[int]]:  # noqa: F811
    """Return requests run on the CUDA runner such that each size of wide graphs occurs, the same requests on the CPU
    runner, and the sizes."""
    fields: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 40,
        "num_gpu_blocks_override": 160,
        "max_model_len": 32,
    }
    mine, theirs = (pair.engine(gpu=gpu, monkeypatch=monkeypatch, **fields) for gpu in (1, 0))
    graphs = give_graphs(mine)
    params, lengths = [GREEDY] * 8, (5, 6, 3, 1, 13, 3, 9, 2)
    prompts = [[(7 * i + 3 * j) % 59 + 1 for j in range(length)] for i, length in enumerate(lengths)]
    ours, cpus = (arrive(engine, params, prompts) for engine in (mine, theirs))
    return ours, cpus, sorted({shape.rows for shape in merged(graphs)})


def test_in_wide_passes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    few_rows(monkeypatch)
    ours, cpus, rows = wide_texts(pair, monkeypatch)
    assert_same(ours, cpus)
    assert len(rows) >= 3, rows
    assert set(rows) <= {size // 8 for size in MERGED_ROWS.totals}


def test_a_bucket_that_drops_the_last_chunk_row_is_seen(
    pair: Pair,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_rows(monkeypatch)
    fill = ChunkBuffers.fill

    def dropping(self: ChunkBuffers, given: PassInputs, shape: ChunkShape) -> PassInputs:
        made = fill(self, given, shape)
        last = len(given.input_ids) - 2 + (shape.rows > len(given.input_ids))
        made.slots[max(0, last)] = -1
        return made

    monkeypatch.setattr(ChunkBuffers, "fill", dropping)
    with pytest.raises(AssertionError):
        assert_same(*wide_texts(pair, monkeypatch)[:2])


@torch.inference_mode()
@pytest.mark.parametrize("total", [MERGED_ROWS.totals[1], MERGED_ROWS.totals[6], MERGED_ROWS.totals[-1]])
def test_in_passes_of_as_many_rows_as_a_gpu_has(pair: Pair, total: int) -> None:  # noqa: F811
    """Check a merged pass of `total` rows, a size that passes have on a GPU: two requests of 33 rows, and a prompt
    chunk of all other rows. Hidden states and KV equal those of one pass for the requests and another for the chunk."""
    weights, made = pair.gpu.target, []
    assert isinstance(weights, TorchFacts)
    width, ends = -(-total // 16), (33, 66, total)
    table = torch.arange(3 * width).view(3, width)
    rows = torch.arange(total)
    sequence = torch.bucketize(rows, torch.tensor(ends), right=True)
    positions = rows - torch.tensor((0, *ends))[sequence]
    given = PassInputs(
        input_ids=(7 * rows) % 61,
        positions=positions,
        slots=table[sequence, positions // 16] * 16 + positions % 16,
        q_start=torch.tensor([0, 33, 66]),
        block_table=table[:2],
        max_q_len=33,
        max_context=total,
    )
    q_start, own = torch.tensor([0, total - 66]), table[2:]
    chunks = ChunkRows(66, q_start, own, None, total - 66, 2)
    parts = [
        dataclasses.replace(given, **{name: getattr(given, name)[part] for name in ("input_ids", "positions", "slots")})
        for part in (slice(0, 66), slice(66, total))
    ]
    parts[1] = dataclasses.replace(parts[1], q_start=q_start, block_table=own, max_q_len=total - 66)
    for passes in ([dataclasses.replace(given, chunks=chunks)], parts):
        model = CudaDecoder.allocate(weights.weights, total, 4)
        cache = weights.allocate_cache(3 * width, 16)
        states = torch.cat([model.forward(one, cache).final.clone() for one in passes])
        made.append((states, torch.stack(cache.layers)[:, :-1]))
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_in_every_group(
    grouped: Pair,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check layers of three windows with KV full of NaN: chunks use the slots and block tables of each layer's
    group."""
    fields = FIELDS | {"num_gpu_blocks_override": 40, "num_reserved_decode_tokens": 0, "monkeypatch": monkeypatch}
    mine = grouped.engine(gpu=True, **fields)
    fill_pools(mine)
    graphs = give_graphs(mine)
    theirs = one_group(grouped, **fields)
    for one, other in zip(arrive(mine, [GREEDY] * 5), arrive(theirs, [GREEDY] * 5), strict=True):
        assert one.error is None
        assert one.output_token_ids == other.output_token_ids
    assert merged(graphs)


@pytest.mark.parametrize("is_end", [True, False])
def test_a_chunk_that_is_not_finite_ends_its_request_alone(
    pair: Pair,  # noqa: F811
    is_end: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a chunk with NaN ends its own request alone. A chunk that is not the prompt's last has no logits, so
    its hidden states are checked."""
    mine = pair.engine(gpu=True, monkeypatch=monkeypatch, **(FIELDS | {"max_num_batched_tokens": 40 if is_end else 8}))
    graphs, runner = give_graphs(mine), mine.runner
    assert isinstance(runner, CudaRunner)
    spoilt = PROMPTS[2]

    def replay(key: Any) -> None:
        graph_replay(key)
        if isinstance(key, MergedShape) and runner.ctx.record.views["chunk_len"][0] in (len(spoilt), 4, 3):
            ended.append(bool(runner.ctx.record.views["chunk_is_last"][0]))
            runner.ctx.chunks.merged[key][0].fill_(torch.nan)

    ended: list[bool] = []
    graph_replay = graphs.replay
    monkeypatch.setattr(graphs, "replay", replay)
    running, other = arrive(mine, [GREEDY] * 2, prompts=[PROMPTS[0], spoilt])
    assert ended[0] == is_end
    assert running.error is None
    assert len(running.output_token_ids) == NUM_TOKENS
    assert "not finite" in str(other.error)


def test_attention_of_those_that_decode_is_cut_up_as_without_chunks(
    pair: Pair,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that attention of decoding sequences is split as without chunks, so that a row's sums have the same order
    next to a new prompt."""
    engine = pair.engine(gpu=True, monkeypatch=monkeypatch, **FIELDS)
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    cut_up, cuts = attention._attention_config, []

    def watched(shape: tuple[int, int | None], *rest: Any) -> list[int]:
        cuts.append((shape, rest, cut_up(shape, *rest)))
        return cuts[-1][2]

    whole = runner.buckets.whole([K, K], LogitsMode.GREEDY, K)
    assert whole is not None
    shape = runner.buckets.merged(whole, 2, 5, 1)
    assert shape is not None
    monkeypatch.setattr(attention, "_attention_config", watched)
    with torch.inference_mode():
        verify_pass(runner.ctx, whole.batch, whole.rows, K + 1, greedy=True)
        run_merged(runner.ctx, shape)
    alone, beside, chunks = cuts[0], *cuts[-2:]
    assert alone == beside
    assert (beside[0], shape.verify.batch) == ((2, None), 5)
    assert chunks[0] == (4, max(shape.chunk_rows, MAX_VERIFY_ROWS + 1)), "chunks' own numbers, which the graph knows"
    assert chunks[1][0] > MAX_VERIFY_ROWS, "one attention for chunks of all lengths"

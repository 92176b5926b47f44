"""Prompt chunks after the rows of verification: the tokens of the CPU loop, and for those that decode what they have
without any.

As in `test_cuda_runner`, kernels are run by Triton's interpreter, and a replay runs what it would replay.
"""

import dataclasses
from typing import Any

import pytest
import specrs.backends.cuda.decoder as decoder
import torch
from engine.harness import poison as fill_pools
from specrs.backends.cuda.iteration import run_merged, verify_pass
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.cuda.shapes import LogitsMode, MergedShape
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.kernels.cuda.attention_config import MAX_VERIFY_ROWS
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
    """Each prompt a step after the one before, to its end."""
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
    """With buffers and workspaces full of nonsense before every step."""
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


def test_in_every_group(
    grouped: Pair,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers of three windows, KV full of NaN: slots and tables of chunks are those of each layer's group."""
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
    """A chunk that goes on has no logits to tell: its hidden states do."""
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
    """A row's sums have one order next to an arrival and alone; cut up for all sequences they would have another."""
    engine = pair.engine(gpu=True, monkeypatch=monkeypatch, **FIELDS)
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    cut_up, cuts = decoder._attention_config, []

    def watched(batch: int, *rest: Any) -> list[int]:
        cuts.append((batch, rest, cut_up(batch, *rest)))
        return cuts[-1][2]

    whole = runner.buckets.whole([K, K], LogitsMode.GREEDY, K)
    assert whole is not None
    shape = runner.buckets.merged(whole, 2, 5, 1)
    assert shape is not None
    monkeypatch.setattr(decoder, "_attention_config", watched)
    with torch.inference_mode():
        verify_pass(runner.ctx, whole.batch, whole.rows, K + 1, greedy=True)
        run_merged(runner.ctx, shape)
    alone, beside, chunks = cuts[0], *cuts[-2:]
    assert alone == beside
    assert (beside[0], shape.verify.batch, chunks[0]) == (2, 5, 4)
    assert chunks[1][0] > MAX_VERIFY_ROWS, "one attention for chunks of all lengths"

"""A step gives the same results, KV, hidden states and logits whether its prompt chunks run after verification in one
pass or in a pass of their own. Triton's interpreter runs the kernels, as in `test_merged_chunks`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import specrs.backends.cuda.iteration as iteration
import specrs.backends.cuda.runner as cuda_runner
import torch
from engine.harness import poison
from specrs.backends.cuda.context import Context
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.drafters.model import ModelPasses
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.cuda.shapes import LogitsMode, MergedShape, Shape
from specrs.backends.ring import Header, RingSlot
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.models.base import HiddenStates
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.sampling import SamplingParams
from torch import Tensor

from .cuda_engines import K, give_graphs
from .test_cuda_runner import GREEDY, Pair, pair  # noqa: F401 (a fixture)

# In the second step the first decodes, with the second's one token and 7 of the third's 13 after; in the third two
# decode with drafts, before a chunk of the third; in the last they do before the ends of two and a chunk of the fifth.
ARRIVALS = [[[5, 9, 2, 33, 7]], [[60], [8, 8, 19, 30, 2, 40, 3, 22, 12, 1, 4, 4, 6]], [[7, 1]], [[9] * 6]]


@dataclass
class Seen:
    """Results, logits, hidden states and KV after one step, as copies."""

    merged: bool = False
    results: list[Tensor] = field(default_factory=list)
    """Results of the step's sequences."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """For each slot written: `[hidden]`, the target's hidden state of its token."""
    judged: dict[int, list[Tensor]] = field(default_factory=dict)
    """For each row that emits: its logits `[K_r + 1, V]`, or without sampling ids and values `[K_r + 1]` of the
    largest."""
    kv: list[Tensor] = field(default_factory=list)
    """KV of target and draft without scratch blocks: `[layers, blocks, 2, heads, block_size, head_dim]`."""
    fed: list[tuple[int, Tensor]] = field(default_factory=list)
    """For each chunk that runs after verification: its slots (-1 for tokens fed among the rows of verification), and
    the hidden states that are checked for NaN."""


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Return a list that gets what each step leaves from now on."""
    runner, seen = engine.runner, list[Seen]()
    assert isinstance(runner, CudaRunner)
    ctx, drafter = runner.ctx, runner.ctx.drafter
    assert isinstance(drafter, ModelPasses)
    forward, accept, execute = CudaDecoder.forward, iteration.accept, runner.execute
    chunk_faults = cuda_runner.chunk_faults

    def watched_forward(model: CudaDecoder, inputs: PassInputs, cache: KVCache, *rest: Any) -> HiddenStates:
        left = forward(model, inputs, cache, *rest)
        if model is ctx.target:
            for slot, row in zip(inputs.slots.tolist(), left.final.clone(), strict=True):
                if slot >= 0:
                    assert slot not in seen[-1].hidden, "no two rows of a step write one slot"
                    seen[-1].hidden[slot] = row
        return left

    def watched_accept(own: Context, shape: Shape, logits: Tensor) -> None:
        accept(own, shape, logits)
        if own is not ctx:
            return
        b, first = ctx.buffers, ctx.buffers.q_start.tolist()
        judged = (b.target_ids, b.target_top) if shape.logits_mode is LogitsMode.GREEDY else (logits,)
        for i in range(shape.batch):
            if b.alive[i]:
                seen[-1].judged[int(b.row[i])] = [made[first[i] : first[i + 1]].clone() for made in judged]

    def watched_faults(hidden: Tensor, *rest: Any) -> Tensor:
        seen[-1].fed = list(zip(ctx.chunks.slots.tolist(), hidden.clone(), strict=False))
        return chunk_faults(hidden, *rest)

    def watched_execute(slot: RingSlot, header: Header) -> None:
        seen.append(Seen())
        execute(slot, header)
        results = ctx.record.results_view.narrow(0, header.num_decode + header.num_prefill)
        last = torch.maximum(results.num_emitted - 1, results.num_drafted)[:, None]
        said = (torch.arange(K + 1) <= last) & (results.num_emitted > 0)[:, None]
        seen[-1].merged = slot.merged
        seen[-1].results = [made.clone() for made in replace(results, tokens=results.tokens * said).tensors()]
        seen[-1].kv = [torch.stack(cache.layers)[:, :-1] for cache in (runner.kv_cache, drafter.kv_cache)]

    monkeypatch.setattr(CudaDecoder, "forward", watched_forward)
    monkeypatch.setattr(iteration, "accept", watched_accept)
    monkeypatch.setattr(cuda_runner, "chunk_faults", watched_faults)
    monkeypatch.setattr(runner, "execute", watched_execute)
    return seen


def steps(engine: Engine, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Add the requests of ARRIVALS, one step after each group. Return what each of these steps left; requests may go on
    after them."""
    poison(engine)
    with monkeypatch.context() as patch:
        seen, ids = watch(engine, patch), iter(range(9))
        for prompts in ARRIVALS:
            for prompt in prompts:
                i = next(ids)
                own = params.replace(max_tokens=9, ignore_eos=True)
                engine.add_request(Request(i, prompt, own, num_speculative_tokens=K, seed=100 + i))
            engine.step()
    return seen


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9)], ids=["greedy", "sampled"])
def test_merged_as_with_a_pass_of_their_own(
    pair: Pair,  # noqa: F811
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, fields = [], {"max_num_seqs": 5, "max_num_batched_tokens": 15, "max_steps_in_flight": 1}
    for merges in (True, False):
        engine = pair.engine(gpu=True, monkeypatch=monkeypatch, **fields)
        graphs = give_graphs(engine)
        if not merges:
            for shape in [key for key in graphs.work if isinstance(key, MergedShape)]:
                del graphs.work[shape]
        made.append(steps(engine, params, monkeypatch))
    assert [[one.merged for one in seen] for seen in made] == [[False, True, True, True], [False] * 4]
    for after, own in zip(*made, strict=True):
        torch.testing.assert_close(after.results, own.results, rtol=0, atol=0)
        assert after.hidden.keys() == own.hidden.keys()
        assert after.judged.keys() == own.judged.keys()
        for slot, row in own.hidden.items():
            assert after.hidden[slot].equal(row)
        for row, judged in own.judged.items():
            assert all(one.equal(other) for one, other in zip(after.judged[row], judged, strict=True))
        assert bool(after.fed) == after.merged
        for slot, row in after.fed:
            assert slot < 0 or row.equal(own.hidden[slot])
        torch.testing.assert_close(after.kv, own.kv, rtol=0, atol=0, equal_nan=True)

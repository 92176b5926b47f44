"""The native runner against the eager one on the same passes: row state, KV and results of random launches, bit by bit.

Records are made up (`made_launches`), not planned: rows that ended, are short of blocks, lag, meet stops and limits.
SPECRS_LAUNCHES is how many launches all cases run together; `make launches` runs a million.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from models.native_models import random_head, random_model
from specrs import core
from specrs.core import CachedDrafter, HiddenDrafter, NgramProposer, Scheduler
from specrs.drafters.base import Drafter
from specrs.drafters.draft_model import DraftModel, ModelPasses, ParallelDraftModel
from specrs.drafters.hidden import HeadDrafter
from specrs.drafters.host import HostDrafter
from specrs.engine_options import LOGPROBS_MODES
from specrs.models.dense_native import NativeDense
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.models.kv_cache import KVCache
from specrs.models.kv_groups import group_sizes
from specrs.runner.eager import EagerRunner
from specrs.runner.hidden_rows import HiddenRows
from specrs.runner.native import NativeRunner
from specrs.runner.ring import RingSlot
from specrs.runner.row_state import RowState
from specrs.runner.sampling_state import SamplingState

from .made_launches import (
    BLOCK_SIZE,
    BUDGET,
    DEVICE_DRAFTERS,
    HEADS,
    MASK,
    MAX_K,
    MAX_LEN,
    MIN_TOKENS,
    ROWS,
    TABLE,
    VOCAB,
    Made,
    MadeUpExtras,
)

SECTIONS = ("num_emitted", "num_accepted", "num_drafted", "flags", "finish_reason")


@dataclass
class Side:
    """One runner with all that it writes."""

    runner: EagerRunner
    slot: RingSlot

    @property
    def caches(self) -> list[KVCache]:
        drafter = self.runner.drafter
        return [self.runner.kv_cache, *([drafter.kv_cache] if isinstance(drafter, ModelPasses | HeadDrafter) else [])]


class Pair:
    """An eager and a native runner of the same models on states and caches of their own."""

    def __init__(
        self,
        drafter: str,
        rule: str,
        rates: list[float] | None,
        draft_vocab: int,
        window: int | None,
        windows: tuple[int | None, ...],
    ) -> None:
        """`window` is that of all layers of both models; with `windows` the target's layers have these, in groups."""
        model = CachedDrafter(max_model_len=MAX_LEN - 6, max_draft_lag=2)
        parallel = CachedDrafter(max_model_len=MAX_LEN - 6, max_draft_lag=MAX_K + 1, mask_token_id=MASK)
        head = HiddenDrafter(max_model_len=MAX_LEN - 6, max_draft_lag=MAX_K + 3)
        declared = {
            "head": [head],
            "mixed head": [NgramProposer(1, 2), head],
            "model": [model],
            "parallel": [parallel],
            "ngram": [NgramProposer(1, 2)],
            "mixed": [NgramProposer(1, 2), model],
            "mixed parallel": [NgramProposer(1, 2), parallel],
            "none": [],
        }[drafter]
        self.scheduler = Scheduler(
            max_num_seqs=ROWS,
            max_model_len=MAX_LEN,
            num_blocks=ROWS * TABLE,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=BUDGET,
            num_speculative_tokens=MAX_K if declared else 0,
            drafter=declared,
            max_constraint_len=64,
            sliding_window=window,
            window_groups=[size for size in windows if size is not None],
        )
        target = random_model(VOCAB, 1, windows or (window,))
        target = target.with_kv_groups(group_sizes(windows)[0]) if windows else target
        draft: NativeDense | NativeEagle3Head = random_model(draft_vocab, 2, (window,))
        if drafter in HEADS:
            few = draft_vocab < VOCAB
            draft = random_head(target, draft_vocab, 2, fc_norm=few, norm_output=rule == "coupled")
        mode = LOGPROBS_MODES[len(drafter) % len(LOGPROBS_MODES)]
        settings = {"block_size": BLOCK_SIZE, "rule": rule, "rates": rates, "logprobs_mode": mode}
        native = functools.partial(NativeRunner, self.scheduler, core.CpuPool(1))
        makes: list[Callable[..., EagerRunner]] = [EagerRunner, native]
        self.eager, self.native = (self._side(make, target, draft, drafter, settings) for make in makes)

    def _side(
        self,
        make: Callable[..., EagerRunner],
        target: NativeDense,
        draft: NativeDense | NativeEagle3Head,
        drafter: str,
        settings: dict[str, object],
    ) -> Side:
        made: Drafter | None = None
        if isinstance(draft, NativeEagle3Head):
            cache = draft.allocate_cache(ROWS * TABLE, BLOCK_SIZE)
            made = HeadDrafter(draft, cache, MAX_LEN - 6, VOCAB, max_draft_lag=MAX_K + 3)
        elif drafter in ("model", "mixed"):
            made = DraftModel(draft, draft.allocate_cache(ROWS * TABLE, BLOCK_SIZE), MAX_LEN - 6, VOCAB)
        elif drafter in ("parallel", "mixed parallel"):
            cache = draft.allocate_cache(ROWS * TABLE, BLOCK_SIZE)
            made = ParallelDraftModel(draft, cache, MAX_LEN - 6, VOCAB, max_draft_lag=MAX_K + 1, mask_token_id=MASK)
        elif drafter == "ngram":
            made = HostDrafter()
        cpu = torch.device("cpu")
        num_groups = self.scheduler.num_groups
        runner = make(
            target,
            target.allocate_cache(num_groups * ROWS * TABLE, BLOCK_SIZE),
            made,
            RowState.allocate(ROWS, MAX_LEN, BLOCK_SIZE, cpu, num_groups),
            SamplingState(ROWS, VOCAB, torch.float32, cpu),
            **settings,
        )
        runner.use_extras(MadeUpExtras())
        return Side(runner, RingSlot(self.scheduler, MAX_K if drafter != "none" else 0, pinned=False))

    def launch(self, rng: np.random.Generator, drafter: str) -> Made:
        """Make up a launch and run it on both."""
        made = Made(rng, self.native.runner, self.native.slot, drafter)
        self.eager.slot.record[:] = self.native.slot.record
        for side in (self.eager, self.native):
            side.slot.results[:] = -9
            side.runner.launch(side.slot, side.slot.header())
        return made


def shake_hidden(hidden: HiddenRows, state: RowState, rng: np.random.Generator) -> None:
    """Where the states that are kept cannot be those of a row as it is, others; heads begin anywhere before their KV.

    A row that drafts has a token beside its last, whose state is kept and not yet fed.
    """
    for row in range(ROWS):
        n = max(int(state.num_tokens[row]), 2)
        draft_len = min(int(state.draft_len[row]), n - 2)
        state.num_tokens[row], state.draft_len[row] = n, draft_len
        state.limit[row].clamp_(min=n + 1)
        if not max(0, n - 1 - hidden.width) <= hidden.start[row] <= n - 2 or rng.random() < 0.05:
            hidden.start[row] = max(0, n - 1 - int(rng.integers(1, hidden.width + 1)))
            hidden.states[row] = torch.from_numpy(rng.standard_normal(hidden.states[row].shape, np.float32))
            hidden.draft_start[row] = rng.integers(0, draft_len + 1)
        hidden.draft_start[row].clamp_(max=draft_len)


def shake(pair: Pair, rng: np.random.Generator) -> None:
    """Rows as they may be before a launch, the same on both sides; now and then some blocks of KV are NaN."""
    state, sampling = pair.native.runner.state, pair.native.runner.sampling
    for row in range(ROWS):
        ended = not state.active[row] or state.num_tokens[row] >= state.limit[row]
        if ended or rng.random() < 0.05:
            n = int(rng.integers(1, MAX_LEN))
            state.num_tokens[row], state.active[row] = n, rng.random() < 0.9
            state.draft_len[row] = max(0, n - int(rng.integers(1, 5)))
            state.limit[row] = rng.integers(n + 1, MAX_LEN + 1)
            state.min_len[row] = rng.integers(0, MAX_LEN) if sampling.row(row).steps & MIN_TOKENS else 0
            state.tokens[row] = torch.from_numpy(rng.integers(0, VOCAB, MAX_LEN + 1))
            state.block_table[row] = torch.from_numpy(rng.permutation(TABLE) + row * TABLE)
            for group, table in enumerate(state.group_tables, 1):
                table[row] = torch.from_numpy(rng.permutation(TABLE) + (group * ROWS + row) * TABLE)
    other, hidden = pair.eager.runner, pair.native.runner.hidden
    if hidden is not None:
        shake_hidden(hidden, state, rng)
    if pair.native.runner.k_start is not None:
        assert other.k_start is not None
        torch.minimum(pair.native.runner.k_start, state.draft_len, out=pair.native.runner.k_start)
        other.k_start.copy_(pair.native.runner.k_start)
    for field in fields(RowState):
        getattr(other.state, field.name).copy_(getattr(state, field.name))
    if hidden is not None:
        for field in fields(HiddenRows):
            getattr(other.hidden, field.name).copy_(getattr(hidden, field.name))
    assert torch.equal(other.sampling.params.values, sampling.params.values)
    sound = rng.random() < 0.9
    for mine, theirs in zip(pair.native.caches, pair.eager.caches, strict=True):
        for layer, copied in zip(mine.layers, theirs.layers, strict=True):
            layer.nan_to_num_(nan=0.5)
            if not sound:
                layer[rng.integers(0, len(layer) - 1, 12)] = torch.nan
            copied.copy_(layer)


def compare(pair: Pair, made: Made) -> dict[str, int]:
    """What a launch leaves, on both sides; what of it was seen."""
    eager, native = pair.eager, pair.native
    count = made.header["num_decode"] + made.header["num_prefill"]
    for name in SECTIONS:
        mine, theirs = (side.slot.results_arrays[name][:count].tolist() for side in (native, eager))
        if name == "flags":  # of what is short of blocks, which the native runner does not feed, only that
            mine, theirs = ([flags & core.FLAG_CAPACITY or flags for flags in both] for both in (mine, theirs))
        assert mine == theirs, name
    emitted = native.slot.results_arrays["num_emitted"][:count].tolist()
    for entry, many in enumerate(emitted):
        mine, theirs = (side.slot.results_view.tokens[entry, :many].tolist() for side in (native, eager))
        assert mine == theirs
        accepted, drafted = (native.slot.results_arrays[f"num_{what}"][entry] for what in ("accepted", "drafted"))
        mine, theirs = (side.slot.results_view.tokens[entry, accepted + 1 : drafted + 1] for side in (native, eager))
        is_sound = not native.slot.results_arrays["flags"][entry] & core.FLAG_DRAFT_NON_FINITE
        assert not is_sound or mine.equal(theirs), "rejected drafts"
    num_logprobs = compare_logprobs(native, eager.slot, emitted)
    mine, theirs = native.runner.state, eager.runner.state
    for name in ("num_tokens", "draft_len", "limit", "min_len", "active", "block_table", "group_tables", "stop_ids"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    for row, n in enumerate(mine.num_tokens.tolist()):
        assert torch.equal(mine.tokens[row, :n], theirs.tokens[row, :n])
    for name in ("seeds", "prompt_len"):
        assert torch.equal(getattr(native.runner.sampling, name), getattr(eager.runner.sampling, name)), name
    assert torch.equal(native.runner.sampling.params.values, eager.runner.sampling.params.values)
    if native.runner.hidden is not None:
        assert eager.runner.hidden is not None
        for name in ("start", "draft_start"):
            assert torch.equal(getattr(native.runner.hidden, name), getattr(eager.runner.hidden, name)), name
        kept_states = (side.runner.hidden.states[:ROWS, :-1].view(torch.int32) for side in (native, eager))  # type: ignore[union-attr]
        assert torch.equal(*kept_states)
    if native.runner.k_start is not None:
        assert eager.runner.k_start is not None
        assert torch.equal(native.runner.k_start, eager.runner.k_start)
    # Where blocks are short the native runner feeds nothing; the scratch block is anything.
    flags = native.slot.results_arrays["flags"][:count]
    rows = native.slot.record_arrays["entry_row"][:count][flags & core.FLAG_CAPACITY != 0].tolist()
    ended = [row for row in range(ROWS) if not mine.active[row]]
    tables = (mine.block_table, *mine.group_tables)
    skipped = {int(block) for table in tables for row in (*rows, *ended) for block in table[row].tolist()}
    for ours, their in zip(native.caches, eager.caches, strict=True):
        kept = [block for block in range(ours.num_blocks) if block not in skipped]
        for layer, other in zip(ours.layers, their.layers, strict=True):
            assert torch.equal(layer[kept].view(torch.int32), other[kept].view(torch.int32))
    reported = {name: native.slot.results_arrays[name][:count] for name in SECTIONS}
    return {
        "accepted": int(reported["num_accepted"].sum()),
        "rejected": int((reported["num_accepted"] < reported["num_drafted"]).sum()),
        "stops": int((reported["finish_reason"] == core.FINISH_STOP).sum()),
        "limits": int((reported["finish_reason"] == core.FINISH_LENGTH).sum()),
        "target faults": int((reported["flags"] & core.FLAG_TARGET_NON_FINITE > 0).sum()),
        "draft faults": int((reported["flags"] & core.FLAG_DRAFT_NON_FINITE > 0).sum()),
        "short": int((reported["flags"] & core.FLAG_CAPACITY > 0).sum()),
        "last chunks": int(native.slot.record_arrays["chunk_is_last"][: made.header["num_prefill"]].sum()),
        "catch-up tokens": made.header["num_draft_tokens"],
        "nothing allowed": int((reported["flags"] & core.FLAG_NO_TOKEN_ALLOWED > 0).sum()),
        "logprobs": num_logprobs,
    }


def compare_logprobs(native: Side, theirs: RingSlot, emitted: list[int]) -> int:
    """Log probabilities of the tokens that each entry emitted: the same but for roundings; of how many there were any.

    Among tokens whose values differ by no more than a rounding ranks may differ, too.
    """
    mine, sampling = native.slot, native.runner.sampling
    asked = [sampling.row(row).logprobs for row in mine.record_arrays["entry_row"][: len(emitted)].tolist()]
    wanted = [emitted[i] > 0 and top != core.LOGPROBS_NONE for i, top in enumerate(asked)]
    assert mine.logprobs.keys() == {i for i, is_wanted in enumerate(wanted) if is_wanted}
    pairs = [(found, theirs.logprobs[entry], emitted[entry]) for entry, found in mine.logprobs.items()]
    assert [told[:2] for told in mine.prompt_logprobs] == [told[:2] for told in theirs.prompt_logprobs]
    prompts = zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True)
    pairs += [(found, other, len(other.value)) for (*_, found), (*_, other) in prompts]
    for found, other, count in pairs:
        if other.value[:count].isnan().any():  # of a prompt whose KV is broken
            assert found.value.isnan().any()
            continue
        width = found.top_ids.shape[1]
        torch.testing.assert_close(found.value, other.value[:count], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.top_values, other.top_values[:count, :width], rtol=1e-6, atol=1e-6)
        assert (found.rank - other.rank[:count]).abs().max() <= 1
        # Values that are as near to each other as two ways of rounding may change places; -inf is by id in both.
        tops = other.top_values[:count]
        near = torch.zeros_like(tops, dtype=torch.bool)
        near[:, 1:] |= tops.diff(dim=1).abs() < 1e-5
        near[:, :-1] |= tops.diff(dim=1).abs() < 1e-5
        ids = other.top_ids[:count, :width]
        assert (found.top_ids == ids)[~near[:, :width]].all()
    return len(pairs)


CASES: list[tuple[str, str, list[float] | None, int]] = [
    ("model", "rejection", None, VOCAB),
    ("model", "coupled", None, VOCAB - 4),
    ("model", "rejection", None, VOCAB + 5),
    ("model", "rejection", [0.9, 0.5, 0.1], VOCAB),
    ("parallel", "rejection", None, VOCAB),
    ("parallel", "coupled", None, VOCAB + 5),
    ("ngram", "rejection", None, VOCAB),
    ("mixed", "rejection", None, VOCAB),
    ("mixed", "coupled", None, VOCAB),
    ("mixed parallel", "rejection", None, VOCAB),
    ("mixed", "rejection", [0.9, 0.5, 0.1], VOCAB),
    ("head", "rejection", None, VOCAB - 7),
    ("head", "coupled", None, VOCAB),
    ("head", "rejection", [0.9, 0.5, 0.1], VOCAB - 7),
    ("mixed head", "rejection", None, VOCAB),
    ("mixed head", "coupled", None, VOCAB - 7),
    ("none", "coupled", None, VOCAB),
    ("model windowed", "rejection", None, VOCAB),
    ("mixed parallel windowed", "coupled", None, VOCAB),
    ("model grouped", "rejection", None, VOCAB),
    ("mixed head grouped", "coupled", None, VOCAB - 7),
]
WINDOWED = {"model windowed": 6, "mixed parallel windowed": 11}
"""Cases in which target and draft see so many positions, by drafter."""
GROUPED: dict[str, tuple[int | None, ...]] = {"model grouped": (5, None, 9), "mixed head grouped": (None, 7)}
"""Cases in which each layer of the target has a KV group and a window of its own, by drafter."""
LAUNCHES = -(-int(os.environ.get("SPECRS_LAUNCHES", 300 * len(CASES))) // len(CASES))
"""Of a case."""


@pytest.mark.parametrize(("drafter", "rule", "rates", "draft_vocab"), CASES)
def test_random_launches(drafter: str, rule: str, rates: list[float] | None, draft_vocab: int) -> None:
    rng, window = np.random.default_rng(draft_vocab + len(drafter + rule)), WINDOWED.get(drafter)
    windows = GROUPED.get(drafter, ())
    drafter = drafter.removesuffix(" windowed").removesuffix(" grouped")
    pair = Pair(drafter, rule, rates, draft_vocab, window, windows)
    seen: dict[str, int] = {}
    for _ in range(LAUNCHES):
        shake(pair, rng)
        made = pair.launch(rng, drafter)
        for what, times in compare(pair, made).items():
            seen[what] = seen.get(what, 0) + times
    assert pair.native.runner.num_target_passes > 0
    never = {what for what, times in seen.items() if not times}
    drafts = set() if drafter != "none" else {"accepted", "rejected"}
    drafts |= set() if drafter in DEVICE_DRAFTERS else {"draft faults", "catch-up tokens"}
    assert never == drafts, "every kind of launch must come up"

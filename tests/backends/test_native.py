"""The CPU's runner against the reference on the same passes: row state, KV and results of random steps are equal bit by
bit.

Records are made up (`made_steps`), not planned: rows may have ended, lack blocks, lag, or meet stops and limits.
SPECRS_STEPS is the number of steps that all cases run together; `make steps` runs a million.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from models.native_models import random_head, random_model
from models.native_passes import over_tensors
from samplers import make_request
from specrs import core
from specrs.backends.cpu.row_state import RowState
from specrs.backends.cpu.runner import CpuRunner
from specrs.backends.ring import RingSlot
from specrs.core import CachedDrafter, HiddenDrafter, HostDrafter, Scheduler
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.eagle3.native import NativeEagle3Head
from specrs.drafters.host import OnHost
from specrs.engine_options import LOGPROBS_MODES
from specrs.models.kv_groups import group_sizes
from specrs.models.native_cache import NativeKVCache
from specrs.models.native_decoder import NativeDecoder
from specrs.reference import sampling
from specrs.reference.drafting import HiddenStateDrafter, ModelDrafter
from specrs.reference.rows import Row
from specrs.reference.step import ReferenceRunner
from specrs.verify.token_logprobs import TokenLogprobs
from sweep import stride

from .made_steps import (
    BLOCK_SIZE,
    BUDGET,
    DEVICE_DRAFTERS,
    HEADS,
    MASK,
    MAX_K,
    MAX_LEN,
    ROWS,
    TABLE,
    VOCAB,
    Made,
    MadeUpExtras,
)

HIDDEN_SIZE = 16
"""Size of the target's hidden state."""
SECTIONS = ("num_emitted", "num_accepted", "num_drafted", "flags", "finish_reason")


@dataclass
class Native:
    """The CPU runner, with its row state, KV caches and ring slot."""

    runner: CpuRunner
    slot: RingSlot

    @property
    def state(self) -> RowState:
        return self.runner.state

    @property
    def caches(self) -> list[NativeKVCache]:
        drafter = self.runner.drafter
        return [self.runner.kv_cache, *([drafter.kv_cache] if isinstance(drafter, CpuDrafter) else [])]


@dataclass
class Reference:
    """The reference runner, with its row state, KV caches and ring slot."""

    runner: ReferenceRunner
    slot: RingSlot

    @property
    def caches(self) -> list[NativeKVCache]:
        drafter = self.runner.drafter
        return [self.runner.kv_cache, *([] if drafter is None else [drafter.kv_cache])]

    def load(self, state: RowState) -> None:
        """Take over the rows of `state`. Of a request only `prompt_len` changes."""
        for row in range(ROWS):
            own = self.runner.rows.setdefault(
                row, Row(make_request({"temperature": 0.0}), [], 0, 0, [], self.runner.tables[row])
            )
            tables = np.concatenate((state.block_table, state.group_tables)).reshape(-1, ROWS + 1, TABLE)
            own.tables.copy_(torch.from_numpy(tables[:, row]))
            n = int(state.num_tokens[row])
            own.request = replace(own.request, prompt_len=int(state.prompt_len[row]))
            own.tokens = state.tokens[row, :n].tolist()
            own.stop_ids = [stop for stop in state.stop_ids[row].tolist() if stop >= 0]
            own.active = bool(state.active[row])
            own.limit, own.min_len, own.draft_len, own.draft_start = (
                int(getattr(state, name)[row]) for name in ("limit", "min_len", "draft_len", "draft_start")
            )
            if state.hidden_start is not None:
                own.hidden_start = int(state.hidden_start[row])
                own.hidden = list(kept_states(state, row).clone())


def kept_states(state: RowState, row: int) -> torch.Tensor:
    """Return the hidden states that a row keeps for the drafter, `[positions, L, hidden]`."""
    assert state.hidden_states is not None
    assert state.hidden_start is not None
    states = torch.from_numpy(state.hidden_states[row].reshape(MAX_K + 3, -1, HIDDEN_SIZE))
    return states[: max(0, int(state.num_tokens[row]) - 1 - int(state.hidden_start[row]))]


class Pair:
    """A reference and a native runner of the same models on states and caches of their own."""

    def __init__(
        self,
        drafter: str,
        rule: str,
        rates: list[float] | None,
        draft_vocab: int,
        window: int | None,
        windows: tuple[int | None, ...],
    ) -> None:
        """Make both runners. `window` applies to all layers of both models. `windows` gives the target's layers a
        window each, in KV groups."""
        model = CachedDrafter(max_model_len=MAX_LEN - 6, max_draft_lag=2)
        parallel = CachedDrafter(max_model_len=MAX_LEN - 6, max_draft_lag=MAX_K + 1, mask_token_id=MASK)
        head = HiddenDrafter(max_model_len=MAX_LEN - 6, max_draft_lag=MAX_K + 3)
        lookup = HostDrafter("ngram", prompt_lookup_min=1, prompt_lookup_max=2)
        declared = {
            "head": [head],
            "mixed head": [lookup, head],
            "model": [model],
            "parallel": [parallel],
            "ngram": [lookup],
            "mixed": [lookup, model],
            "mixed parallel": [lookup, parallel],
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
        draft: NativeDecoder | NativeEagle3Head = random_model(draft_vocab, 2, (window,))
        if drafter in HEADS:
            few = draft_vocab < VOCAB
            draft = random_head(target, draft_vocab, 2, fc_norm=few, norm_output=rule == "coupled")
        mode = LOGPROBS_MODES[len(drafter) % len(LOGPROBS_MODES)]
        settings: dict[str, Any] = {"rule": rule, "rates": rates, "logprobs_mode": mode}
        self.windowed = window is not None
        self.native = self._native(target, draft, drafter, settings)
        self.reference = self._reference(target, draft, drafter, settings)

    def _native(
        self, target: NativeDecoder, draft: NativeDecoder | NativeEagle3Head, drafter: str, settings: dict[str, Any]
    ) -> Native:
        made: CpuDrafter | OnHost | None = None
        if drafter in DEVICE_DRAFTERS:
            made = CpuDrafter(model=draft, kv_cache=draft.allocate_cache(ROWS * TABLE, BLOCK_SIZE))
        elif drafter == "ngram":
            made = OnHost()
        size = 0
        if isinstance(draft, NativeEagle3Head):
            size = (MAX_K + 3) * len(draft.aux_layer_ids) * target.config.hidden_size
        groups = self.scheduler.num_groups
        cache = target.allocate_cache(groups * ROWS * TABLE, BLOCK_SIZE)
        state = RowState.allocate(ROWS, MAX_LEN, BLOCK_SIZE, groups, size)
        runner = CpuRunner(self.scheduler, target, cache, made, state, pool=None, **settings)
        runner.use_extras(MadeUpExtras())
        return Native(runner, RingSlot(self.scheduler, MAX_K if drafter != "none" else 0))

    def _reference(
        self, target: NativeDecoder, draft: NativeDecoder | NativeEagle3Head, drafter: str, settings: dict[str, Any]
    ) -> Reference:
        made: ModelDrafter | HiddenStateDrafter | None = None
        passes, cache = over_tensors(draft), draft.allocate_cache(ROWS * TABLE, BLOCK_SIZE)
        limits = VOCAB, MAX_LEN - 6
        if isinstance(draft, NativeEagle3Head):
            made = HiddenStateDrafter(passes, cache, *limits, max_draft_lag=MAX_K + 3)
        elif drafter in ("model", "mixed"):
            made = ModelDrafter(passes, cache, *limits)
        elif drafter in ("parallel", "mixed parallel"):
            made = ModelDrafter(passes, cache, *limits, max_draft_lag=MAX_K + 1, mask_token_id=MASK)
        groups = self.scheduler.num_groups
        runner = ReferenceRunner(
            over_tensors(target),
            target.allocate_cache(groups * ROWS * TABLE, BLOCK_SIZE),
            made,
            torch.zeros((ROWS, groups, TABLE), dtype=torch.int64),
            **settings,
        )
        runner.extras = MadeUpExtras()
        return Reference(runner, RingSlot(self.scheduler, MAX_K if drafter != "none" else 0))

    def run_step(self, rng: np.random.Generator, drafter: str) -> Made:
        """Make up a step and run it on both."""
        made = Made(rng, self.native.state, self.native.slot, drafter, windowed=self.windowed)
        self.reference.slot.record[:] = self.native.slot.record
        for slot in (self.reference.slot, self.native.slot):
            slot.results[:] = -9
        self.reference.runner.execute(self.reference.slot, self.reference.slot.header())
        self.native.runner.execute(self.native.slot, self.native.slot.header())
        return made


def shake_hidden(state: RowState, rng: np.random.Generator) -> None:
    """Replace hidden states that do not fit the row's length, and let heads begin at any position before their KV.
    Mutates `state`.

    A row that drafts has a token next to its last, whose state is kept and not yet fed.
    """
    assert state.hidden_states is not None
    assert state.hidden_start is not None
    width = MAX_K + 2
    for row in range(ROWS):
        n = max(int(state.num_tokens[row]), 2)
        draft_len = min(int(state.draft_len[row]), n - 2)
        state.num_tokens[row], state.draft_len[row] = n, draft_len
        state.limit[row] = max(state.limit[row], n + 1)
        if not max(0, n - 1 - width) <= state.hidden_start[row] <= n - 2 or rng.random() < 0.05:
            state.hidden_start[row] = max(0, n - 1 - int(rng.integers(1, width + 1)))
            state.hidden_states[row] = rng.standard_normal(state.hidden_states[row].shape, np.float32)
            state.draft_start[row] = rng.integers(0, draft_len + 1)
        state.draft_start[row] = min(state.draft_start[row], draft_len)


def shake(pair: Pair, rng: np.random.Generator) -> None:
    """Make row state random, equal on both sides, and sometimes fill blocks of KV with NaN."""
    state, rows = pair.native.state, pair.reference.runner.rows
    for row in range(ROWS):
        ended = not state.active[row] or state.num_tokens[row] >= state.limit[row]
        if ended or rng.random() < 0.05:
            n = int(rng.integers(1, MAX_LEN))
            state.num_tokens[row], state.active[row] = n, rng.random() < 0.9
            state.draft_len[row] = max(0, n - int(rng.integers(1, 5)))
            state.limit[row] = rng.integers(n + 1, MAX_LEN + 1)
            has_min = row in rows and "min_tokens" in rows[row].request.steps
            state.min_len[row] = rng.integers(0, MAX_LEN) if has_min else 0
            state.prompt_len[row] = min(int(state.prompt_len[row]), n)
            state.tokens[row] = rng.integers(0, VOCAB, MAX_LEN + 1)
            state.block_table[row] = rng.permutation(TABLE) + row * TABLE
            for group, table in enumerate(state.group_tables.reshape(-1, ROWS + 1, TABLE), 1):
                table[row] = rng.permutation(TABLE) + (group * ROWS + row) * TABLE
    if state.hidden_states is not None:
        shake_hidden(state, rng)
    if pair.windowed:
        np.minimum(state.draft_start, state.draft_len, out=state.draft_start)
    pair.reference.load(state)
    sound = rng.random() < 0.9
    for mine, their in zip(pair.native.caches, pair.reference.caches, strict=True):
        for layer, copied in zip(mine.layers, their.layers, strict=True):
            values = torch.as_tensor(layer)
            values.nan_to_num_(nan=0.5)
            if not sound:
                values[rng.integers(0, len(layer) - 1, 12)] = torch.nan
            torch.as_tensor(copied).copy_(values)


class NearDraws:
    """Counts draws and acceptances of the reference that would differ if probabilities were rounded differently."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        choose, accept = sampling.largest, sampling.stands

        def largest(scores: torch.Tensor) -> int:
            first, second = scores.topk(2).values.tolist()
            self.count += first - second < 1e-5
            return choose(scores)

        def stands(u: float, q: torch.Tensor, p: torch.Tensor) -> bool:
            self.count += abs(u * float(q) - float(p)) < 1e-6
            return accept(u, q, p)

        patch.setattr(sampling, "largest", largest)
        patch.setattr(sampling, "stands", stands)


def compare(pair: Pair, made: Made) -> dict[str, int]:
    """Check that a step of the native pass left the same results and row state as the reference. Returns how often each
    case occurred."""
    reference, native = pair.reference, pair.native
    count = made.header["num_decode"] + made.header["num_prefill"]
    rows = native.slot.record_arrays["seq_row"][:count].tolist()
    flags = native.slot.results_arrays["flags"][:count].tolist()
    # Of what is short of blocks only that is reported by both, because they do not look at the same logits then.
    theirs = reference.slot.results_arrays["flags"][:count].tolist()
    # Drafts of logits that are not finite are any tokens. What stands of them is another number then, and so is
    # whether a row of the target that is not finite is reached.
    doubtful = [core.FLAG_TARGET_NON_FINITE if flag & core.FLAG_DRAFT_NON_FINITE else 0 for flag in theirs]
    pairs = zip(flags, theirs, doubtful, strict=True)
    assert all((mine & core.FLAG_CAPACITY or mine) | either == other | either for mine, other, either in pairs)
    faulty = [sequence for sequence, flag in enumerate(flags) if flag & core.FLAG_DRAFT_NON_FINITE]
    others = [sequence for sequence in range(count) if sequence not in faulty]
    for name in SECTIONS:
        mine, own = (slot.results_arrays[name][others].tolist() for slot in (native.slot, reference.slot))
        assert name == "flags" or mine == own, name
    emitted = native.slot.results_arrays["num_emitted"][:count].tolist()
    for sequence in others:
        accepted, drafted = (
            int(native.slot.results_arrays[f"num_{what}"][sequence]) for what in ("accepted", "drafted")
        )
        for part in (slice(emitted[sequence]), slice(accepted + 1, drafted + 1)):
            assert np.array_equal(native.slot.tokens[sequence, part], reference.slot.tokens[sequence, part])
    num_logprobs = compare_logprobs(native, reference, {sequence: emitted[sequence] for sequence in others})
    for row, own_row in reference.runner.rows.items():
        if row not in [rows[sequence] for sequence in faulty]:
            compare_row(native.state, row, own_row)
            if own_row.active and row not in made.admitted:
                compare_drafting(native.state, row, own_row)
    compare_kv(pair, [(rows[sequence], made.lengths[rows[sequence]]) for sequence in faulty])
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


def compare_row(state: RowState, row: int, theirs: Row) -> None:
    """Check a row of the native runner against the reference's."""
    n = int(state.num_tokens[row])
    assert state.tokens[row, :n].tolist() == theirs.tokens
    assert bool(state.active[row]) == theirs.active
    assert int(state.seeds[row]) == theirs.request.seed
    assert int(state.prompt_len[row]) == theirs.request.prompt_len
    assert state.params[row].tolist() == list(theirs.request.params.values())
    assert [stop for stop in state.stop_ids[row].tolist() if stop >= 0] == theirs.stop_ids
    tables = np.concatenate((state.block_table, state.group_tables)).reshape(-1, ROWS + 1, TABLE)
    assert tables[:, row].tolist() == theirs.tables.tolist()
    assert (int(state.limit[row]), int(state.min_len[row])) == (theirs.limit, theirs.min_len)


def compare_drafting(state: RowState, row: int, theirs: Row) -> None:
    """Check that a row's draft KV has the same bounds as the reference's row `theirs`, and the same hidden states, bit
    by bit. Not meant for a row that has ended, whose drafter reads nothing."""
    assert (int(state.draft_len[row]), int(state.draft_start[row])) == (theirs.draft_len, theirs.draft_start)
    if state.hidden_start is not None:
        assert int(state.hidden_start[row]) == theirs.hidden_start
        kept = kept_states(state, row)
        assert len(kept) == len(theirs.hidden)
        for ours, their in zip(kept, theirs.hidden, strict=True):
            assert torch.equal(ours.view(torch.int32), their.view(torch.int32))


def compare_kv(pair: Pair, faulty: list[tuple[int, int]]) -> None:
    """Check that both caches are equal bit by bit. `faulty`: rows whose drafts may be any tokens, with their lengths
    before the step."""
    state = pair.native.state
    tables = (state.block_table, *state.group_tables.reshape(-1, ROWS + 1, TABLE))
    for ours, theirs in zip(pair.native.caches, pair.reference.caches, strict=True):
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            mine, own = torch.as_tensor(layer), torch.as_tensor(other)
            for row, n in faulty:
                after = np.arange(n, MAX_LEN)
                for table in tables[: 1 + len(tables) * (len(layer) > ROWS * TABLE + 1)]:
                    place = table[row, after // BLOCK_SIZE], slice(None), slice(None), after % BLOCK_SIZE
                    own[place] = mine[place]
            # The last block is scratch.
            assert torch.equal(mine[:-1].view(torch.int32), own[:-1].view(torch.int32))


def compare_logprobs(native: Native, reference: Reference, emitted: dict[int, int]) -> int:
    """Check log probabilities of emitted tokens: equal but for rounding. Return how many sequences had any.

    Ranks may also differ among tokens whose values are within rounding.
    """
    mine, theirs, rows = native.slot, reference.slot, reference.runner.rows
    asked = {sequence: rows[int(mine.record_arrays["seq_row"][sequence])].request for sequence in emitted}
    decoding = range(mine.header().num_decode)  # a prompt with pooling draws no token
    wanted = {
        sequence
        for sequence, many in emitted.items()
        if many
        and asked[sequence].logprobs != core.LOGPROBS_NONE
        and ("pooling" not in asked[sequence].steps or sequence in decoding)
    }
    assert {sequence for sequence in mine.logprobs if sequence in emitted} == wanted
    pairs = [(mine.logprobs[sequence], theirs.logprobs[sequence], emitted[sequence]) for sequence in wanted]
    assert [told[:2] for told in mine.prompt_logprobs] == [told[:2] for told in theirs.prompt_logprobs]
    assert [request_id for request_id, _ in mine.pooled] == [request_id for request_id, _ in theirs.pooled]
    for (_, found), (_, other) in zip(mine.pooled, theirs.pooled, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-5, atol=1e-5)
    prompts = zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True)
    pairs += [(found, other, len(other.value)) for (*_, found), (*_, other) in prompts]
    for native_values, other, count in pairs:
        found = TokenLogprobs(*(torch.as_tensor(getattr(native_values, field.name)) for field in fields(TokenLogprobs)))
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
"""Window of target and draft in some cases, by the name of the drafter."""
GROUPED: dict[str, tuple[int | None, ...]] = {"model grouped": (5, None, 9), "mixed head grouped": (None, 7)}
"""Windows of the target's layers in cases with KV groups, by the name of the drafter. None: full attention."""
NUM_STEPS = -(-int(os.environ.get("SPECRS_STEPS", 300 // stride(2) * len(CASES))) // len(CASES))
"""Number of steps that each case runs."""


@pytest.mark.parametrize(("drafter", "rule", "rates", "draft_vocab"), CASES)
def test_random_steps(
    drafter: str, rule: str, rates: list[float] | None, draft_vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, window = np.random.default_rng(draft_vocab + len(drafter + rule)), WINDOWED.get(drafter)
    windows = GROUPED.get(drafter, ())
    drafter = drafter.removesuffix(" windowed").removesuffix(" grouped")
    pair = Pair(drafter, rule, rates, draft_vocab, window, windows)
    seen: dict[str, int] = {}
    near, skipped = NearDraws(monkeypatch), 0
    for _ in range(NUM_STEPS):
        shake(pair, rng)
        near.count = 0
        made = pair.run_step(rng, drafter)
        if near.count:
            skipped += 1
            continue
        for what, times in compare(pair, made).items():
            seen[what] = seen.get(what, 0) + times
    assert skipped < NUM_STEPS / 50
    never = {what for what, times in seen.items() if not times}
    drafts = set() if drafter != "none" else {"accepted", "rejected"}
    drafts |= set() if drafter in DEVICE_DRAFTERS else {"draft faults", "catch-up tokens"}
    assert never == drafts, "every kind of step must come up"

"""The CPU's runner against the reference on the same passes: row state, KV and results of random launches, bit by bit.

Records are made up (`made_launches`), not planned: rows that ended, are short of blocks, lag, meet stops and limits.
SPECRS_LAUNCHES is how many launches all cases run together; `make launches` runs a million.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from models.native_models import random_head, random_model
from models.native_passes import over_tensors
from numpy.typing import NDArray
from specrs import core
from specrs.core import CachedDrafter, HiddenDrafter, NgramProposer, Scheduler
from specrs.drafters.base import Drafter
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.draft_model import DraftModel, ModelPasses, ParallelDraftModel
from specrs.drafters.hidden import HeadDrafter
from specrs.drafters.host import HostDrafter
from specrs.engine_options import LOGPROBS_MODES
from specrs.models.dense_native import NativeDense, NativeKVCache
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.models.kv_cache import KVCache
from specrs.models.kv_groups import group_sizes
from specrs.reference.step import ReferenceRunner
from specrs.runner.cpu import CpuRunner
from specrs.runner.cuda.row_state import RowState as TensorRowState
from specrs.runner.cuda.sampling_state import SamplingState
from specrs.runner.cuda.slots import TensorSlot
from specrs.runner.ring import RingSlot
from specrs.runner.row_state import RowState
from specrs.verify.token_logprobs import TokenLogprobs

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
class Native:
    """The runner of a CPU with all that it writes."""

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
    """The reference's runner with all that it writes."""

    runner: ReferenceRunner
    slot: TensorSlot

    @property
    def caches(self) -> list[KVCache]:
        drafter = self.runner.drafter
        return [self.runner.kv_cache, *([drafter.kv_cache] if isinstance(drafter, ModelPasses | HeadDrafter) else [])]

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Row state by the names of the other runner's, sharing memory."""
        runner = self.runner
        state, sampling, hidden = runner.state, runner.sampling, runner.hidden
        found = {field.name: getattr(state, field.name) for field in fields(TensorRowState)}
        del found["tables"]
        found |= {"block_table": state.block_table, "group_tables": state.group_tables.flatten(0, 1)}
        found |= {"seeds": sampling.seeds, "prompt_len": sampling.prompt_len, "params": sampling.params.values}
        if hidden is not None:
            found |= {"hidden_states": hidden.states.flatten(1), "hidden_start": hidden.start}
        draft_start = runner.k_start if hidden is None else hidden.draft_start
        return {name: tensor.numpy() for name, tensor in found.items()} | (
            {} if draft_start is None else {"draft_start": draft_start.numpy()}
        )


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
        settings: dict[str, Any] = {"rule": rule, "rates": rates, "logprobs_mode": mode}
        self.windowed = window is not None
        self.native = self._native(target, draft, drafter, settings)
        self.reference = self._reference(target, draft, drafter, settings)

    def _native(
        self, target: NativeDense, draft: NativeDense | NativeEagle3Head, drafter: str, settings: dict[str, Any]
    ) -> Native:
        made: CpuDrafter | HostDrafter | None = None
        if drafter in DEVICE_DRAFTERS:
            made = CpuDrafter(model=draft, kv_cache=draft.allocate_cache(ROWS * TABLE, BLOCK_SIZE))
        elif drafter == "ngram":
            made = HostDrafter()
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
        self, target: NativeDense, draft: NativeDense | NativeEagle3Head, drafter: str, settings: dict[str, Any]
    ) -> Reference:
        made: Drafter | None = None
        cache: Any = draft.allocate_cache(ROWS * TABLE, BLOCK_SIZE)
        passes = over_tensors(draft)
        if isinstance(draft, NativeEagle3Head):
            made = HeadDrafter(passes, cache, MAX_LEN - 6, VOCAB, max_draft_lag=MAX_K + 3)
        elif drafter in ("model", "mixed"):
            made = DraftModel(passes, cache, MAX_LEN - 6, VOCAB)
        elif drafter in ("parallel", "mixed parallel"):
            made = ParallelDraftModel(passes, cache, MAX_LEN - 6, VOCAB, max_draft_lag=MAX_K + 1, mask_token_id=MASK)
        elif drafter == "ngram":
            made = HostDrafter()
        cpu, groups = torch.device("cpu"), self.scheduler.num_groups
        runner = ReferenceRunner(
            over_tensors(target),
            target.allocate_cache(groups * ROWS * TABLE, BLOCK_SIZE),
            made,
            TensorRowState.allocate(ROWS, MAX_LEN, BLOCK_SIZE, cpu, groups),
            SamplingState(ROWS, VOCAB, torch.float32, cpu),
            block_size=BLOCK_SIZE,
            **settings,
        )
        runner.use_extras(MadeUpExtras())
        return Reference(runner, TensorSlot(self.scheduler, MAX_K if drafter != "none" else 0))

    def launch(self, rng: np.random.Generator, drafter: str) -> Made:
        """Make up a launch and run it on both."""
        made = Made(rng, self.native.state, self.native.slot, drafter, windowed=self.windowed)
        self.reference.slot.record[:] = self.native.slot.record
        for slot in (self.reference.slot, self.native.slot):
            slot.results[:] = -9
        self.reference.runner.launch(self.reference.slot, self.reference.slot.header())
        self.native.runner.launch(self.native.slot, self.native.slot.header())
        return made


def shake_hidden(state: RowState, rng: np.random.Generator) -> None:
    """Where the states that are kept cannot be those of a row as it is, others; heads begin anywhere before their KV.

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
    """Rows as they may be before a launch, the same on both sides; now and then some blocks of KV are NaN."""
    state, sampling = pair.native.state, pair.reference.runner.sampling
    for row in range(ROWS):
        ended = not state.active[row] or state.num_tokens[row] >= state.limit[row]
        if ended or rng.random() < 0.05:
            n = int(rng.integers(1, MAX_LEN))
            state.num_tokens[row], state.active[row] = n, rng.random() < 0.9
            state.draft_len[row] = max(0, n - int(rng.integers(1, 5)))
            state.limit[row] = rng.integers(n + 1, MAX_LEN + 1)
            state.min_len[row] = rng.integers(0, MAX_LEN) if sampling.row(row).steps & MIN_TOKENS else 0
            state.tokens[row] = rng.integers(0, VOCAB, MAX_LEN + 1)
            state.block_table[row] = rng.permutation(TABLE) + row * TABLE
            for group, table in enumerate(state.group_tables.reshape(-1, ROWS + 1, TABLE), 1):
                table[row] = rng.permutation(TABLE) + (group * ROWS + row) * TABLE
    if state.hidden_states is not None:
        shake_hidden(state, rng)
    if pair.windowed:
        np.minimum(state.draft_start, state.draft_len, out=state.draft_start)
    theirs = pair.reference.arrays()
    assert np.array_equal(theirs["params"], state.params)
    for name, array in state.arrays().items():
        if name in theirs:
            theirs[name][...] = array
    sound = rng.random() < 0.9
    for mine, their in zip(pair.native.caches, pair.reference.caches, strict=True):
        for layer, copied in zip(mine.layers, their.layers, strict=True):
            values = torch.as_tensor(layer)
            values.nan_to_num_(nan=0.5)
            if not sound:
                values[rng.integers(0, len(layer) - 1, 12)] = torch.nan
            torch.as_tensor(copied).copy_(values)


def compare(pair: Pair, made: Made) -> dict[str, int]:
    """What a launch leaves, on both sides; what of it was seen."""
    reference, native = pair.reference, pair.native
    count = made.header["num_decode"] + made.header["num_prefill"]
    for name in SECTIONS:
        mine, theirs = (slot.results_arrays[name][:count].tolist() for slot in (native.slot, reference.slot))
        if name == "flags":  # of what is short of blocks, which the native runner does not feed, only that
            mine, theirs = ([flags & core.FLAG_CAPACITY or flags for flags in both] for both in (mine, theirs))
        assert mine == theirs, name
    emitted = native.slot.results_arrays["num_emitted"][:count].tolist()
    for entry, many in enumerate(emitted):
        assert native.slot.tokens[entry, :many].tolist() == reference.slot.tokens[entry, :many].tolist()
        accepted, drafted = (native.slot.results_arrays[f"num_{what}"][entry] for what in ("accepted", "drafted"))
        rejected = slice(accepted + 1, drafted + 1)
        is_sound = not native.slot.results_arrays["flags"][entry] & core.FLAG_DRAFT_NON_FINITE
        same = np.array_equal(native.slot.tokens[entry, rejected], reference.slot.tokens[entry, rejected])
        assert not is_sound or same, "rejected drafts"
    num_logprobs = compare_logprobs(native, reference, emitted)
    mine, theirs = native.state, reference.arrays()
    for name, array in mine.arrays().items():
        if name in ("tokens", "hidden_states") or name not in theirs:
            continue
        assert np.array_equal(array, theirs[name]), name
    for row, n in enumerate(mine.num_tokens.tolist()):
        assert np.array_equal(mine.tokens[row, :n], theirs["tokens"][row, :n])
    if mine.hidden_states is not None:
        kept = mine.hidden_states.shape[1] * (MAX_K + 2) // (MAX_K + 3)  # the last column is scratch
        ours, their = (array[:ROWS, :kept].view(np.int32) for array in (mine.hidden_states, theirs["hidden_states"]))
        assert np.array_equal(ours, their)
    # Where blocks are short the native runner feeds nothing; the scratch block is anything.
    flags = native.slot.results_arrays["flags"][:count]
    rows = native.slot.record_arrays["entry_row"][:count][flags & core.FLAG_CAPACITY != 0].tolist()
    ended = [row for row in range(ROWS) if not mine.active[row]]
    tables = (mine.block_table, *mine.group_tables.reshape(-1, ROWS + 1, TABLE))
    skipped = {int(block) for table in tables for row in (*rows, *ended) for block in table[row].tolist()}
    # Drafts of logits that are not finite are any tokens, and so is the KV that they leave after what counts as valid.
    for row in native.slot.record_arrays["entry_row"][:count][flags & core.FLAG_DRAFT_NON_FINITE != 0]:
        valid = (mine.num_tokens[row] - 1, mine.draft_len[row])
        for ours, their, first in zip(native.caches, reference.caches, valid, strict=True):
            after = np.arange(first, MAX_LEN)
            for table in tables:
                blocks = table[row, after // BLOCK_SIZE]
                place = blocks, slice(None), slice(None), after % BLOCK_SIZE
                for layer, other in zip(ours.layers, their.layers, strict=True):
                    if blocks.max() < len(layer):  # a draft model has the first group alone
                        torch.as_tensor(other)[place] = torch.as_tensor(layer)[place]
    for ours, their in zip(native.caches, reference.caches, strict=True):
        kept_blocks = [block for block in range(len(ours.layers[0]) - 1) if block not in skipped]
        for layer, other in zip(ours.layers, their.layers, strict=True):
            one, two = (torch.as_tensor(cache)[kept_blocks].view(torch.int32) for cache in (layer, other))
            assert torch.equal(one, two)
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


def compare_logprobs(native: Native, reference: Reference, emitted: list[int]) -> int:
    """Log probabilities of the tokens that each entry emitted: the same but for roundings; of how many there were any.

    Among tokens whose values differ by no more than a rounding ranks may differ, too.
    """
    mine, theirs, sampling = native.slot, reference.slot, reference.runner.sampling
    asked = [sampling.row(row).logprobs for row in mine.record_arrays["entry_row"][: len(emitted)].tolist()]
    wanted = [emitted[i] > 0 and top != core.LOGPROBS_NONE for i, top in enumerate(asked)]
    assert mine.logprobs.keys() == {i for i, is_wanted in enumerate(wanted) if is_wanted}
    pairs = [(found, theirs.logprobs[entry], emitted[entry]) for entry, found in mine.logprobs.items()]
    assert [told[:2] for told in mine.prompt_logprobs] == [told[:2] for told in theirs.prompt_logprobs]
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

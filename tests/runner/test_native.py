"""The native runner against the eager one on the same passes: row state, KV and results of random launches, bit by bit.

Records are made up, not planned: rows that ended, are short of blocks, lag, meet stops and limits, in any mixture.
SPECRS_LAUNCHES is how many launches all cases run together; `make launches` runs a million.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import pytest
import torch
from models.native_models import random_head, random_model
from numpy.typing import NDArray
from specrs import core
from specrs.core import CachedDrafter, HiddenDrafter, NgramProposer, RequestSampling, Scheduler
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
from specrs.runner.extras import RequestExtras
from specrs.runner.hidden_rows import HiddenRows
from specrs.runner.native import NativeRunner
from specrs.runner.ring import RingSlot
from specrs.runner.row_state import RowState
from specrs.runner.sampling_state import SamplingState
from specrs.structured.matcher import GrammarMatcher

ROWS, MAX_LEN, BLOCK_SIZE, MAX_K, VOCAB, BUDGET = 6, 30, 4, 3, 19, 64
MASK = 2
HEADS = ("head", "mixed head")
DEVICE_DRAFTERS = ("model", "parallel", "mixed", "mixed parallel", *HEADS)
HOST_DRAFTERS = ("ngram", "mixed", "mixed parallel", "mixed head")
TABLE = -(-MAX_LEN // BLOCK_SIZE)
SECTIONS = ("num_emitted", "num_accepted", "num_drafted", "flags", "finish_reason")


MIN_TOKENS = 1 << core.STEPS.index("min_tokens")


class MadeUpGrammar:
    """Allows tokens by chance after each text; now and then a stop token alone, or nothing."""

    def __init__(self, request_id: int) -> None:
        self._request_id, self.tokens = request_id, list[int]()

    def _allowed(self) -> NDArray[np.bool_]:
        rng = np.random.default_rng([self._request_id, *self.tokens])
        return rng.random(VOCAB) < rng.choice([0.0, 0.08, 0.6, 0.95], p=[0.06, 0.14, 0.4, 0.4])

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        bits = np.zeros(32 * len(out), bool)
        bits[:VOCAB] = self._allowed()
        out[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        is_allowed = bool(self._allowed()[token])
        self.tokens += [token] * is_allowed
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]


class MadeUpExtras:
    """The grammars of a side's requests, which live from launch to launch."""

    def __init__(self) -> None:
        self.grammars: dict[int, MadeUpGrammar] = {}

    def __call__(self, request_id: int) -> RequestExtras:
        grammar = self.grammars.setdefault(request_id, MadeUpGrammar(request_id))
        assert not grammar.tokens, "a launch has left drafts accepted"
        return RequestExtras(cast(GrammarMatcher, grammar))


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


class Made:
    """A launch made up from row state, which it first changes: what a scheduler would never do."""

    def __init__(self, rng: np.random.Generator, runner: EagerRunner, slot: RingSlot, drafter: str) -> None:
        self.rng, self.state, self.record, self.drafter = rng, runner.state, slot.record_arrays, drafter
        self.hidden, self.windowed = runner.hidden, runner.k_start is not None
        self.header = dict.fromkeys(core.HEADER_FIELDS, 0)
        slot.record[:] = -7  # what a launch does not count, it must not read
        # The eager runner counts tokens at all positions of a row, those that it ignores included.
        self.record["draft_token"][:] = rng.integers(0, VOCAB, len(self.record["draft_token"]))
        rows = rng.permutation(ROWS).tolist()
        num_decode = int(rng.integers(0, ROWS + 1))
        self.decode, others = rows[:num_decode], rows[num_decode:]
        self.prefill = others[: int(rng.integers(0, len(others) + 1))]
        if not self.decode and not self.prefill:
            self.prefill = others[:1]
        self.admitted = [row for row in self.prefill if rng.random() < 0.5][:3]  # uploads have room for so many
        self.lengths = {row: self._length(row) for row in range(ROWS)}
        self._admit()
        self._blocks()
        self._decode()
        self._prefill()
        if drafter in HEADS:
            self._draft_chunks(self._of_prompts())
        elif drafter in DEVICE_DRAFTERS:
            self._draft_chunks(self._lags())
        self.record["header"][: len(core.HEADER_FIELDS)] = [self.header[name] for name in core.HEADER_FIELDS]

    def _length(self, row: int) -> int:
        return int(self.rng.integers(1, MAX_LEN)) if row in self.admitted else int(self.state.num_tokens[row])

    def _admit(self) -> None:
        rng, record, tokens, start = self.rng, self.record, [], 0
        for i, row in enumerate(self.admitted):
            n = self.lengths[row]
            params = {
                "temperature": float(rng.choice([0.0, 0.5, 1.2])),
                "top_k": int(rng.choice([0, 3])),
                "top_p": float(rng.choice([1.0, 0.8])),
                "min_p": float(rng.choice([0.0, 0.1])),
            }
            asked, constraints = self._asked()
            request = RequestSampling(seed=i, **params, **asked)
            values, steps = request.columns("float32")
            steps |= MIN_TOKENS if rng.random() < 0.3 else 0
            told = {
                "row": row,
                "request_id": int(rng.integers(2**31)),
                "num_tokens": n,
                "prompt_len": int(rng.integers(1, n + 1)),
                "draft_len": 0,
                "limit": int(rng.integers(n + 1, MAX_LEN + 1)),
                "min_len": int(rng.integers(0, MAX_LEN)) if steps & MIN_TOKENS else 0,
                "num_cached": 0,
                "seed": int(rng.integers(-(2**63), 2**63)),
                "steps": steps,
                "logprobs": asked.get("logprobs", core.LOGPROBS_NONE),
                "prompt_logprobs": asked.get("prompt_logprobs", core.LOGPROBS_NONE),
                "num_allowed": len(asked["allowed_token_ids"]) if "allowed_token_ids" in asked else -1,
                "num_biases": len(asked.get("logit_bias", ())),
                "num_bad_words": len(asked.get("bad_words_token_ids", ())),
                "constraint_start": start,
            }
            for name, value in told.items():
                record[f"admit_{name}"][i] = value
            record["constraint"][start : start + len(constraints)] = constraints
            start += len(constraints)
            record["admit_constraint_start"][i + 1] = start
            width = len(core.PARAM_COLUMNS)
            record["admit_params"][i * width : (i + 1) * width] = np.array(values).view(np.int64)
            stops = [*rng.integers(0, VOCAB, 2), *[-1] * (core.MAX_STOP_IDS - 2)]
            record["admit_stop_ids"][i * core.MAX_STOP_IDS : (i + 1) * core.MAX_STOP_IDS] = stops
            tokens += rng.integers(0, VOCAB, n).tolist()
        record["upload_token"][: len(tokens)] = tokens
        self.header["num_admitted"], self.header["num_upload_tokens"] = len(self.admitted), len(tokens)
        self.uploaded = tokens

    def _asked(self) -> tuple[dict[str, Any], list[int]]:
        """What half of the requests ask of their logits, and its elements in the record's section `constraint`."""
        rng, asked = self.rng, dict[str, Any]()
        if rng.random() < 0.5:
            return asked, []
        if rng.random() < 0.4:
            asked["repetition_penalty"] = float(rng.choice([0.6, 1.3, 2.0]))
        if rng.random() < 0.4:
            asked |= {
                "frequency_penalty": float(rng.choice([-0.5, 0.7])),
                "presence_penalty": float(rng.choice([0, 0.4])),
            }
        if rng.random() < 0.4:
            asked["logprobs"] = int(rng.choice([0, 1, 4, core.LOGPROBS_ALL]))
        if rng.random() < 0.2:
            asked["prompt_logprobs"] = int(rng.choice([0, 3, core.LOGPROBS_ALL]))
        asked["has_extras"] = bool(rng.random() < 0.3)
        constraints: list[int] = []
        if rng.random() < 0.3:
            allowed = rng.permutation(VOCAB)[: rng.integers(1, 7)]
            asked["allowed_token_ids"] = allowed
            constraints += allowed.tolist()
        if rng.random() < 0.3:
            ids, biases = rng.permutation(VOCAB)[:2], rng.normal(0, 3, 2)
            asked["logit_bias"] = dict(zip(ids.tolist(), biases.tolist(), strict=True))
            constraints += [*ids.tolist(), *biases.view(np.int64).tolist()]
        if rng.random() < 0.3:
            words = [rng.integers(0, VOCAB, rng.integers(1, 3)).tolist() for _ in range(3)]
            asked["bad_words_token_ids"] = words
            constraints += [*map(len, words), *itertools.chain(*words)]
        return asked, constraints

    def _blocks(self) -> None:
        """Now and then a row's blocks in another order; each row has its own."""
        self.tables = torch.cat([self.state.block_table[None], self.state.group_tables])
        told = []
        for row in range(ROWS):
            if self.rng.random() < 0.1 or row in self.admitted:
                for group, table in enumerate(self.tables):
                    blocks = self.rng.permutation(TABLE) + (group * ROWS + row) * TABLE
                    table[row] = torch.from_numpy(blocks)
                    told += [(row, group, index, block) for index, block in enumerate(blocks)]
        for at, updates in zip(("row", "group", "index", "id"), zip(*told, strict=True), strict=False):
            if at != "group" or len(self.tables) > 1:
                self.record[f"block_{at}"][: len(told)] = updates
        self.header["num_block_updates"] = len(told)

    def _entry(self, i: int, row: int, k: int, *, whole: bool = False) -> None:
        n = self.lengths[row]
        short = not whole and self.rng.random() < 0.1
        told = {
            "row": row,
            "k": k,
            "drafter": self._whose(),
            "capacity": int(self.rng.integers(max(n - 2, 0), n + k + 1)) if short else MAX_LEN,
            "n_upper": n + int(self.rng.integers(0, 3)),
        }
        for name, value in told.items():
            self.record[f"entry_{name}"][i] = value

    def _whose(self) -> int:
        kinds = [core.DRAFTER_DEVICE] if self.drafter in DEVICE_DRAFTERS else []
        kinds += [core.DRAFTER_NGRAM] if self.drafter in HOST_DRAFTERS else []
        return int(self.rng.choice(kinds)) if kinds else core.DRAFTER_DEVICE

    def _decode(self) -> None:
        rng = self.rng
        most = 0 if self.drafter == "none" else MAX_K
        ks = sorted((int(k) for k in rng.integers(0, most + 1, len(self.decode))), reverse=True)
        for i, (row, k) in enumerate(zip(self.decode, ks, strict=True)):
            self._entry(i, row, k)
            if self.drafter in HOST_DRAFTERS:
                # what the target would write next, now and then
                self.record["draft_token"][i * MAX_K : i * MAX_K + k] = rng.integers(0, VOCAB, k)
        self.header["num_decode"], self.header["max_k"] = len(ks), max(ks, default=0)
        self.ks = ks

    def _slots(self, row: int, positions: np.ndarray, group: int = 0) -> np.ndarray:
        return self.tables[group, row].numpy()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def _prefill(self) -> None:
        record, at, offset = self.record, 0, 0
        starts = {}
        for row in self.admitted:
            starts[row] = offset
            offset += self.lengths[row]
        record["prefill_q_start"][0] = 0
        for j, row in enumerate(self.prefill):
            n = self.lengths[row]
            self._entry(len(self.decode) + j, row, 0)
            # A head that has begun somewhere is fed nothing before.
            least = 0 if self.hidden is None or row in self.admitted else int(self.hidden.draft_start[row])
            start = int(self.rng.integers(least, n))
            length = int(min(self.rng.integers(1, n - start + 1), (BUDGET - at) // (len(self.prefill) - j)))
            positions = np.arange(start, start + length)
            tokens = (
                np.array(self.uploaded)[starts[row] + positions]
                if row in starts
                else self.state.tokens[row].numpy()[positions]
            )
            record["chunk_start"][j], record["chunk_len"][j] = start, length
            record["chunk_is_last"][j] = start + length == n
            record["prefill_token"][at : at + length] = tokens
            record["prefill_position"][at : at + length] = positions
            for group in range(len(self.tables)):
                start_of = group * BUDGET + at
                record["prefill_slot"][start_of : start_of + length] = self._slots(row, positions, group)
            at += length
            record["prefill_q_start"][j + 1] = at
        self.header["num_prefill"], self.header["num_prefill_tokens"] = len(self.prefill), at

    def _lags(self) -> Iterator[tuple[int, int, int]]:
        """Row, start and length of what a draft model catches up with."""
        for row in self.decode:
            n = self.lengths[row]
            start = int(self.state.draft_len[row])
            if self.rng.random() >= 0.6 and start < n - 1:
                yield row, start, min(int(self.rng.integers(0, n - start)), 8)

    def _of_prompts(self) -> Iterator[tuple[int, int, int]]:
        """The same of what prompt chunks leave to a head, and of heads that are told to start anew."""
        for row in self.decode:
            if self.rng.random() < 0.1:
                yield row, 0, 0
        for j, row in enumerate(self.prefill):
            start, length = (int(self.record[f"chunk_{name}"][j]) for name in ("start", "len"))
            length = min(length, self.lengths[row] - 1 - start)
            if length > 0 and self.rng.random() < 0.8:
                yield row, start, length

    def _draft_chunks(self, chunks: Iterator[tuple[int, int, int]]) -> None:
        record, at, j = self.record, 0, 0
        record["draft_q_start"][0] = 0
        for row, start, length in chunks:
            positions = np.arange(start, start + length)
            slots = np.where(self.rng.random(length) < 0.2, -1, self._slots(row, positions))
            told = {"draft_chunk_row": row, "draft_chunk_start": start, "draft_chunk_len": length}
            # Behind a window a draft may begin anywhere that its rows attend.
            told["draft_chunk_k_start"] = int(self.rng.integers(0, start + 1)) if self.windowed else 0
            for name, value in told.items():
                record[name][j] = value
            record["draft_position"][at : at + length], record["draft_slot"][at : at + length] = positions, slots
            at, j = at + length, j + 1
            record["draft_q_start"][j] = at
        self.header["num_draft_chunks"], self.header["num_draft_tokens"] = j, at


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

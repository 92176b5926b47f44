"""Steps made up at random instead of planned by a scheduler, with any request parameters. Holds no tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from specrs import core
from specrs.backends.cpu.row_state import RowState
from specrs.backends.extras import RequestExtras
from specrs.backends.ring import RingSlot
from specrs.core import RequestSampling
from specrs.structured.matcher import GrammarMatcher

ROWS, MAX_LEN, BLOCK_SIZE, MAX_K, VOCAB, BUDGET = 6, 30, 4, 3, 19, 64
MASK = 2
HEADS = ("head", "mixed head")
DEVICE_DRAFTERS = ("model", "parallel", "mixed", "mixed parallel", *HEADS)
HOST_DRAFTERS = ("ngram", "mixed", "mixed parallel", "mixed head")
TABLE = -(-MAX_LEN // BLOCK_SIZE)


MIN_TOKENS = 1 << core.SAMPLING_STEPS.index("min_tokens")


class MadeUpGrammar:
    """Grammar for tests that allows random tokens after each text, and sometimes only a stop token or no token."""

    def __init__(self, request_id: int) -> None:
        self._request_id, self.tokens = request_id, list[int]()

    def _allowed(self) -> NDArray[np.bool_]:
        rng = np.random.default_rng([self._request_id, *self.tokens])
        return rng.random(VOCAB) < rng.choice([0.0, 0.08, 0.6, 0.95], p=[0.25, 0.15, 0.3, 0.3])

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
    """Grammars of the requests of one of the two runners that are compared. They live from step to step."""

    def __init__(self) -> None:
        self.grammars: dict[int, MadeUpGrammar] = {}

    def __call__(self, request_id: int) -> RequestExtras:
        grammar = self.grammars.setdefault(request_id, MadeUpGrammar(request_id))
        assert not grammar.tokens, "a step has left drafts accepted"
        return RequestExtras(cast(GrammarMatcher, grammar))


class Made:
    """A made-up step. It first changes row state in ways that a scheduler never would."""

    def __init__(
        self, rng: np.random.Generator, state: RowState, slot: RingSlot, drafter: str, *, windowed: bool = False
    ) -> None:
        self.rng, self.state, self.record, self.drafter = rng, state, slot.record_arrays, drafter
        self.windowed = windowed
        self.header = dict.fromkeys(core.HEADER_FIELDS, 0) | {"used_len": len(slot.record)}
        slot.record[:] = -7  # what a step does not count, it must not read
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
        """Return random options for a request, none for half of them, and the constraints on logits among these as
        elements of the record's section `constraint`."""
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
        asked["pooling"] = bool(rng.random() < 0.3)
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
        """Sometimes give a row other blocks, in another order. No two rows share a block."""
        further = self.state.group_tables.reshape(-1, ROWS + 1, TABLE)
        self.tables = np.concatenate([self.state.block_table[None], further])
        told = []
        for row in range(ROWS):
            if self.rng.random() < 0.1 or row in self.admitted:
                for group, table in enumerate(self.tables):
                    blocks = self.rng.permutation(TABLE) + (group * ROWS + row) * TABLE
                    table[row] = blocks
                    told += [(row, group, index, block) for index, block in enumerate(blocks)]
        for at, updates in zip(("row", "group", "index", "id"), zip(*told, strict=True), strict=False):
            if at != "group" or len(self.tables) > 1:
                self.record[f"block_{at}"][: len(told)] = updates
        self.header["num_block_updates"] = len(told)

    def _sequence(self, i: int, row: int, k: int, *, whole: bool = False) -> None:
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
            self.record[f"seq_{name}"][i] = value

    def _whose(self) -> int:
        kinds = [core.DRAFTER_DEVICE] if self.drafter in DEVICE_DRAFTERS else []
        kinds += [core.DRAFTERS.index("ngram")] if self.drafter in HOST_DRAFTERS else []
        return int(self.rng.choice(kinds)) if kinds else core.DRAFTER_DEVICE

    def _decode(self) -> None:
        rng = self.rng
        most = 0 if self.drafter == "none" else MAX_K
        ks = sorted((int(k) for k in rng.integers(0, most + 1, len(self.decode))), reverse=True)
        for i, (row, k) in enumerate(zip(self.decode, ks, strict=True)):
            self._sequence(i, row, k)
            if self.drafter in HOST_DRAFTERS:
                # what the target would write next, now and then
                self.record["draft_token"][i * MAX_K : i * MAX_K + k] = rng.integers(0, VOCAB, k)
        self.header["num_decode"], self.header["max_k"] = len(ks), max(ks, default=0)
        self.ks = ks

    def _slots(self, row: int, positions: np.ndarray, group: int = 0) -> np.ndarray:
        return self.tables[group, row][positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def _prefill(self) -> None:
        record, at, offset = self.record, 0, 0
        starts = {}
        for row in self.admitted:
            starts[row] = offset
            offset += self.lengths[row]
        record["prefill_q_start"][0] = 0
        for j, row in enumerate(self.prefill):
            n = self.lengths[row]
            self._sequence(len(self.decode) + j, row, 0)
            # A head that has begun somewhere is fed nothing before.
            reads_hidden = self.state.hidden_start is not None and row not in self.admitted
            least = int(self.state.draft_start[row]) if reads_hidden else 0
            start = int(self.rng.integers(least, n))
            length = int(min(self.rng.integers(1, n - start + 1), (BUDGET - at) // (len(self.prefill) - j)))
            positions = np.arange(start, start + length)
            tokens = (
                np.array(self.uploaded)[starts[row] + positions] if row in starts else self.state.tokens[row][positions]
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
        """Yield row, start and length of every catch-up chunk of a draft model."""
        for row in self.decode:
            n = self.lengths[row]
            start = int(self.state.draft_len[row])
            if self.rng.random() >= 0.6 and start < n - 1:
                yield row, start, min(int(self.rng.integers(0, n - start)), 8)

    def _of_prompts(self) -> Iterator[tuple[int, int, int]]:
        """Yield row, start and length of chunks of prompts that a head has to process. Length 0: the head starts
        anew."""
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

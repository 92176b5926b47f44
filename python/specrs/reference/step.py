"""A planned step in plain torch: uploads, prompt chunks, catch-up chunks, one decode iteration, in this order.

The rules are those of docs/start.md, applied to one sequence after the other. A record is all that a step needs, and
the results are all that it reports. Nothing here plans or settles steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from specrs.backends.extras import ExtrasLookup, no_extras
from specrs.backends.ring import Header, RingSlot
from specrs.core import (
    DRAFTER_DEVICE,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    FLAG_CAPACITY,
    FLAG_DRAFT_NON_FINITE,
    FLAG_NO_TOKEN_ALLOWED,
    FLAG_TARGET_NON_FINITE,
    LOGPROBS_NONE,
    MAX_STOP_IDS,
    PURPOSE_DRAFT,
    PURPOSE_GUMBEL,
)
from specrs.models.base import TorchModel
from specrs.models.kv_cache import KVCache
from specrs.reference.drafting import Drafter
from specrs.reference.rows import Grammar, Iteration, Row, pass_inputs
from specrs.reference.sampling import Record, Request, accept_at_rates, largest, token_logprobs, verify


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of verifying the drafts of one iteration."""

    num_accepted: int
    token: int
    """Token after the accepted drafts."""
    adjusted: list[Tensor]
    """Rows of the target's logits after masks, biases and penalties."""
    fault: int = 0
    """FLAG_* bits of a fault that ends the request before it emits anything; 0: no fault."""


class ReferenceRunner:
    """Runner that executes steps with plain torch, on rows of its own. If a drafter fails, the step fails."""

    def __init__(
        self,
        target: TorchModel,
        kv_cache: KVCache,
        drafter: Drafter | None,
        tables: Tensor,
        *,
        rule: str,
        rates: Sequence[float] | None = None,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        """Prepare to run steps.

        Args:
            drafter: drafter that runs passes; None: drafts are in the record, or there are none.
            tables: `[R, G, max_blocks]` int64, the blocks of every row in each KV group; steps mutate it.
            rule: rule that verifies sampled sequences, `rejection` or `coupled`.
            rates: rates at which drafts are accepted by position, whatever the models say; for timing only.
        """
        self.target, self.kv_cache, self.drafter, self.tables = target, kv_cache, drafter, tables
        self.rule, self.rates, self.logprobs_mode = rule, rates, logprobs_mode
        self.rows: dict[int, Row] = {}
        self.extras: ExtrasLookup = no_extras
        """Function that finds the grammar of a request id."""

    @torch.inference_mode()
    def execute(self, slot: RingSlot, header: Header) -> None:
        """Execute the step planned in `slot.record`; mutates rows, both KV caches and the slot's results."""
        record = {name: section.tolist() for name, section in slot.record_arrays.items()}
        slot.logprobs.clear()
        slot.prompt_logprobs.clear()
        slot.pooled.clear()
        if self.drafter is not None:
            self.drafter.begin_step()
        self._upload(record, header)
        states = {}
        for chunk in range(header.num_prefill):
            row = record["seq_row"][header.num_decode + chunk]
            states[row] = self._prefill(slot, record, chunk, header.num_decode + chunk, self.rows[row])
        for chunk in range(header.num_draft_chunks):
            row = record["draft_chunk_row"][chunk]
            self._catch_up(record, chunk, self.rows[row], states.get(row))
        for index in range(header.num_decode):
            self._decode(slot, record, index, self.rows[record["seq_row"][index]], synthetic=header.max_k > 0)

    def _upload(self, record: Record, header: Header) -> None:
        """Write the block updates, and begin the rows of admitted requests."""
        for i in range(header.num_block_updates):
            group = record["block_group"][i] if self.tables.shape[1] > 1 else 0
            self.tables[record["block_row"][i], group, record["block_index"][i]] = record["block_id"][i]
        tokens = iter(record["upload_token"])
        for i in range(header.num_admitted):
            row = record["admit_row"][i]
            stops = record["admit_stop_ids"][i * MAX_STOP_IDS : (i + 1) * MAX_STOP_IDS]
            self.rows[row] = Row(
                request=Request.read(record, i),
                tokens=list(islice(tokens, record["admit_num_tokens"][i])),
                limit=record["admit_limit"][i],
                min_len=record["admit_min_len"][i],
                stop_ids=[stop for stop in stops if stop >= 0],
                tables=self.tables[row],
                index=row,
                draft_len=record["admit_draft_len"][i],
            )

    def _prefill(self, slot: RingSlot, record: Record, chunk: int, index: int, row: Row) -> Tensor | None:
        """Feed a prompt chunk, and draw the first token if it ends the prompt. Return the target's hidden states `[N,
        L, hidden]` for a head; None without one."""
        request, n = row.request, len(row.tokens)
        fed = slice(*record["prefill_q_start"][chunk : chunk + 2])
        tokens, positions = record["prefill_token"][fed], record["prefill_position"][fed]
        final, states = self._feed(row, tokens, positions, prompts=True)
        wanted = row.tokens[positions[0] + 1 : min(positions[-1] + 2, request.prompt_len)]
        if request.prompt_logprobs != LOGPROBS_NONE and wanted:
            values = self.target.compute_logits(final[: len(wanted)]).log_softmax(1)
            found = token_logprobs(list(values), wanted, request.prompt_logprobs)
            slot.prompt_logprobs.append((request.request_id, positions[0] + 1, found))
        is_finite = bool(final.isfinite().all())
        if not record["chunk_is_last"][chunk]:
            report(slot, index, flags=0 if is_finite else FLAG_TARGET_NON_FINITE)
            return states
        it = Iteration(index, row, n, self._grammar(row))
        if self._runs(slot, it, record["seq_capacity"][index]):
            if "pooling" in request.steps:
                self._pool(slot, it, final[-1], is_finite=is_finite)
            else:
                self._finish(slot, it, self.target.compute_logits(final[-1:]), is_finite=is_finite)
        if states is not None:
            row.hidden, row.hidden_start = [states[-1]], n - 1
        return states

    def _catch_up(self, record: Record, chunk: int, row: Row, states: Tensor | None) -> None:
        """Feed the drafter committed tokens whose KV it lacks. `states` are the target's hidden states of a prompt
        chunk."""
        assert self.drafter is not None
        start, length, k_start = (record[f"draft_chunk_{name}"][chunk] for name in ("start", "len", "k_start"))
        fed = slice(*record["draft_q_start"][chunk : chunk + 2])
        # Where the slot is -1, another request has written the KV.
        places = zip(record["draft_position"][fed], record["draft_slot"][fed], strict=True)
        self.drafter.catch_up(row, start, length, [position for position, slot in places if slot >= 0], k_start, states)
        row.draft_len = start + length

    def _decode(self, slot: RingSlot, record: Record, index: int, row: Row, *, synthetic: bool) -> None:
        """Run one iteration of one row: draft, verify, accept, report."""
        drafter, n = self.drafter, len(row.tokens)
        by_passes = drafter is not None and record["seq_drafter"][index] == DRAFTER_DEVICE
        k = min(record["seq_k"][index], row.limit - 1 - n)
        if drafter is not None and by_passes:
            k = min(k, drafter.max_model_len + 1 - n) if drafter.is_ready(row) else 0
        k = max(k, 0)
        it = Iteration(index, row, n, self._grammar(row), by_passes)
        if not self._runs(slot, it, record["seq_capacity"][index] - k):
            return
        if drafter is not None and by_passes and k:
            drafter.draft(row, k, lambda logits: self._choose(it, logits))
        elif k:
            first = index * (slot.tokens.shape[1] - 1)
            for draft in record["draft_token"][first : first + k]:
                it.add(draft)
        final, states = self._feed(row, [row.tokens[-1], *it.drafts], range(n - 1, n + k))
        self._finish(slot, it, it.without_forced(self.target.compute_logits(final)), synthetic=synthetic)
        grown = len(row.tokens)
        if drafter is not None and states is not None and grown > n:
            # What the drafts were made of is given up, and what would leave the new no room.
            if (k and by_passes) or grown - 1 - row.hidden_start > drafter.num_kept:
                row.hidden, row.hidden_start = [], n - 1
            row.hidden = [*row.hidden, *states[: grown - n]]

    def _feed(
        self, row: Row, tokens: Sequence[int], positions: Sequence[int], *, prompts: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        inputs = pass_inputs(row, tokens, positions, self.kv_cache.block_size, prompts=prompts)
        return self.target.forward(inputs, self.kv_cache, () if self.drafter is None else self.drafter.hidden_layers)

    def _grammar(self, row: Row) -> Grammar | None:
        if not row.active or "extras" not in row.request.steps:
            return None
        extras = self.extras(row.request.request_id)
        assert extras is not None, "a record alone cannot be replayed if a request has a grammar"
        return Grammar(extras.matcher, self.target.vocab_size)

    def _runs(self, slot: RingSlot, it: Iteration, capacity: int) -> bool:
        """Return True if the row is active and its n tokens fit into `capacity`. Otherwise report the fault and end the
        row."""
        row = it.row
        if row.active and it.n <= capacity:
            return True
        report(slot, it.index, flags=FLAG_CAPACITY if row.active else 0)
        row.active = False
        return False

    def _choose(self, it: Iteration, logits: Tensor) -> int:
        """Draw the next draft from the drafter's logits `[V]`, and store the distribution that it was drawn from."""
        request, i = it.row.request, len(it.drafts)
        if not math.isfinite(logits.max()):
            it.flags = FLAG_DRAFT_NON_FINITE
        adjusted = it.adjust(logits, i)
        if self.rule == "rejection":
            it.q.append(request.filter(adjusted).softmax(0))
        it.add(request.draw(adjusted, it.n + i, PURPOSE_DRAFT if it.q else PURPOSE_GUMBEL))
        return it.drafts[-1]

    def _verify(self, it: Iteration, logits: Tensor, *, is_finite: bool, synthetic: bool) -> Verdict:
        """Verify the drafts by the target's `logits` `[k + 1, V]`. `is_finite`: the target's rows before `logits` are
        finite. With `synthetic`, drafts are accepted at given rates."""
        request, drafts = it.row.request, it.drafts
        adjusted = [it.adjust(row, i) for i, row in enumerate(logits)]
        m, token = verify(request, adjusted, it.n, drafts, it.q)
        if self.rates is not None and synthetic:
            m = accept_at_rates(self.rates[: len(drafts)], request.seed, it.n)
            token = largest(adjusted[m])
        # Plain decoding reaches rows 0 to m, so only these are judged. A row without an allowed token ends there.
        tops = [float(row.max()) for row in logits]
        empty = [i for i in range(m + 1) if math.isfinite(tops[i]) and float(adjusted[i].max()) == -math.inf]
        reached = empty[0] if empty else m
        fault = 0 if is_finite and all(map(math.isfinite, tops[: reached + 1])) else FLAG_TARGET_NON_FINITE
        if empty and reached == 0:
            fault |= FLAG_NO_TOKEN_ALLOWED
        elif empty:
            m, token = reached - 1, drafts[reached - 1]
        return Verdict(m, token, adjusted, fault)

    def _pool(self, slot: RingSlot, it: Iteration, hidden: Tensor, *, is_finite: bool) -> None:
        """Report the final hidden state of a prompt's last token, or its logits of the allowed ids, and emit token 0.
        `is_finite` says whether all rows of the chunk are finite."""
        self._commit(slot, it, Verdict(0, 0, [], 0 if is_finite else FLAG_TARGET_NON_FINITE))
        if is_finite:
            request = it.row.request
            allowed = request.allowed
            values = hidden if allowed is None else self.target.compute_logits(hidden[None])[0, sorted(allowed)]
            slot.pooled.append((request.request_id, values.numpy()))

    def _finish(
        self, slot: RingSlot, it: Iteration, logits: Tensor, *, is_finite: bool = True, synthetic: bool = False
    ) -> None:
        """Verify the drafts, commit tokens, and report their log probabilities.

        Args:
            logits: the target's logits, `[k + 1, V]`.
            is_finite: True if the target's rows before `logits` are finite.
            synthetic: True if drafts are accepted at the given rates, if there are any.
        """
        verdict = self._verify(it, logits, is_finite=is_finite, synthetic=synthetic)
        request, tokens = it.row.request, self._commit(slot, it, verdict)
        if tokens and request.logprobs != LOGPROBS_NONE:
            values = [self._reported(request, raw, own) for raw, own in zip(logits, verdict.adjusted, strict=True)]
            slot.logprobs[it.index] = token_logprobs(values[: len(tokens)], tokens, request.logprobs)

    def _commit(self, slot: RingSlot, it: Iteration, verdict: Verdict) -> list[int]:
        """Commit the tokens of a verdict, apply stops and the limit, and report. Return the emitted tokens; none if the
        verdict has a fault."""
        row, n, k = it.row, it.n, len(it.drafts)
        flags, m = it.flags | verdict.fault, verdict.num_accepted
        if it.grammar is not None:
            it.grammar.finish()
        if verdict.fault:
            row.active = False
            report(slot, it.index, flags=flags)
            return []
        tokens = [*it.drafts[:m], verdict.token]
        min_len = 0 if it.grammar is not None else row.min_len  # a grammar masks stop ids itself
        stops = [i for i, token in enumerate(tokens) if n + i >= min_len and token in row.stop_ids]
        tokens = tokens[: stops[0] + 1] if stops else tokens
        row.tokens = row.tokens + tokens
        row.active = not stops and len(row.tokens) < row.limit
        if k and it.by_passes and self.drafter is not None:
            row.draft_len = self.drafter.draft_len_after(n, k, len(row.tokens))
        reason = FINISH_STOP if stops else FINISH_NONE if row.active else FINISH_LENGTH
        numbers = {"num_emitted": len(tokens), "num_accepted": m, "num_drafted": k, "finish_reason": reason}
        report(slot, it.index, flags=flags, **numbers)
        slot.tokens[it.index, m + 1 : k + 1] = it.drafts[m:]
        slot.tokens[it.index, : len(tokens)] = tokens
        return tokens

    def _reported(self, request: Request, raw: Tensor, adjusted: Tensor) -> Tensor:
        """Return the values of a row `[V]` that `logprobs_mode` reports."""
        values = raw if self.logprobs_mode.startswith("raw") else request.filter(adjusted)
        return values.log_softmax(0) if self.logprobs_mode.endswith("logprobs") else values


def report(slot: RingSlot, index: int, **numbers: int) -> None:
    """Write `numbers` into the results of sequence `index`, and 0 into its other results."""
    for name in ("flags", "num_emitted", "num_accepted", "num_drafted", "finish_reason"):
        slot.results_arrays[name][index] = numbers.get(name, 0)

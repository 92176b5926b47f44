"""Replays drafters that need no model on texts that are known. The scheduler drafts; no model runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specrs.core import FINISH_LENGTH, FINISH_NONE, HEADER_FIELDS, PLAN_STEP, HostDrafter, Scheduler

_BLOCK = 16
_CHUNK = 4096


@dataclass(frozen=True)
class KnownText:
    """A prompt and the answer that the target gives to it, as token ids. The answer has at least one token."""

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass
class Replayed:
    """Passes, tokens and planning time of all replayed texts. A prompt's own pass is not counted."""

    passes: Counter[int] = field(default_factory=Counter)
    """Number of decode passes by their number of draft tokens."""
    tokens: int = 0
    """Number of tokens of these passes."""
    seconds: float = 0.0
    """Seconds that planning these passes took, drafting included."""

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens of a pass; 1 if there was none."""
        return self.tokens / self.passes.total() if self.tokens else 1.0


def replay(
    texts: Sequence[KnownText], drafters: Sequence[HostDrafter], k: int, row_costs: Sequence[float] = ()
) -> Replayed:
    """Replay `texts` in their order, one at a time, with up to `k` drafts in each pass.

    A draft counts as accepted if it and all drafts before it equal the answer's tokens. That is greedy verification,
    so the passes are those of an engine whose target gives these answers. Drafters that learn from outputs learn from
    the answers of earlier texts.

    `row_costs` are the costs of verifying 1 to `k` drafts, as shares of a pass without drafts. With several drafters,
    each pass uses the one that promises the most by these costs. Empty: drafts cost nothing.
    """
    found = Replayed()
    longest = max((len(text.prompt) + len(text.answer) for text in texts), default=2)
    scheduler = Scheduler(
        max_num_seqs=1,
        max_model_len=longest + 1,
        num_blocks=longest // _BLOCK + 2,
        block_size=_BLOCK,
        max_num_batched_tokens=_CHUNK,
        num_speculative_tokens=k,
        drafter=list(drafters) or None,
        enable_prefix_caching=False,
    )
    scheduler.set_draft_costs(0.0, list(row_costs) or [0.0] * k, 0.0)
    loop = _Loop(scheduler, k)
    for number, text in enumerate(texts):
        loop.run(number, text, found)
    return found


class _Loop:
    """Plans and settles the steps of a scheduler, one request at a time, with the answers of known texts in place of a
    target."""

    def __init__(self, scheduler: Scheduler, k: int) -> None:
        self.scheduler = scheduler
        self.k = k
        self.record = np.zeros(scheduler.record_size, dtype=np.int64)
        self.results = np.zeros(scheduler.results_size, dtype=np.int64)
        self.settled = np.zeros(scheduler.settled_size, dtype=np.int64)
        sections = scheduler.record_layout()
        self.planned = {name: self.record[start : start + count] for name, (start, count) in sections.items()}
        sections = scheduler.results_layout()
        self.reported = {name: self.results[start : start + count] for name, (start, count) in sections.items()}

    def run(self, number: int, text: KnownText, found: Replayed) -> None:
        """Replay one text and add what happened to `found`."""
        answer, done = list(text.answer), 0
        prompt = np.asarray(text.prompt, dtype=np.int64)
        self.scheduler.add_request(number, prompt, limit=len(prompt) + len(answer), num_speculative_tokens=self.k)
        while done < len(answer):
            start = time.perf_counter()
            state = self.scheduler.plan(self.record)
            seconds = time.perf_counter() - start
            assert state == PLAN_STEP
            header = dict(zip(HEADER_FIELDS, self.planned["header"].tolist(), strict=False))
            self.results[:] = 0
            if header["num_decode"]:
                k = int(self.planned["seq_k"][0])  # at most as many as leave a token to the target
                drafts = self.planned["draft_token"][:k].tolist()
                accepted = next((i for i, draft in enumerate(drafts) if draft != answer[done + i]), k)
                self.reported["num_accepted"][0], self.reported["num_drafted"][0] = accepted, k
                emitted = accepted + 1
                found.passes[k] += 1
                found.tokens += emitted
                found.seconds += seconds
            else:
                emitted = int(self.planned["chunk_is_last"][0])
            self.reported["num_emitted"][0] = emitted
            self.reported["tokens"][:emitted] = answer[done : done + emitted]
            done += emitted
            self.reported["finish_reason"][0] = FINISH_LENGTH if done == len(answer) else FINISH_NONE
            self.scheduler.settle(header["step_id"], self.results, self.settled)

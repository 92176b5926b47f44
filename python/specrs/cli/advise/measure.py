"""Runs candidates on the requests of the traffic, one request at a time, and times them. Prints nothing.

Every engine sees each request once, in the order of the traffic. Drafters that learn from answers therefore learn what
they would learn in service.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from specrs.cli.advise.choice import Candidate, Drafted
from specrs.cli.advise.replay import KnownText
from specrs.cli.advise.traffic import LoggedRequest, tokens_of
from specrs.sampling import SamplingParams
from specrs.speculative_config import AUTO

if TYPE_CHECKING:
    from specrs.core import CostModel
    from specrs.llm import LLM

ROUNDS = 3
"""Maximum number of times that the finalists run. The fastest run of each request counts, because noise only adds
time."""


@dataclass
class Timed:
    """Runs of one candidate. A request's first token is left out, because its prompt's pass yields it."""

    seconds: float = 0.0
    tokens: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    """Number of passes with drafts by the number of accepted drafts."""

    def add(self, other: Timed) -> None:
        """Add another run."""
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.accepted += other.accepted
        self.histogram = [a + b for a, b in zip_longest(self.histogram, other.histogram, fillvalue=0)]

    @property
    def passes(self) -> int:
        """Number of passes, with and without drafts."""
        return self.tokens - self.accepted

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, not counting the first token of each answer; 0 if no answer has a second token."""
        return self.tokens / self.seconds if self.tokens else 0.0

    def drafted(self, k: int) -> Drafted:
        """Return the figures of the passes, which had up to `k` drafts."""
        return Drafted(k, 1e3 * self.seconds / self.passes, self.passes, self.histogram)


class Machine:
    """This machine with one model: builds engines and runs requests on them."""

    def __init__(
        self, model: str | None, settings: Mapping[str, Any], *, max_model_len: int, max_tokens: int, max_k: int
    ) -> None:
        """Remember the options. `settings` are other fields of `EngineConfig`. Nothing is loaded yet."""
        self.model = model
        self.settings = settings
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens
        self.max_k = max_k

    def engine(self, candidate: Candidate) -> LLM:
        """Load an engine for a candidate, and run a few tokens, because first calls allocate."""
        from specrs.llm import LLM

        llm = LLM(
            model=self.model,
            speculative_config=candidate.speculative_config(self.max_k),
            quantization=candidate.quantization,
            max_num_seqs=1,
            max_model_len=self.max_model_len,
            enable_prefix_caching=False,
            **self.settings,
        )
        params = SamplingParams(temperature=0.0, max_tokens=min(4, self.max_model_len - 1), ignore_eos=True)
        list(llm.stream([0], params))
        return llm

    def costs(self, quantization: str | None) -> tuple[CostModel, LLM]:
        """Measure the milliseconds of passes with 0 to `max_k` drafts that cost nothing. Return also the engine that
        measured them."""
        llm = self.engine(Candidate("ngram", AUTO, quantization, {"method": "ngram"}))
        planner = llm.engine.planner
        assert planner is not None
        return planner.costs(), llm

    def run(self, llm: LLM, request: LoggedRequest, k: int | None = None) -> tuple[Timed, list[int]]:
        """Run one request greedily. Return its times and the tokens of its answer. `k` limits the drafts."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens_of(request, self.max_tokens),
            # The bundled pair ends immediately after some prompts.
            ignore_eos=self.model is None,
            detokenize=False,
            num_speculative_tokens=k,
        )
        first = last = 0.0
        begun = 0
        for output in llm.stream(list(request.prompt), params):
            last = time.perf_counter()
            if not begun:
                first, begun = last, len(output.outputs[0].token_ids)
        metrics, ids = output.metrics, output.outputs[0].token_ids
        tokens = len(ids) - begun
        accepted = min(metrics.accepted_tokens, tokens)
        return Timed(last - first, tokens, accepted, list(metrics.acceptance_histogram)), list(ids)

    def answers(
        self, llm: LLM, requests: Sequence[LoggedRequest], seconds: float
    ) -> tuple[list[LoggedRequest], list[KnownText], Timed]:
        """Answer requests without drafts for about `seconds`, at least one.

        Return the requests that were answered, their texts, and the times. Where the log has an answer, it replaces the
        target's answer in the texts.
        """
        total, done, texts = Timed(), list[LoggedRequest](), list[KnownText]()
        end = time.perf_counter() + seconds
        for request in requests:
            timed, ids = self.run(llm, request, 0)
            total.add(timed)
            logged = request.completion or ids
            texts.append(KnownText(request.prompt, logged[: tokens_of(request, self.max_tokens)]))
            done.append(request)
            if time.perf_counter() > end:
                break
        return done, texts, total

    def compare(
        self,
        candidates: Sequence[Candidate],
        requests: Sequence[LoggedRequest],
        *,
        rounds: int = 1,
        deadline: float = 0.0,
        advance: Callable[[], None] = lambda: None,
    ) -> dict[Candidate, Timed]:
        """Run all requests on each candidate. Candidates take turns after each request, so that a machine that slows
        down affects all alike.

        Repeats with new engines up to `rounds` times, while another round would end before `deadline`, a time of
        `time.perf_counter`. Each request counts with its fastest run. `advance` is called after each run.
        """
        best: dict[tuple[Candidate, int], Timed] = {}
        for _ in range(rounds):
            began = time.perf_counter()
            engines = {candidate: self.engine(candidate) for candidate in candidates}
            for number, request in enumerate(requests):
                for candidate, llm in engines.items():
                    timed, _ = self.run(llm, request)
                    known = best.get((candidate, number))
                    if known is None or timed.seconds < known.seconds:
                        best[candidate, number] = timed
                    advance()
            del engines, llm  # their memory, before the next round loads new ones
            now = time.perf_counter()
            if now + (now - began) > deadline:
                break
        found = {candidate: Timed() for candidate in candidates}
        for (candidate, _), timed in best.items():
            found[candidate].add(timed)
        return found

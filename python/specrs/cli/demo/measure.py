"""Runs every prompt at every setting, one request at a time, and times the runs. Prints nothing.

The settings take turns prompt by prompt, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

from specrs.outputs import AcceptanceFigures
from specrs.speculative_config import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specrs.llm import LLM
    from specrs.outputs import RequestOutput
    from specrs.sampling import SamplingParams

Prompt: TypeAlias = str | list[int]
"""A prompt: text, or token ids."""


@dataclass(frozen=True)
class Setting:
    """Settings of one row of the demo's table."""

    k: int | str
    """Number of drafts per iteration; 0 is plain decoding, `auto` lets the engine choose."""
    llm: LLM
    drafter: str = ""
    """Drafting method, if the rows use different ones."""


@dataclass
class Result:
    """Measurements of one setting over all prompts. Times are in seconds."""

    k: int | str
    """Number of drafts per iteration; 0 is plain decoding. With `auto`, the engine chose it for each step."""
    drafter: str = ""
    """Drafting method of the setting, if the rows use different ones."""
    seconds: float = 0.0
    acceptance: AcceptanceFigures = field(default_factory=AcceptanceFigures)
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)

    def add(self, output: RequestOutput, seconds: float) -> None:
        """Add the texts, time and acceptance counts of one finished request."""
        self.texts.append(output.outputs[0].text)
        self.token_ids.append(output.outputs[0].token_ids)
        self.seconds += seconds
        old, new = self.acceptance, output.metrics
        # A request's histogram may be as long as the engine's K; nothing beyond its own K is counted there.
        own = new.acceptance_histogram if isinstance(self.k, str) else new.acceptance_histogram[: self.k + 1]
        pairs = zip_longest(old.acceptance_histogram, own, fillvalue=0)
        self.acceptance = AcceptanceFigures(
            draft_tokens=old.draft_tokens + new.draft_tokens, acceptance_histogram=[a + b for a, b in pairs]
        )

    @property
    def name(self) -> str:
        """Name of this setting in tables and charts, for example `vanilla` or `K = 3`."""
        if self.k == 0:
            return "vanilla"
        return " ".join(filter(None, (self.drafter, AUTO if self.k == AUTO else f"K = {self.k}")))

    @property
    def mean_k(self) -> float:
        """Mean number of drafts per iteration that drafted; 0 if none did."""
        return self.acceptance.draft_tokens / self.acceptance.drafts if self.acceptance.drafts else 0.0

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens over all prompts."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_iteration(self) -> float:
        """Mean number of tokens per pass of the target. Passes that generated none are left out. 1 for plain
        decoding."""
        accepted = sum(i * count for i, count in enumerate(self.acceptance.acceptance_histogram))
        return self.num_tokens / (self.num_tokens - accepted)

    @property
    def ms_per_iteration(self) -> float:
        """Mean wall-clock milliseconds per pass of the target that generated tokens. Time for prefill is included."""
        return 1e3 * self.tokens_per_iteration / self.tokens_per_second

    @property
    def tokens_per_second(self) -> float:
        """Number of generated tokens per second of wall-clock time, prefill included."""
        return self.num_tokens / self.seconds

    def same_texts(self, other: Result) -> int:
        """Return the number of prompts for which this setting and `other` generated the same tokens."""
        return sum(mine == theirs for mine, theirs in zip(self.token_ids, other.token_ids, strict=True))


def measure(
    settings: Sequence[Setting],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    advance: Callable[[str, int], None],
) -> list[Result]:
    """Run every prompt at every setting. Return one result per setting, in the order of `settings`.

    Settings take turns prompt by prompt. `advance(name, tokens)` is called after each request. Raises the error of a
    request that was rejected.
    """
    results = [Result(setting.k, setting.drafter) for setting in settings]
    for setting in settings:  # first calls allocate and pick kernels
        _one(setting, prompts[0], params.replace(max_tokens=min(8, params.max_tokens or 8)))
    for prompt in prompts:
        for setting, result in zip(settings, results, strict=True):
            output, seconds = _one(setting, prompt, params)
            result.add(output, seconds)
            advance(result.name, len(output.outputs[0].token_ids))
    return results


def _one(setting: Setting, prompt: Prompt, params: SamplingParams) -> tuple[RequestOutput, float]:
    own = params if isinstance(setting.k, str) else params.replace(num_speculative_tokens=setting.k)
    start = time.perf_counter()
    (output,) = setting.llm.generate(prompt, own, use_tqdm=False)
    return output, time.perf_counter() - start

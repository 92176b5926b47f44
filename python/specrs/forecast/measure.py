"""Measures passes of a draft model and a target on this machine, each alone and inside speculation. One request at a
time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specrs.errors import InvalidConfigError, check_int, invalid_config
from specrs.forecast.compare import PassTimes
from specrs.forecast.regression import LineFit

if TYPE_CHECKING:
    from specrs.llm import LLM
    from specrs.sampling import SamplingParams


@dataclass(frozen=True)
class Measured:
    """Milliseconds between the outputs of a request: of the draft model alone, the target alone, and the target at each
    K.

    The values are medians; for drafters on the host they are means, because some iterations have no drafts. `draft_ms`
    is None for a drafter that cannot run alone. Acceptance lengths count all iterations, also those without drafts.
    """

    draft_ms: float | None
    target_ms: float
    itl_ms: Mapping[int, float]
    acceptance_lengths: Mapping[int, float]
    fit: LineFit = field(init=False)

    def __post_init__(self) -> None:
        fit = LineFit.through([float(k) for k in self.itl_ms], list(self.itl_ms.values()))
        object.__setattr__(self, "fit", fit)

    @property
    def alone(self) -> PassTimes | None:
        """Pass times of each model when it runs alone. The time of an iteration without drafts is set to the target's
        pass time. None if the drafter cannot run alone."""
        if self.draft_ms is None:
            return None
        return PassTimes(self.draft_ms, self.target_ms, self.target_ms)

    @property
    def inside(self) -> PassTimes:
        """Pass times inside speculation: slope and intercept of ITL against K. The time of an iteration without drafts
        is set to that of the target alone.

        If drafts cost so little that noise makes the slope negative, the slope is 0 and the intercept is the mean.
        """
        if self.fit.slope < 0.0:
            return PassTimes(0.0, statistics.fmean(self.itl_ms.values()), self.target_ms)
        return PassTimes(self.fit.slope, self.fit.intercept, self.target_ms)


def measure(
    model: str | None,
    speculative_config: Mapping[str, Any],
    ks: Sequence[int],
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    rounds: int = 3,
    advance: Callable[[str], None] = lambda name: None,
    **settings: Any,
) -> Measured:
    """Stream every prompt through each setting, in turns, `rounds` times, so that a machine that drifts affects all
    settings equally.

    `settings` are other fields of `EngineConfig`. `advance` is called with a setting's name after each prompt. Raises
    `InvalidConfigError` for fewer than two K, and for models that are missing or wrong.
    """
    if len(set(ks)) < 2 or min(ks) < 1:
        raise invalid_config("k", list(ks), "must be at least two different numbers of draft tokens, for a line")
    check_int(InvalidConfigError, "rounds", rounds, 1)
    if not prompts:
        raise invalid_config("prompts", list(prompts), "must have at least one prompt")
    from specrs.config import EngineConfig
    from specrs.llm import LLM
    from specrs.speculative_config import for_repeats

    shared = {"max_num_seqs": 1, "enable_prefix_caching": False, **settings}
    drafter = for_repeats(speculative_config)
    pair = LLM(model=model, speculative_config={**drafter, "num_speculative_tokens": max(ks)}, **shared)
    config = pair.engine.config
    assert isinstance(config, EngineConfig)
    speculative = config.speculative_config
    assert speculative is not None
    alone = {"target alone": LLM(model=config.target, **shared)}
    if speculative.method == "draft_model":
        alone |= {"draft alone": LLM(model=str(config.draft), **shared)}
    runs: dict[str, tuple[LLM, SamplingParams]] = {name: (llm, params) for name, llm in alone.items()}
    runs |= {f"K = {k}": (pair, params.replace(num_speculative_tokens=k)) for k in ks}
    gaps: dict[str, list[float]] = {name: [] for name in runs}
    lengths: dict[str, list[tuple[int, int]]] = {name: [] for name in runs}
    for name, (llm, own) in runs.items():  # first calls allocate and pick kernels
        _stream(llm, prompts[0], own, [])
        advance(name)
    for _ in range(rounds):
        for prompt in prompts:
            for name, (llm, own) in runs.items():
                lengths[name].append(_stream(llm, prompt, own, gaps[name]))
                advance(name)
    for name, values in gaps.items():
        if not values:
            raise invalid_config("max_tokens", params.max_tokens, f"too few: {name} never gave two outputs to time")
    middle = statistics.fmean if speculative.drafts_on_host else statistics.median
    ms = {name: 1e3 * middle(values) for name, values in gaps.items()}

    def length(k: int) -> float:
        tokens, accepted = map(sum, zip(*lengths[f"K = {k}"], strict=True))
        return tokens / (tokens - accepted)

    return Measured(
        ms.get("draft alone"),
        ms["target alone"],
        {k: ms[f"K = {k}"] for k in ks},
        {k: length(k) for k in ks},
    )


def _stream(llm: LLM, prompt: Any, params: SamplingParams, gaps: list[float]) -> tuple[int, int]:
    """Append the seconds between the outputs of one request to `gaps`, except the last, which `max_tokens` may have
    cut.

    Return the number of tokens of the request's iterations, and how many of these tokens were accepted drafts.
    """
    times = []
    for output in llm.stream(prompt, params):
        times.append(time.perf_counter())
        metrics = output.metrics
    between = [after - before for before, after in pairwise(times)]
    gaps += between[:-1]
    # The first token is the prompt's.
    return len(output.outputs[0].token_ids) - 1, metrics.accepted_tokens

"""Results of `specrs advise` as text, and the configuration file for `specrs serve`. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specrs.cli.advise.choice import Candidate, Forecast, error_of
from specrs.errors import invalid_config
from specrs.speculative_config import AUTO

_COLUMNS = ("drafter", "K", "weights", "tokens per pass", "forecast", "speed-up", "measured", "speed-up", "error")


def table(forecasts: Sequence[Forecast], speeds: Mapping[Candidate, float]) -> str:
    """Return a table: each drafter and type of weights at its best K, and all candidates that ran, fastest forecast
    first. Speed-ups are relative to the measured speed without drafts."""
    shown: dict[Candidate, Forecast | None] = {}
    drafters: set[tuple[str, str | None]] = set()
    for one in sorted(forecasts, key=lambda one: one.ms_per_token):
        drafter = one.candidate.name, one.candidate.quantization
        if drafter not in drafters or one.candidate in speeds:
            shown[one.candidate] = one
        drafters.add(drafter)
    shown |= {candidate: None for candidate in speeds if candidate not in shown}
    rows = [_row(candidate, forecast, speeds) for candidate, forecast in shown.items()]
    if all(candidate.quantization is None for candidate in shown):
        rows = [(*row[:2], *row[3:]) for row in rows]
        heads: tuple[str, ...] = (*_COLUMNS[:2], *_COLUMNS[3:])
    else:
        heads = _COLUMNS
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(_aligned(row, widths) for row in (heads, *rows))


def _row(candidate: Candidate, forecast: Forecast | None, speeds: Mapping[Candidate, float]) -> tuple[str, ...]:
    plain = speeds[Candidate()]
    expected = ("", "", "")
    if forecast is not None:
        speed = forecast.tokens_per_second
        expected = (f"{forecast.tokens_per_pass:.2f}", f"{speed:.1f}", f"{speed / plain:.2f}x")
    measured = ("", "", "")
    if candidate in speeds:
        speed = speeds[candidate]
        error = "" if forecast is None else f"{100 * (forecast.tokens_per_second / speed - 1.0):+.1f} %"
        measured = (f"{speed:.1f}", f"{speed / plain:.2f}x", error)
    name = candidate.name or "none"
    return (name, str(candidate.k), candidate.quantization or "as stored", *expected, *measured)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    return "  ".join([f"{first[0]:<{first[1]}}", *(f"{text:>{width}}" for text, width in rest)]).rstrip()


def conclusion(choice: Candidate, forecasts: Sequence[Forecast], speeds: Mapping[Candidate, float], max_k: int) -> str:
    """Return one line: what to use, its expected speed, and the error of the forecasts."""
    speed, gain = speeds[choice], speeds[choice] / speeds[Candidate()]
    weights = "" if choice.quantization is None else f" with {choice.quantization} weights, which change the text"
    if choice.k == 0:
        advice = f"no speculation{weights}"
    else:
        k = f"{AUTO} (up to {max_k})" if choice.k == AUTO else choice.k
        advice = f"{choice.name}, K = {k}{weights}"
    error = f"forecasts were off by up to {100 * error_of(forecasts, speeds):.0f} %"
    return f"Use {advice}: {speed:.1f} tokens/s expected, {gain:.2f}x; {error}."


def config_of(model: str | None, settings: Mapping[str, Any], choice: Candidate, max_k: int) -> dict[str, Any]:
    """Return the flags of `specrs serve` for the choice. `settings` are the engine options that were given."""
    flags: dict[str, Any] = {} if model is None else {"model": model}
    flags |= {name.replace("_", "-"): value for name, value in settings.items()}
    if choice.quantization is not None:
        flags["quantization"] = choice.quantization
    drafting = choice.speculative_config(max_k)
    return flags | ({"speculation": False} if drafting is None else {"speculative-config": drafting})


def check_out(path: Path) -> None:
    """Check, before anything is measured, that the file can be written. Raises `InvalidConfigError` if not."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise invalid_config("--out", str(path), f"cannot be written: {error.strerror}") from None


def write_config(path: Path, flags: Mapping[str, Any], comment: str) -> None:
    """Write the YAML file that `specrs serve --config` reads, below `comment`. Raises `InvalidConfigError` if that
    fails."""
    import yaml

    text = yaml.safe_dump(dict(flags), sort_keys=False, allow_unicode=True)
    try:
        path.write_text(f"# {comment}\n{text}", encoding="utf-8")
    except OSError as error:
        raise invalid_config("--out", str(path), f"cannot be written: {error.strerror}") from None

"""Statistics of one answer as text: a table for `specrs generate`, a line for `specrs chat`."""

from __future__ import annotations

from typing import Any

from specrs.outputs import RequestMetrics


def tokens_per_step(metrics: RequestMetrics) -> float:
    """Return the mean number of tokens of the answer per step of the target.

    The acceptance length counts only steps with drafts, so it may be larger. Drafts after a stop count as accepted.
    """
    count = metrics.num_generated_tokens
    return count / max(count - metrics.accepted_tokens, metrics.drafts, 1)


def table(metrics: RequestMetrics, finish_reason: str | None, seconds: float) -> str:
    """Return the statistics of one answer, a line each. Speculation is left out if nothing was drafted."""
    count = metrics.num_generated_tokens
    rows: list[tuple[str, Any]] = [
        ("Generated tokens:", f"{count} ({finish_reason})"),
        ("Output token throughput (tok/s):", f"{count / seconds:.1f}"),
    ]
    if metrics.time_to_first_token is not None:
        rows.append(("Time to first token (ms):", f"{1e3 * metrics.time_to_first_token:.1f}"))
    if metrics.time_per_output_token is not None:
        rows.append(("Time per output token (ms):", f"{1e3 * metrics.time_per_output_token:.2f}"))
    if metrics.drafts:
        shares = " ".join(f"{100 * share:.1f}" for share in metrics.per_position)
        rows += [
            ("Acceptance length:", f"{metrics.acceptance_length:.2f}"),
            ("Acceptance rate (%):", f"{100 * metrics.acceptance_rate:.1f}"),
            ("Per-position acceptance (%):", shares),
            ("Drafts:", metrics.drafts),
            ("Draft tokens:", metrics.draft_tokens),
            ("Accepted tokens:", metrics.accepted_tokens),
            ("Tokens per pass of the target:", f"{tokens_per_step(metrics):.2f}"),
        ]
    return "\n".join(f"{name:<40} {value}" for name, value in rows)


def line(metrics: RequestMetrics, finish_reason: str | None, seconds: float) -> str:
    """Return the main statistics of an answer in one line. `finish_reason` is shown only if the answer was cut."""
    count, first = metrics.num_generated_tokens, metrics.time_to_first_token
    parts = [f"{count} tokens"]
    if first is not None:
        speed = f", then {(count - 1) / (seconds - first):.1f} tokens/s" if count > 1 and seconds > first else ""
        parts.append(f"first after {first:.2f} s{speed}")
    if metrics.drafts:
        accepted = f"{metrics.accepted_tokens} of {metrics.draft_tokens} drafts accepted"
        parts.append(f"{tokens_per_step(metrics):.2f} tokens per step, {accepted}")
    else:
        parts.append("nothing drafted")
    if finish_reason == "length":
        parts.append("cut by --max-tokens or the context")
    elif finish_reason is None:
        parts.append("ended by Ctrl-C")
    return "; ".join(parts)

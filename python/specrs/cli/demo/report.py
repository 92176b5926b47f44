"""The demo's results as text. Formats values; measures nothing."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrs.cli.demo.measure import Result


def machine(threads: int, dtype: str) -> str:
    """Return one line about the machine: versions, processor, threads and dtype. torch is named if it was imported."""
    torch = f"torch {version('torch')}, " if "torch" in sys.modules else ""
    return f"specrs {version('specrs')}, {torch}{_processor()}, {threads} thread{'s' if threads > 1 else ''}, {dtype}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine


def heading(target: str, drafter: str, num_prompts: int, tokens: str) -> str:
    """Return a line that says what will run. `tokens` is the number of tokens per prompt, in words."""
    return f"{target}, {drafter}; {num_prompts} prompts, {tokens} each, greedy, one at a time\n"


def text(prompt: str, results: Sequence[Result]) -> str:
    """Return a prompt and the texts that the settings generated for it. Equal texts appear once, with the names of
    their settings."""
    parts = [f"--- a prompt\n{prompt}"]
    shown: dict[str, list[str]] = {}
    for result in results:
        shown.setdefault(result.texts[0], []).append(result.name)
    for continuation, names in shown.items():
        # The text starts where the prompt ended, often in the middle of a line.
        parts.append(f"--- its continuation: {', '.join(names)}\n{continuation.lstrip(chr(10)).rstrip()}")
    return "\n".join(parts) + "\n"


def table(results: Sequence[Result]) -> str:
    """Return a table with a row per setting. Speed-ups are relative to the first row, plain decoding."""
    plain = results[0]
    deepest = max(result.k for result in results if isinstance(result.k, int))
    positions = "".join(f"{i:>6}" for i in range(1, deepest + 1))
    width = max(9, *(len(result.name) + 2 for result in results))
    lines = [
        f"{'':<{width}}{'tokens/s':>9}{'speed-up':>10}{'acceptance':>12}{'acceptance':>12}   accepted at position (%)",
        f"{'':<{width}}{'':>9}{'':>10}{'length':>12}{'rate (%)':>12} {positions}",
    ]
    for result in results:
        speed = f"{result.tokens_per_second:.1f}"
        gain = f"{result.tokens_per_second / plain.tokens_per_second:.2f}x"
        line = f"{result.name:<{width}}{speed:>9}{gain:>10}"
        if result.k:
            statistics = result.acceptance
            shares = "".join(f"{100 * share:6.1f}" for share in statistics.per_position[:deepest])
            line += f"{statistics.acceptance_length:>12.2f}{100 * statistics.acceptance_rate:>12.1f} {shares}"
        lines.append(line)
        if isinstance(result.k, str):
            drafted = f"{result.mean_k:.1f} drafts an iteration" if result.mean_k else "no drafts"
            lines.append(f"{result.name}: the engine chose K for each step, {drafted} on average")
    return "\n".join(lines)


def explanation(results: Sequence[Result]) -> str:
    """Return two sentences for each drafter that explain its results: what passes cost here, and therefore which K
    pays. Empty if nothing was drafted at a fixed K."""
    plain = results[0]
    drafters: dict[str, list[Result]] = {}
    for result in results[1:]:
        if isinstance(result.k, int) and result.acceptance.drafts:
            drafters.setdefault(result.drafter, []).append(result)
    told = (textwrap.fill(_why(plain, rows, name), width=110) for name, rows in drafters.items())
    return "".join(f"\n{text}\n" for text in told)


def _why(plain: Result, rows: Sequence[Result], drafter: str) -> str:
    pass_ms = plain.ms_per_iteration
    # Least squares through the plain pass: what an iteration costs beyond it, by draft.
    draft_ms = sum(row.k * (row.ms_per_iteration - pass_ms) for row in rows if isinstance(row.k, int))
    draft_ms /= sum(row.k**2 for row in rows if isinstance(row.k, int))
    costs = _listed([f"{row.ms_per_iteration / pass_ms:.2f}" for row in rows])
    brings = _listed([f"{row.tokens_per_iteration:.2f}" for row in rows])
    ks = f"K = {_listed([str(row.k) for row in rows])}"
    best = max(rows, key=lambda row: row.tokens_per_second)
    gain = best.tokens_per_second / plain.tokens_per_second
    verdict = (
        f"K = {best.k} pays most, {best.tokens_per_iteration:.2f} tokens for "
        f"{best.ms_per_iteration / pass_ms:.2f} passes, {gain:.2f}x"
        if gain > 1
        else f"no K pays here: even K = {best.k} brings {best.tokens_per_iteration:.2f} tokens for the time of "
        f"{best.ms_per_iteration / pass_ms:.2f} plain ones"
    )
    return (
        f"{f'{drafter}: ' if drafter else ''}a plain pass of the target takes {pass_ms:.2f} ms here, and each draft, "
        f"its pass and its row in the target's, {draft_ms:.2f} ms more ({draft_ms / pass_ms:.0%} of it), so that an "
        f"iteration takes the time of {costs} plain passes at {ks}. It brings {brings} tokens where a plain pass "
        f"brings 1, therefore {verdict}."
    )


def _listed(items: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))


def equality(results: Sequence[Result]) -> str:
    """Return a sentence with the number of texts that equal those of plain decoding, token for token."""
    plain, others = results[0], results[1:]
    total = len(plain.texts) * len(others)
    same = sum(result.same_texts(plain) for result in others)
    if same == total:
        return f"\nAll {total} texts with drafts equal vanilla's, token for token."
    return "\n" + textwrap.fill(
        f"{same} of {total} texts with drafts equal vanilla's, token for token; {total - same} do not. Float rounding "
        "depends on how many rows a pass has, so where two tokens are nearly tied either may come out first; "
        "with --dtype float64 that is very rare.",
        width=110,
    )

"""Results as Markdown: a table of every set, the goals, and ids that differ. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.figures import FIRST, LENGTH, MEMORY, SPEED, Measured, best_peer, find, ratio
from peers.goals import Goal
from peers.settings import Line, Setting

NUM_BYTES = {"float32": 4, "bfloat16": 2}


def cell(value: float | None, form: str = ".2f") -> str:
    """Return `value` in the format `form`; empty if there is no value."""
    return "" if value is None else format(value, form)


def spread(each: Measured, key: str, form: str) -> str:
    """Return the median of figure `key` over all runs, and its range, each number in the format `form`."""
    values = each.values(key)
    return f"{each.median(key):{form}} ({values[0]:{form}} to {values[-1]:{form}})"


def rows_of(setting: Setting, lines: Sequence[Measured], limits: dict[str, Any]) -> list[str]:
    """Return the set's table. `limits` has the read limit in passes per second by dtype of the weights that are read,
    and the stored dtype."""
    rows = [
        "| engine | dtype | K | tokens/s | of the best peer at this K | at any K | of its own K = 0 | first token (ms) "
        "| acceptance length | of its read limit | peak memory (MB) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in lines:
        line, speed = each.line, each.median(SPEED)
        if speed is None:
            continue
        plain = find(lines, Line(line.engine, 0, line.dtype, line.fp32_weights, line.sampled))
        passes = limits["passes_per_s"].get(weights_dtype(line, limits["stored"]))
        limit = passes * setting.batch if line.k == 0 and passes is not None else None
        cells = [
            line.name,
            line.dtype,
            str(line.k),
            spread(each, SPEED, ",.0f"),
            cell(ratio(speed, best_peer(lines, line.dtype, line.k))),
            cell(ratio(speed, best_peer(lines, line.dtype))),
            cell(ratio(speed, plain.median(SPEED) if plain and line.k else None)),
            spread(each, FIRST, ".1f"),
            cell(each.median(LENGTH)),
            cell(ratio(speed, limit)),
            cell(each.median(MEMORY), ",.0f"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def weights_dtype(line: Line, stored: str) -> str:
    """Return the type of the weights that a pass of `line` reads. specrs keeps weights as bf16 where that is exact.
    Other engines have the dtype of the arithmetic, or the type of the quantized file."""
    return "bfloat16" if line.engine == "specrs" and stored == "bfloat16" and not line.fp32_weights else line.dtype


def goal_rows(found: Sequence[Goal]) -> list[str]:
    """Return a table of the goals, with whether each is met."""
    rows = ["| ratio | measured | goal | met |", "| --- | --- | --- | --- |"]
    for goal in found:
        told = {None: "not measured", True: "yes", False: "no"}[goal.met]
        rows.append(f"| {goal.what} | {cell(goal.value)} | {goal.sign} {goal.bar:g} | {told} |")
    return rows


def id_rows(compared: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each case whose ids differ or whose requests ended early, and a line that counts the others."""
    rows, same = [], 0
    for row in compared:
        name = f"{row['line']}, K = {row['k']}, {row['dtype']}"
        if row["short"]:
            rows.append(f"- {name}: {row['short']} requests ended early")
        if row.get("first_difference") is not None:
            request, position = row["first_difference"]
            rows.append(
                f"- {name}: {row['equal']} of {row['requests']} texts are those of {row['reference']}, K = 0; the "
                f"first difference is at token {position} of text {request}"
            )
        elif "reference" in row:
            same += 1
    return [*rows, f"- the reference's greedy ids in every text: {same} other lines"]

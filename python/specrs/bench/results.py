"""Results of a sweep as rows of a parquet file. Reads and writes; measures nothing.

Times are milliseconds, durations seconds, acceptance rates percent, throughputs per second.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from specrs.errors import invalid_config
from specrs.extras import require

VANILLA = "None"
"""Value of the columns `sd_method` and `draft_model` in rows without drafts."""
_SETTINGS = b"specrs.sweep"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One measurement of a sweep. The fields are the columns of its file, in order. Acceptance is None without
    drafts."""

    dataset: str
    temp: float
    concurrency: int
    benchmark_duration_s: float
    n_reqs: int
    req_throughput: float
    mean_ttft: float
    median_ttft: float
    p99_ttft: float
    mean_tpot: float
    median_tpot: float
    p99_tpot: float
    mean_itl: float
    median_itl: float
    p99_itl: float
    output_token_throughput: float
    sd_method: str
    num_spec_toks: int
    draft_model: str
    tp: int
    acceptance_rate: float | None
    acceptance_length: float | None
    analysis: str

    @property
    def vanilla(self) -> bool:
        """True if nothing was drafted."""
        return self.sd_method == VANILLA

    @property
    def workload(self) -> tuple[str, str, float, int]:
        """Workload: (analysis, data set, temperature, number of tensor parallel ranks). Rows are compared only within
        one workload."""
        return (self.analysis, self.dataset, self.temp, self.tp)

    @property
    def output_len(self) -> float:
        """Mean number of tokens generated per request."""
        return self.output_token_throughput * self.benchmark_duration_s / self.n_reqs

    @property
    def latency_ms(self) -> float:
        """Mean milliseconds of a request: the time to its first token, and `output_len - 1` times the time per
        token."""
        return self.mean_ttft + (self.output_len - 1) * self.mean_tpot

    @property
    def mean_in_flight(self) -> float:
        """Mean number of requests in flight, by Little's law. It is less than `concurrency` if the client had to wait
        for arrivals."""
        return self.req_throughput * self.latency_ms / 1e3


LEAST_TAKEN = 0.75
"""Minimum share of `concurrency` that must be in flight on average. Below it, arrivals limit a row's throughput, not
the server."""


def arrivals_warning(rows: Sequence[SweepRow]) -> str | None:
    """Return a warning about rows whose throughput is limited by arrivals, not by the server; None if there are
    none."""
    limited = [row for row in rows if row.mean_in_flight < LEAST_TAKEN * row.concurrency]
    if not limited:
        return None
    worst = min(limited, key=lambda row: row.mean_in_flight / row.concurrency)
    return (
        f"warning: arrivals limit {len(limited)} of {len(rows)} rows: requests came more slowly than they were "
        f"answered (at concurrency {worst.concurrency} {worst.mean_in_flight:.2f} were in flight on average), so that "
        "throughput is that of the arrivals and speed-ups over vanilla are near 1; --request-rate inf keeps every "
        "place taken"
    )


COLUMNS = tuple(field.name for field in dataclasses.fields(SweepRow))


def read(path: Path) -> list[SweepRow]:
    """Read the rows of a file. Raises `InvalidConfigError` if the file is missing, is no parquet file or lacks a
    column."""
    table = _table(path)
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        allowed = f"lacks the columns {', '.join(missing)}; must have {', '.join(COLUMNS)}"
        raise invalid_config("file", str(path), allowed)
    hints = get_type_hints(SweepRow)
    rows = []
    for number, record in enumerate(table.select(list(COLUMNS)).to_pylist()):
        values: dict[str, Any] = {}
        for name in COLUMNS:
            optional = name in ("acceptance_rate", "acceptance_length")
            values[name] = _value(path, number, name, record[name], float if optional else hints[name], optional)
        rows.append(SweepRow(**values))
    return rows


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings that `write` stored with the rows; empty for a file of another program. Raises
    `InvalidConfigError` if the file is missing or is no parquet file."""
    metadata = _table(path).schema.metadata or {}
    settings: dict[str, Any] = json.loads(metadata.get(_SETTINGS, b"{}"))
    return settings


def write(path: Path, rows: Sequence[SweepRow], settings: Mapping[str, Any]) -> None:
    """Replace the file by one with these rows and settings, atomically: a reader sees either the old or the new
    rows."""
    pyarrow, parquet = _pyarrow(path)
    types = {str: pyarrow.string(), float: pyarrow.float64(), int: pyarrow.int64()}
    hints = get_type_hints(SweepRow)
    schema = pyarrow.schema(
        [(name, types.get(hints[name], pyarrow.float64())) for name in COLUMNS],
        metadata={_SETTINGS: json.dumps(settings, sort_keys=True).encode()},
    )
    table = pyarrow.Table.from_pylist([dataclasses.asdict(row) for row in rows], schema=schema)
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, part)
        os.replace(part, path)
    except OSError as fault:
        raise invalid_config("file", str(path), f"cannot be written: {fault}") from None


def _value(path: Path, number: int, name: str, value: Any, kind: type, optional: bool) -> Any:
    if value is None and optional:
        return None
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind):
        wanted = {str: "a string", float: "a number", int: "an integer"}[kind]
        raise invalid_config(f"{path}: row {number}, {name}", value, f"must be {wanted}{' or null' * optional}")
    return value


def _table(path: Path) -> Any:
    pyarrow, parquet = _pyarrow(path)
    if not path.is_file():
        raise invalid_config("file", str(path), "is not there; must be a parquet file of specrs bench sweep")
    try:
        return parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as fault:
        reason = str(fault).splitlines()[0]
        raise invalid_config("file", str(path), f"could not be read as parquet: {reason}") from None


def _pyarrow(path: Path) -> tuple[Any, Any]:
    require("pyarrow", "bench", f"file={path}")
    import pyarrow
    import pyarrow.parquet

    return pyarrow, pyarrow.parquet

"""aiperf: streamed chats at a concurrency; no request fails, and its table about speculation is filled."""

import json
from pathlib import Path

from specrs.pair import TARGET

from .conftest import Client


def test_aiperf(base_url: str, client: Client, tmp_path: Path) -> None:
    printed = client(
        *("aiperf", "aiperf", "profile", "--model", "pair", "--url", base_url, "--tokenizer", str(TARGET)),
        *("--endpoint-type", "chat", "--streaming", "--extra-inputs", "ignore_eos:true", "--no-gpu-telemetry"),
        *("--request-count", "12", "--concurrency", "4", "--isl", "40", "--osl", "24", "--random-seed", "1"),
        *("--artifact-dir", "out"),
        offline=False,
    )
    assert "Spec Decode" in printed
    report = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 12
    assert report.get("error_request_count", {"avg": 0})["avg"] == 0
    records = [json.loads(line) for line in (tmp_path / "out/profile_export.jsonl").read_text().splitlines()]
    assert len(records) == 12
    assert all(record.get("error") is None for record in records)
    for line in ("Acceptance Length (ratio)", "Draft Acceptance Rate (%)", "Spec Decode Steps (count)"):
        row = next(row for row in printed.splitlines() if line in row)
        assert "N/A" not in row, row

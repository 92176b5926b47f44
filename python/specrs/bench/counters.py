"""Acceptance counters of a server, read from /metrics before and after a run. Knows their names; stores no series."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_PREFIX = "vllm:spec_decode_num_"
_LINE = re.compile(r"^(?P<name>[^\s{]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True)
class SpecDecodeCounters:
    """Numbers of drafts, of tokens drafted and accepted, and of accepted tokens by position (from 0), over all engines
    of a server."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: Mapping[int, int] = field(default_factory=dict)

    def since(self, before: SpecDecodeCounters) -> SpecDecodeCounters:
        """Return the counts between `before` and this snapshot."""
        positions = self.accepted_per_position
        return SpecDecodeCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            {i: count - before.accepted_per_position.get(i, 0) for i, count in sorted(positions.items())},
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per iteration with drafts: 1 + accepted tokens / drafts; 1 without drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def per_position(self) -> list[float]:
        """Share of drafts whose token at each position was accepted."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted_per_position.values()]


def parse(text: str) -> SpecDecodeCounters | None:
    """Return the counters in a Prometheus text, summed over other labels; None if it has none."""
    totals = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    positions: dict[int, int] = {}
    found = False
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or not match["name"].startswith(_PREFIX) or not match["name"].endswith("_total"):
            continue
        name = match["name"].removeprefix(_PREFIX).removesuffix("_total")
        value = int(float(match["value"]))
        if name in totals:
            found = True
            totals[name] += value
        elif name == "accepted_tokens_per_pos" and (position := _POSITION.search(match["labels"] or "")):
            positions[int(position[1])] = positions.get(int(position[1]), 0) + value
    return SpecDecodeCounters(**totals, accepted_per_position=positions) if found else None

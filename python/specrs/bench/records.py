"""Events of one request as the client saw them: when it was sent, and when each chunk arrived. Knows no server and
computes no means.

Times are integer nanoseconds of one clock, so metrics that are computed again are exactly equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Events of one request. `events[i]` is the time at which the i-th streamed chunk with a choice arrived; one chunk
    may hold many tokens.

    Definitions are those of `vllm bench serve`. TTFT is the time from sending to the first chunk, ITL the time between
    chunks, and latency the time to the last chunk. TPOT is the time from the first to the last chunk, per token after
    the first.
    """

    start: int = 0
    events: list[int] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str | None = "not sent"
    """Reason for a failure; None if the request succeeded."""

    @property
    def success(self) -> bool:
        """True if the request ended without an error and with at least one chunk."""
        return self.error is None and bool(self.events)

    @property
    def ttft(self) -> int:
        """Nanoseconds from sending to the first chunk."""
        return self.events[0] - self.start

    @property
    def latency(self) -> int:
        """Nanoseconds from sending to the last chunk."""
        return self.events[-1] - self.start

    @property
    def itls(self) -> list[int]:
        """Nanoseconds between consecutive chunks, one value fewer than there are chunks."""
        return [after - before for before, after in zip(self.events, self.events[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Nanoseconds per token after the first; None with fewer than two tokens."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

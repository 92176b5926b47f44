"""What a client saw of one request: when it was sent, when something came. Knows no server and computes no means.

Times are integer nanoseconds of one clock, so that a figure computed from them again is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request. `events[i]` is when the i-th streamed chunk with a choice arrived; one chunk may hold many tokens.

    Definitions are those of `vllm bench serve`: TTFT is from sending to the first chunk, ITL between chunks, latency to
    the last chunk, TPOT what a token after the first took of the time after the first chunk.
    """

    start: int = 0
    events: list[int] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str | None = "not sent"
    """Why it failed; None if it ended as it should."""

    @property
    def success(self) -> bool:
        """Whether it ended as it should, with at least one chunk."""
        return self.error is None and bool(self.events)

    @property
    def ttft(self) -> int:
        """Nanoseconds to the first chunk."""
        return self.events[0] - self.start

    @property
    def latency(self) -> int:
        """Nanoseconds to the last chunk."""
        return self.events[-1] - self.start

    @property
    def itls(self) -> list[int]:
        """Nanoseconds between chunks; one fewer than there are chunks."""
        return [after - before for before, after in zip(self.events, self.events[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Nanoseconds per token after the first; None with fewer than two tokens."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

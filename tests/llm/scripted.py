"""An engine without a model: every request's output is a script, so that faults can be placed. Holds no tests."""

from collections.abc import Callable

from specrs.config import EngineConfig
from specrs.engine.request import FinishReason, Request
from specrs.errors import SpecrsError, UnknownRequestError
from specrs.outputs import EngineStats
from specrs.sampling import RequestLimits, validate_request
from specrs.tokenizer import Tokenizer

EOS = 0


class ScriptedEngine:
    """Gives each request `tokens_per_step` tokens of its script in every step.

    `script(request)` is the whole output, or an exception to end the request with. `before_step(engine)` may raise.
    """

    def __init__(self) -> None:
        self.limits = RequestLimits(max_model_len=64, vocab_size=2048, num_speculative_tokens=4, eos_token_ids=(EOS,))
        self.config = EngineConfig(seed=7)
        self.team = None
        self.loras = None
        self.idle_interval: float | None = None
        self.tokens_per_step = 2
        self.script: Callable[[Request], list[int] | SpecrsError] = lambda request: [65 - 33 + 1] * 100
        self.before_step: Callable[[ScriptedEngine], None] = lambda engine: None
        self.live: dict[int, Request] = {}
        self.seen: list[Request] = []
        self.num_steps = self.num_idle = 0
        self.planned_ahead = False
        """True to pretend that a step is in flight when no request lives any more, as with a depth of 2."""
        self._in_flight = False

    def use_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Do nothing: the only end-of-sequence id is `EOS`, whatever the tokenizer says."""

    def add_request(self, request: Request) -> None:
        request.stop_token_ids = validate_request(request.prompt_token_ids, request.params, self.limits).stop_token_ids
        request.eos_token_ids = frozenset() if request.params.ignore_eos else frozenset({EOS})
        self.live[request.request_id] = request
        self.seen.append(request)
        self._in_flight = self.planned_ahead

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        if request_id not in self.live:
            raise UnknownRequestError(f"request {request_id} is not live")
        self.live.pop(request_id).finish(reason)

    def has_unfinished(self) -> bool:
        return bool(self.live) or self._in_flight

    def step(self) -> list[Request]:
        self.before_step(self)
        self.num_steps += 1
        touched = list(self.live.values())
        self._in_flight = self._in_flight and bool(touched)
        for request in touched:
            self._advance(request)
            if request.finished:
                del self.live[request.request_id]
        return touched

    def close(self) -> None:
        """Do nothing: this engine has no threads."""

    def settle_idle(self) -> None:
        self.num_idle += not self.live

    def stats(self) -> EngineStats:
        return EngineStats(generation_tokens=sum(len(request.output_token_ids) for request in self.seen))

    def reset_stats(self) -> None:
        self.seen = []

    def _advance(self, request: Request) -> None:
        script = self.script(request)
        if isinstance(script, SpecrsError):
            request.finish(FinishReason.ERROR, script)
            return
        start = len(request.output_token_ids)
        room = (request.params.max_tokens or 1000) - start
        new = script[start : start + min(self.tokens_per_step, room)]
        stopped = next((i for i, token in enumerate(new) if token in request.stop_token_ids), None)
        if stopped is not None:
            new = new[: stopped + 1]
        if request.append(new, ended_by_token=stopped is not None) or stopped is not None:
            request.finish(FinishReason.STOP)
        elif len(new) == room:
            request.finish(FinishReason.LENGTH)

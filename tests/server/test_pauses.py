"""Work that would pause every stream of a server: garbage collections, long writes, timers of closed connections."""

import asyncio
import gc
import json
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.server import encoding, run
from specrs.server.context import Shared
from specrs.server.generation import Generation
from specrs.server.http import DeadlineProtocol
from specrs.server.run import ServerSettings, run_server
from uvicorn.config import Config
from uvicorn.server import ServerState


@pytest.mark.parametrize("breaks", [False, True])
def test_objects_of_the_start_are_out_of_collections_while_it_serves(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    made: list[Any] = []
    seen: list[tuple[bool, bool, float]] = []
    interval = sys.getswitchinterval()

    def tracked(mark: object) -> bool:
        return any(one is mark for one in gc.get_objects())

    class Process:
        def __init__(self, models: Any, _shared: Any, _settings: ServerSettings, _listener: socket.socket) -> None:
            made.append(models)

        async def serve(self) -> bool:
            seen.append((gc.get_freeze_count() > 0, tracked(made[0]), sys.getswitchinterval()))
            if breaks:
                raise RuntimeError("serving broke")
            return False

    def make_context(*_: Any) -> Any:
        return SimpleNamespace(model_names=["m"], adapters={}, metrics=None, shared=Shared())

    monkeypatch.setattr(run, "make_context", make_context)
    monkeypatch.setattr(run, "close_context", lambda _: True)
    monkeypatch.setattr(run, "_Process", Process)
    settings = ServerSettings(host="127.0.0.1", port=0)
    if breaks:
        with pytest.raises(RuntimeError, match="serving broke"):
            run_server({}, settings)
    else:
        assert run_server({}, settings) == 0
    assert seen == [(True, False, run.SWITCH_INTERVAL)]
    assert (gc.get_freeze_count(), sys.getswitchinterval()) == (0, interval)


ITEMS = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
LONG = st.lists(ITEMS, max_size=3).flatmap(
    lambda few: st.sampled_from([0, 1, 63, 64, 65, 128, 130]).map(lambda count: [*few, *[{"a": [1.5, None]}] * count])
)


@given(st.dictionaries(st.text(max_size=3), ITEMS | LONG | st.lists(st.fixed_dictionaries({"x": ITEMS, "y": LONG}))))
def test_an_answer_in_parts_is_the_answer(answer: dict[str, Any]) -> None:
    assert encoding.encode_in_parts(answer) == json.dumps(answer, separators=(",", ":")).encode()


def test_no_part_of_an_answer_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no part of an answer takes long to serialize, because every stream waits meanwhile."""
    told = {"top_logprobs": [{"a": -1.0, "b": -2.0}] * 2000, "tokens": ["a"] * 2000}
    answer = {"id": "x", "choices": [{"index": i, "logprobs": told} for i in range(70)]}
    lengths: list[int] = []
    encode = encoding.encode

    def noted(value: object) -> bytes:
        lengths.append(len(encode(value)))
        return encode(value)

    monkeypatch.setattr(encoding, "encode", noted)
    encoding.encode_in_parts(answer)
    assert max(lengths) == 64 * len('{"a":-1.0,"b":-2.0},') + 1


def test_a_streams_log_probabilities_of_prompts_are_not_written_in_the_event_loop() -> None:
    """Check that log probabilities of prompts are not serialized in the event loop, which other streams need; the bytes
    are the same."""
    news = [(0, SimpleNamespace(error=None, outputs=[], finished=True))]
    told = {"tokens": ["a"] * 130, "token_logprobs": [None, *[-1.5] * 129]}
    threads: list[int] = []

    def chunks(index: int, _: Any) -> list[dict[str, Any]]:
        threads.append(threading.get_ident())
        return [{"index": index, "text": "x", "logprobs": told}]

    def streamed(*, tells_prompts: bool) -> list[bytes]:
        left = [[], news]

        async def get() -> list[Any]:
            return left.pop()

        async def submit(*_: Any, **__: Any) -> Any:
            return SimpleNamespace(get=get, finish=None)

        body = SimpleNamespace(
            tells_prompts=tells_prompts, stream_options=None, per_request_spec_decode_metrics=None, priority=None
        )
        asked = SimpleNamespace(engine_params=SimpleNamespace(n=1), silent=False)
        answer: Any = SimpleNamespace(
            body=body,
            asked=asked,
            read=lambda index, output, finish: output,
            head=lambda chunk: {"id": "x"},
            prompt_fields=lambda _: {"p": 1},
            chunks=chunks,
        )
        context: Any = SimpleNamespace(
            llm=SimpleNamespace(submit=submit, in_thread=asyncio.to_thread),
            metrics=SimpleNamespace(request=lambda *_: None),
            shared=SimpleNamespace(tracing=None),
            report_speculation=False,
        )

        async def main() -> list[bytes]:
            generation = Generation(context, answer)
            await generation.start([], None)
            return [event async for event in generation.events()]

        return asyncio.run(main())

    loops_own, elsewhere = streamed(tells_prompts=False), streamed(tells_prompts=True)
    assert loops_own == elsewhere
    first = json.loads(elsewhere[0].removeprefix(b"data: "))
    assert first == {"id": "x", "choices": [{"index": 0, "text": "x", "logprobs": told}], "p": 1}
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False]


@pytest.mark.parametrize("how", ["answered", "kept and left", "cut off", "refused"])
def test_no_timer_outlives_its_connection(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Check that no timer outlives its connection: each would keep a socket for `write_timeout` seconds, 30,000 of them
    at 1,000 connections a second."""

    async def application(_scope: Any, receive: Any, send: Any) -> None:
        while how == "cut off" and (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def main() -> list[bool]:
        loop, state = asyncio.get_running_loop(), ServerState()
        timers: list[asyncio.TimerHandle] = []
        call_later = loop.call_later

        def noted(*args: Any, **named: Any) -> asyncio.TimerHandle:
            timers.append(call_later(*args, **named))
            return timers[-1]

        monkeypatch.setattr(loop, "call_later", noted)
        config = Config(application, log_config=None)
        config.load()
        server = await loop.create_server(lambda: DeadlineProtocol(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        close = b"" if how == "kept and left" else b"connection: close\r\n"
        writer.write(b"nonsense\r\n\r\n" if how == "refused" else b"GET / HTTP/1.1\r\nhost: x\r\n" + close + b"\r\n")
        if how == "cut off":
            while not state.tasks:
                await asyncio.sleep(0)
        elif how == "kept and left":
            await reader.readuntil(b"ok")
        else:
            await reader.read()
        writer.close()
        await writer.wait_closed()
        while state.connections or state.tasks:
            await asyncio.sleep(0)
        server.close()
        await server.wait_closed()
        return [timer.cancelled() for timer in timers]

    cancelled = asyncio.run(main())
    assert cancelled
    assert all(cancelled)

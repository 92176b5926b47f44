"""What stands when a server starts is not walked by collections while it serves."""

import gc
import socket
from typing import Any

import pytest
from specrs.server import run
from specrs.server.run import ServerSettings, run_server


@pytest.mark.parametrize("breaks", [False, True])
def test_objects_of_the_start_are_out_of_collections_while_it_serves(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    made: list[Any] = []
    seen: list[tuple[bool, bool]] = []

    def tracked(mark: object) -> bool:
        return any(one is mark for one in gc.get_objects())

    class Process:
        def __init__(self, context: Any, _settings: ServerSettings, _listener: socket.socket) -> None:
            made.append(context)

        async def serve(self) -> bool:
            seen.append((gc.get_freeze_count() > 0, tracked(made[0])))
            if breaks:
                raise RuntimeError("serving broke")
            return False

    monkeypatch.setattr(run, "make_context", lambda *_: {"an engine": []})
    monkeypatch.setattr(run, "close_context", lambda _: True)
    monkeypatch.setattr(run, "_Process", Process)
    settings = ServerSettings(host="127.0.0.1", port=0)
    if breaks:
        with pytest.raises(RuntimeError, match="serving broke"):
            run_server({}, settings)
    else:
        assert run_server({}, settings) == 0
    assert seen == [(True, False)]
    assert gc.get_freeze_count() == 0

"""Progress bars of loading and downloads: only on a terminal, and for loading only after two seconds."""

import io
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from specrs.llm import LLM
from specrs.models.checkpoint import resolve_folder

SIZE = 1 << 20
FILES = {"config.json": b"{}", "model.safetensors": bytes(SIZE)}


class Screen(io.StringIO):
    """A standard error that is a terminal, or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("is_terminal", "seconds", "shown"),
    [(True, 1.0, True), (True, 0.001, False), (False, 1.0, False)],
    ids=["slow", "fast", "no terminal"],
)
def test_loading_shows_a_bar_after_two_seconds(
    is_terminal: bool, seconds: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the bar of loading with a clock that advances by `seconds` each time it is read."""
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    LLM(max_num_seqs=1, max_model_len=64, threads=1)
    assert ("Loading layers" in screen.getvalue()) == shown


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A hub with one repository, and an empty cache."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            tree = [{"type": "file", "path": file, "size": len(body), "oid": file} for file, body in FILES.items()]
            answer = tree if "/tree/" in self.path else {"id": "some/model", "sha": "0" * 40}
            body = FILES[name] if "/resolve/" in self.path else json.dumps(answer).encode()
            self.send_response(200)
            headers = {"Content-Length": len(body), "ETag": f'"{name}"', "X-Repo-Commit": "0" * 40}
            for key, value in headers.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_downloads_show_bars(hub: None, is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    folder = resolve_folder("some/model")
    assert (folder / "model.safetensors").stat().st_size == SIZE
    assert ("2/2" in screen.getvalue()) == is_terminal
    assert is_terminal or screen.getvalue() == ""

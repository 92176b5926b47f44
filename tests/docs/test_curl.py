"""Every `curl` line of README and docs, sent as curl sends it, is answered by a server with the bundled pair."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from server.harness import Server, serving

from .curl import Request, read
from .test_blocks import PAGES, commands

LINES = [pytest.param(x.values[0][1:], id=str(x.id)) for x in commands() if x.values[0][0] == "curl"]


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with serving("--max-model-len", "512", "--disable-uvicorn-access-log") as server:
        yield server


@pytest.mark.parametrize("words", LINES)
def test_curl(words: list[str], served: Server) -> None:
    request = read(words)
    assert re.match(r"https?://(localhost|127\.0\.0\.1)(:\d+)?/", request.url)
    answer = served.request(request.method, request.path, request.body, request.headers)
    assert 200 <= answer.status < 300, answer.body
    if answer.headers["content-type"] == "application/json":
        assert "error" not in answer.json
    else:
        events = [line.removeprefix("data: ") for line in answer.body.decode().splitlines() if line]
        assert events.pop() == "[DONE]"
        assert all("error" not in json.loads(event) for event in events)


def test_every_curl_is_in_a_block_that_is_sent() -> None:
    """Check that no `curl` command hides in a sentence or in a block of another language."""
    written = sum(
        len(re.findall(r"^\s*(?:\$ )?curl |`curl [^`]*(?:localhost|http)", page.read_text(), re.MULTILINE))
        for page in PAGES
    )
    assert written == len(LINES) >= 2
    assert any("README.md" in str(line.id) for line in LINES)


def test_as_it_stood_the_readmes_line_is_told_what_to_add(served: Server) -> None:
    request = read(["localhost:8000/v1/completions", "-d", '{"prompt": "hi", "max_tokens": 1}'])
    answer = served.request(request.method, request.path, request.body, request.headers)
    assert answer.status == 415
    said = (
        "Content-Type='application/x-www-form-urlencoded': must be application/json; with curl, add -H 'Content-Type: "
    )
    assert answer.error["message"].startswith(said)


COMMANDS = (
    ["localhost/health"],
    ["-s", "localhost/a?b=c", "-d", "x=1", "-d", "y=2\nz"],
    ["-N", "http://localhost/a", "-H", "Content-Type: application/json", "-H", "Authorization: Bearer k", "-d", "{}"],
    ["--json", '{"a":', "--json", "1}", "http://localhost/a"],
    ["-X", "PUT", "--url", "http://localhost/a", "--data-binary", "x\ny", "-H", "Accept: text/plain"],
    ["-XPOST", "localhost/a"],
)


@pytest.mark.parametrize("words", COMMANDS)
def test_this_reading_is_curls(words: list[str]) -> None:
    """Check this reader of curl command lines against a real curl, if one is installed."""
    program = shutil.which("curl")
    if program is None:
        pytest.skip("there is no curl here")
    got: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
            headers = {name.lower(): value for name, value in self.headers.items()}
            got.append(Request(self.command, self.path, headers, body))
            self.send_response(204)
            self.end_headers()

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.handle_request)
    thread.start()
    there = [word.replace("localhost", f"127.0.0.1:{server.server_port}") for word in words]
    subprocess.run([program, "-q", "--noproxy", "*", *there], check=True, capture_output=True, timeout=60)
    thread.join()
    server.server_close()
    expected, (sent,) = read(there), got
    for headers in (expected.headers, sent.headers):
        for name in ("user-agent", "host", "content-length"):
            headers.pop(name, None)
    assert sent == Request(expected.method, expected.path, expected.headers, expected.body)


@pytest.mark.parametrize("words", [[], ["a", "b"], ["-d", "@file", "a"], ["--form", "x=1", "a"], ["-k", "a"]])
def test_what_is_not_known_is_an_error(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^(curl|-d)"):
        read(words)

"""Limits of a connection: keys, sizes, deadlines, queue, slow readers. On sockets, against a server of its own."""

import http.client
import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from .harness import MAIN, Answer, Server, serving

KEYS = ("first-key", "zweiter-Schlüssel")
HEADER, BODY, WRITE, KEEP_ALIVE = 1.0, 1.0, 2.0, 1.0
MAX_BODY, MAX_HEADER, MAX_QUEUED, MAX_CONNECTIONS = 200_000, 8_192, 4, 24
KEY = {"Authorization": f"Bearer {KEYS[0]}"}
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first-key\r\n"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serving(
        *("--api-key", *KEYS, "--max-body-size", str(MAX_BODY), "--max-header-size", str(MAX_HEADER)),
        *("--http-header-timeout", str(HEADER), "--http-body-timeout", str(BODY), "--http-write-timeout", str(WRITE)),
        *("--http-keep-alive-timeout", str(KEEP_ALIVE), "--max-connections", str(MAX_CONNECTIONS)),
        *("--max-num-queued-reqs", str(MAX_QUEUED), "--served-model-name", "one", "two"),
    ) as server:
        yield server


@pytest.fixture
def server(guarded: Server) -> Iterator[Server]:
    yield guarded
    assert guarded.process.poll() is None, "".join(guarded.lines)
    idle(guarded)


def idle(server: Server) -> None:
    """Wait until nothing runs. `/metrics` needs an API key here."""
    names = (b"vllm:num_requests_running{", b"vllm:num_requests_waiting{", b"vllm:kv_cache_usage_perc{")
    while True:
        lines = server.request("GET", "/metrics", headers=KEY).body.splitlines()
        if all(float(line.split()[-1]) == 0 for line in lines if line.startswith(names)):
            return


def read_to_end(connection: socket.socket) -> bytes:
    """Read until the server closes or resets the connection. Return what came."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_answer(connection: socket.socket) -> Answer:
    """Read one answer of known length. What follows stays unread."""
    with closing(http.client.HTTPResponse(connection)) as answer:
        answer.begin()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


def parse(raw: bytes) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(status.split()[1]), headers, body)


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key x"]
)
def test_wrong_keys(server: Server, value: str | None) -> None:
    headers = {} if value is None else {"Authorization": value}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/nonsense")):
        answer = server.request(method, path, {} if method == "POST" else None, headers)
        assert answer.status == 401
        assert answer.error["type"] == "AuthenticationError"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert server.request("GET", "/health", headers=headers).status == 200


def test_two_keys_in_one_request(server: Server) -> None:
    with closing(server.connect()) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"authorization: Bearer first-key\r\n" * 2 + b"\r\n"
        )
        assert read_answer(connection).status == 401


def test_right_keys_and_names(server: Server) -> None:
    for key in KEYS:
        value = f"bearer {key}".encode().decode("latin-1")
        answer = server.request("GET", "/v1/models", headers={"Authorization": value})
        assert [model["id"] for model in answer.json["data"]] == ["one", "two"]
    for name in ("one", "two"):
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "model": name}, **KEY)
        assert answer.json["model"] == name
    assert server.post("/v1/completions", {"prompt": "x", "model": "bundled"}, **KEY).status == 404


def test_long_bodies(server: Server) -> None:
    body = json.dumps({"prompt": "x" * MAX_BODY}).encode()
    fixed = server.post("/v1/completions", body, **KEY)
    assert fixed.status == 413
    assert str(MAX_BODY) in fixed.error["message"]
    with closing(server.connect()) as connection:
        connection.sendall(LINE + b"content-length: 99999999999999999999\r\n\r\n")
        assert read_answer(connection).status == 413
    with closing(server.connect()) as connection:
        connection.sendall(LINE + b"transfer-encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 4096):
            part = body[start : start + 4096]
            connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        answer = read_answer(connection)
        assert answer.status == 413
        # the rest is dropped, and the connection serves on
        connection.sendall(b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_answer(connection).status == 200
    most = {"prompt": "x", "max_tokens": 1, "user": "u" * (MAX_BODY - 200)}
    assert server.post("/v1/completions", most, **KEY).status == 200


def test_long_headers(server: Server) -> None:
    with closing(server.connect()) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
        try:
            for _ in range(10_000_000 // 65536):
                connection.sendall(b"x" * 65536)
                if select.select([connection], [], [], 0)[0]:
                    break
            else:
                raise AssertionError("ten million bytes of header were taken")
            answer = read_answer(connection)
        except (ConnectionResetError, BrokenPipeError):
            return  # it had closed before all was sent, and the answer was lost on the way
        assert answer.status == 431
        assert answer.error["type"] == "RequestTooLargeError"


def test_the_longest_header_and_one_that_is_longer(server: Server) -> None:
    for length, status in ((MAX_HEADER - 200, 200), (MAX_HEADER + 1, 431)):
        with closing(server.connect()) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"x" * length)
            if status == 200:
                connection.sendall(b"\r\n\r\n")
            assert read_answer(connection).status == status


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    ],
)
def test_what_is_no_http(server: Server, junk: bytes) -> None:
    with closing(server.connect()) as connection:
        connection.sendall(junk)
        answer = parse(read_to_end(connection))
    assert answer.status == 400
    assert answer.error["type"] == "BadRequestError"


def trickled(server: Server, start: bytes, piece: bytes) -> tuple[bytes, float]:
    """Send `start` and then `piece` again and again. Return the answer, and after how many seconds it ended."""
    begin = time.monotonic()
    with closing(server.connect()) as connection:
        connection.sendall(start)
        parts = []
        while True:
            readable, _, _ = select.select([connection], [], [], 0.05)
            try:
                if readable:
                    part = connection.recv(4096)
                    if not part:
                        break
                    parts.append(part)
                else:
                    connection.sendall(piece)
            except (ConnectionResetError, BrokenPipeError):
                break
    return b"".join(parts), time.monotonic() - begin


def test_a_header_that_trickles(server: Server) -> None:
    raw, seconds = trickled(server, b"GET /health HTTP/1.1\r\n", b"a: b\r\n")
    assert parse(raw).status == 408
    assert parse(raw).error["type"] == "RequestTimeoutError"
    assert seconds >= HEADER


def test_a_header_that_trickles_on_a_kept_connection(server: Server) -> None:
    with closing(server.connect()) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_answer(connection).status == 200
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert read_answer(connection).status == 408


def test_a_socket_that_says_nothing(server: Server) -> None:
    with closing(server.connect()) as connection:
        assert parse(read_to_end(connection)).status == 408


def test_a_kept_connection_that_says_nothing_more(server: Server) -> None:
    with closing(server.connect()) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("framing", [b"content-length: 1000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"])
def test_a_body_that_trickles(server: Server, framing: bytes) -> None:
    raw, seconds = trickled(server, LINE + framing, b"1\r\na\r\n" if b"chunked" in framing else b"a")
    assert parse(raw).status == 408
    assert seconds >= BODY


def test_a_long_body_that_trickles_after_its_answer(server: Server) -> None:
    raw, seconds = trickled(server, LINE + b"content-length: 9999999\r\n\r\n", b"a")
    assert parse(raw).status == 413
    assert seconds >= BODY


def test_too_many_connections(server: Server) -> None:
    held = [server.connect() for _ in range(MAX_CONNECTIONS)]
    try:
        for connection in held:
            # none of them is silent: each has sent a part of another request after its first one
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /he")
            assert read_answer(connection).status == 200
        with closing(server.connect()) as connection:
            answer = parse(read_to_end(connection))
    finally:
        for connection in held:
            connection.close()
    assert answer.status == 503
    assert answer.headers["retry-after"]
    assert answer.error["type"] == "ServiceUnavailableError"


def test_a_silent_connection_makes_place(server: Server) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(closing(server.connect())) for _ in range(MAX_CONNECTIONS)]
        assert server.get("/health").status == 200
        answers = [parse(read_to_end(connection)).status for connection in held]
    assert answers.count(503) == 1
    assert answers.count(408) == MAX_CONNECTIONS - 1


def test_a_full_queue(server: Server) -> None:
    body = json.dumps({"prompt": "x", "n": MAX_QUEUED, "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
    with closing(server.connect()) as connection:
        connection.sendall(LINE + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        for stream in (False, True):
            answer = server.post("/v1/completions", {"prompt": "x", "stream": stream}, **KEY)
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.error["type"] == "ServiceUnavailableError"
    idle(server)
    assert server.post("/v1/completions", {"prompt": "x", "n": MAX_QUEUED}, **KEY).status == 200
    assert server.post("/v1/completions", {"prompt": "x", "n": MAX_QUEUED + 1}, **KEY).status == 400  # it never could


def test_a_reader_that_takes_nothing_is_cut_off(server: Server) -> None:
    body = json.dumps(
        {"prompt": "x", "n": 2, "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 20}
    ).encode()
    with closing(server.connect(receive_buffer=4096)) as connection:
        connection.sendall(LINE + b"content-length: %d\r\n\r\n" % len(body) + body)
        # meanwhile others are served
        assert server.post("/v1/completions", {"prompt": "y", "max_tokens": 20}, **KEY).status == 200
        server.wait_for_line("took nothing for")
        taken = read_to_end(connection)
    assert taken.startswith(b"HTTP/1.1 200 ")
    assert b"[DONE]" not in taken


def test_connections_fit_the_files_that_a_process_may_open() -> None:
    """Check that connections fit the number of files that a process may open. More would be errors of accept, thousands
    of lines a second, and clients without an answer."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 160)); {MAIN}"
    with serving("--http-header-timeout", "600", code=code) as server:
        assert any("max_connections=1024: this process may open 160 files; 32 connections" in x for x in server.lines)
        silent = [server.connect() for _ in range(200)]
        # of connections that have sent nothing the first ones are told so immediately
        refused = read_answer(silent[0])
        assert (refused.status, refused.error["message"]) == (503, "More than 32 connections.")
        for connection in silent:
            connection.close()
        while server.get("/health").status != 200:
            continue
        assert not [line for line in server.lines if "accept" in line or "Too many open files" in line]

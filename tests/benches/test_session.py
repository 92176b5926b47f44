"""benches/bench_session.py with the bundled target and a stand-in for llama.cpp's server: 20 requests, one restart."""

import json
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench_session
import coding_session
import pytest
from gguf_files import write_gguf
from specrs.pair import TARGET

SERVER = """
    import json, sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from pathlib import Path

    given = dict(zip(sys.argv, sys.argv[1:]))
    log = Path(sys.argv[0]).with_suffix(".log")

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body, status=200):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.answer({"status": "ok"})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            slot = Path(given["--slot-save-path"]) / "session.bin"
            with log.open("a") as file:
                print(json.dumps([self.path, asked]), file=file)
            if self.path.endswith("save"):
                slot.touch()
            status = 200 if not self.path.endswith("restore") or slot.exists() else 400
            used = {"completion_tokens": asked.get("max_tokens"), "prompt_tokens_details": {"cached_tokens": 7}}
            self.answer({"usage": used}, status)

        def log_message(self, *_):
            pass

    with log.open("a") as file:
        print(json.dumps(["start", sys.argv[1:]]), file=file)
    ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(SERVER)}", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    path = tmp_path_factory.mktemp("session") / "target.gguf"
    return write_gguf(TARGET, path, tokenizer__chat_template=template)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *argv: Any) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["bench_session.py", *map(str, argv), "--out", str(out)])
    bench_session.main()
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


def test_the_recorded_session() -> None:
    assert len(coding_session.REQUESTS) == 20
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in coding_session.TOOLS}
    calls = [request.answer for request in coding_session.REQUESTS if request.answer.startswith("<tool_call>")]
    for call in calls:
        written = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert written["arguments"].keys() == tools[written["name"]]["properties"].keys()
    assert len(calls) == 17
    for i, request in enumerate(coding_session.REQUESTS[:-1]):
        before, after = coding_session.messages(i), coding_session.messages(i + 1)
        assert after[: len(before)] == before
        assert after[len(before)] == {"role": "assistant", "content": request.answer}


def test_edits_are_of_texts_that_are_there() -> None:
    files: dict[str, str] = {}
    results = [request.message for request in coding_session.REQUESTS[1:]] + [""]
    for request, result in zip(coding_session.REQUESTS, results, strict=True):
        if not request.answer.startswith("<tool_call>"):
            continue
        call = json.loads(request.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        arguments = call["arguments"]
        path = arguments.get("path", "")
        if call["name"] == "read_file":
            files[path] = result.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>") + "\n"
        elif call["name"] == "write_file":
            files[path] = arguments["content"]
        elif call["name"] == "edit_file":
            assert files[path].count(arguments["old_text"]) == 1
            files[path] = files[path].replace(arguments["old_text"], arguments["new_text"])
    for text in files.values():
        compile(text, "file", "exec")


def test_20_requests_and_a_restart(
    model: Path, peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(
        monkeypatch, tmp_path / "out.json", model, "--llama-server", peer, "--save-slot", "--rounds", 1, "--threads", 1,
        "--characters", 40, "--max-model-len", 2048, "--llama-args=--jinja", "--cache-ram", 64,
    )  # fmt: skip
    assert str(tmp_path) not in json.dumps(report)
    assert [row["server"] for row in report["rows"]] == ["specrs", "specrs, plain", "llama.cpp"]
    assert all((row["requests"], row["restarts"]) == (20, 1) for row in report["rows"])
    assert len({row["tokens"] for row in report["rows"]}) == 1
    full, plain, other = report["rows"]
    # after the restart only the disk has the session's prompts
    assert full["cached_prompt_tokens"] > plain["cached_prompt_tokens"] > 0
    assert other["cached_prompt_tokens"] == 20 * 7
    assert report["ratios"].keys() == {"specrs, plain", "llama.cpp"}
    assert capsys.readouterr().out.count("20 requests, 1 restart") == 3

    events = [json.loads(line) for line in peer.with_suffix(".log").read_text(encoding="utf-8").splitlines()]
    paths = [event[0] for event in events]
    completions = ["/v1/completions"] * 10
    save, restore = (f"/slots/0?action={action}" for action in ("save", "restore"))
    assert paths == ["start", *completions, save, "start", restore, *completions]
    options = " ".join(events[0][1])
    assert "--spec-default --cache-ram 64" in options
    assert options.endswith("--jinja")
    bodies = [body for path, body in events if path == "/v1/completions"]
    assert [len(body["prompt"]) for body in bodies] == report["prompt_tokens"]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in bodies)
    for before, after in pairwise(bodies):
        assert after["prompt"][: len(before["prompt"]) - 1] == before["prompt"][:-1]


def test_constrained_calls(model: Path, peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that requests whose recorded answer is a call carry a schema, and all others `ignore_eos`."""
    report = run(
        monkeypatch, tmp_path / "out.json", model, "--llama-server", peer, "--save-slot", "--constrain", "--rounds", 1,
        "--threads", 1, "--characters", 40, "--max-model-len", 2048,
    )  # fmt: skip
    assert all(row["requests"] == 20 for row in report["rows"])
    lines = peer.with_suffix(".log").read_text(encoding="utf-8").splitlines()
    bodies = [body for path, body in map(json.loads, lines) if path == "/v1/completions"]
    constrained = ["json_schema" in body for body in bodies]
    assert constrained == [request.answer.startswith("<tool_call>") for request in coding_session.REQUESTS]
    assert all(("ignore_eos" in body) != ("json_schema" in body) for body in bodies)


def test_a_server_that_ends_is_an_error(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\necho no such model >&2; exit 4\n", encoding="utf-8")
    server.chmod(0o755)
    monkeypatch.setattr(bench_session, "contestants", lambda args: [
        bench_session.Contestant("llama.cpp", lambda port, folder: [str(server)], lambda schema: {})
    ])  # fmt: skip
    with pytest.raises(SystemExit, match=r"ended with 4\nno such model"):
        run(monkeypatch, tmp_path / "out.json", model, "--characters", 40)

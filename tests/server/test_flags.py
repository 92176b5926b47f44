"""Flags that only a running server can show: TLS, CORS, a path behind a proxy, a file of flags."""

import subprocess
import sys
from pathlib import Path

import pytest
from specrs.cli import main

from .harness import serving


def test_tls_cors_root_path_and_a_file_of_flags(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    flags = tmp_path / "flags.yaml"
    flags.write_text(
        "max-model-len: 256\nserved_model_name: [one, two]\ndisable-uvicorn-access-log: true\n"
        "enable-prefix-caching: false\n"
        f"ssl-certfile: {certificate}\nssl-keyfile: {key}\nroot-path: /inner/\nallowed-origins: ['https://a.example']\n"
        "api-key: secret\nmax-num-seqs: 4\n"
    )
    with serving("--config", str(flags), "--max-num-seqs", "8", certificate=certificate) as server:
        key_header = {"Authorization": "Bearer secret"}
        assert server.get("/health").status == 200
        assert server.get("/v1/models").status == 401
        answer = server.get("/v1/models", Origin="https://a.example", **key_header)
        assert answer.status == 200
        assert [model["id"] for model in answer.json["data"]] == ["one", "two"]
        assert answer.json["data"][0]["max_model_len"] == 256
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = server.get("/v1/models", Origin="https://b.example", **key_header)
        assert "access-control-allow-origin" not in other.headers
        preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        assert server.request("OPTIONS", "/v1/chat/completions", headers=preflight).status == 200
        information = server.get("/server_info", **key_header).json
        assert information["max_num_seqs"] == 8  # the command line's own
        assert information["enable_prefix_caching"] is False
        assert information["dtype"] in ("bfloat16", "float32")  # the one in use; the flag is auto


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--enable-prompt-adapter"], "--enable-prompt-adapter: not implemented"),
        (
            ["--num-speculative-tokens", "3"],
            "--num-speculative-tokens: not implemented; use --spec-tokens (see",
        ),
        (["--no-enable-log-deltas"], "--no-enable-log-deltas: not implemented"),
        (["--config", "nowhere.yaml"], "--config='nowhere.yaml': cannot be read"),
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile='k.pem': needs --ssl-certfile"),
        (["--ssl-cert-reqs", "2"], "--ssl-cert-reqs=2: needs --ssl-certfile"),
        (["--ssl-cert-reqs", "3"], "--ssl-cert-reqs=3: must be an integer from 0 to 2"),
        (["--ssl-certfile", "nowhere.pem"], "--ssl-certfile='nowhere.pem': cannot be used"),
        (["--allowed-origins", "[1]"], "--allowed-origins=[1]: must be a list of strings"),
        (["--default-chat-template-kwargs", "[]"], "is not a JSON object"),
    ],
)
def test_refusals(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["serve", *argv])
    except SystemExit as exit:
        code = int(str(exit.code))
    assert code == 2
    assert says in capsys.readouterr().err


def test_a_file_of_flags_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("- a\n", "a: [\n", "1: 2\n"):
        path = tmp_path / "flags.yaml"
        path.write_text(text)
        assert main(["serve", "--config", str(path)]) == 2
        assert capsys.readouterr().err.startswith("specrs serve: error: --config=")


@pytest.mark.parametrize("key", ["--max-model-len", "--max_model_len", "-m"])
def test_keys_of_a_file_have_no_dashes(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(f"{key}: 40\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert f"has the key {key!r}; leave the dashes at its start out: {key.lstrip('-')}\n" in capsys.readouterr().err


def test_traces_say_which_packages_they_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # as where it is not installed
    assert main(["serve", "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:4318"]) == 2
    said = capsys.readouterr().err
    assert "--otlp-traces-endpoint=http://127.0.0.1:4318: needs OpenTelemetry" in said
    assert "pip install 'specrs[otel]'" in said

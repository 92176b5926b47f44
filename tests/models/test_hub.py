"""Errors of the hub and what users read: not found, gated, denied, offline, out of reach."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import hf_raise_for_status
from specrs.bench.datasets import DatasetConfig, load
from specrs.config import EngineConfig
from specrs.engine.loras import LoRAStore
from specrs.errors import CheckpointError, SpecrsError, UnsupportedConfigError
from specrs.lora_request import LoRARequest
from specrs.models.checkpoint import resolve_folder
from specrs.models.gguf.checkpoint import gguf_path
from specrs.models.hub import hub_error
from specrs.models.pickles import convert_pickles
from specrs.tokenizer import Tokenizer

NAME = "someone/model"


def answered(status: int, **headers: str) -> Exception:
    """Return the exception that the hub's own client raises for such an answer."""
    request = httpx2.Request("GET", f"https://huggingface.co/api/models/{NAME}/revision/main")
    response = httpx2.Response(status, headers={k.replace("_", "-"): v for k, v in headers.items()}, request=request)
    try:
        hf_raise_for_status(response)
    except Exception as fault:
        return fault
    raise AssertionError("no error")


def local(cause: Exception | None = None) -> Exception:
    """Return the exception of a download whose files are not in the cache, after the hub failed with `cause`."""
    fault = LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")
    fault.__cause__ = cause
    return fault


INVALID = {"X_Error_Message": "Invalid credentials in Authorization header"}
FAULTS: dict[str, tuple[Exception, bool, str]] = {
    "missing": (answered(404, X_Error_Code="RepoNotFound"), True, "that your token may read; check the spelling$"),
    "missing or private": (
        answered(401),
        False,
        "that is public; check the spelling, or set HF_TOKEN for a private repository$",
    ),
    "gated": (
        answered(401, X_Error_Code="GatedRepo"),
        False,
        "is gated; accept its licence at https://huggingface.co/.*someone/model, then set HF_TOKEN to a token of",
    ),
    "gated, other account": (
        answered(403, X_Error_Code="GatedRepo"),
        True,
        "is gated; accept its licence at https://huggingface.co/.*someone/model with the account of your token$",
    ),
    "gated file": (local(answered(403, X_Error_Code="GatedRepo")), True, "is gated; accept its licence"),
    "wrong token": (answered(401, **INVALID), True, "rejected the token; set HF_TOKEN to a valid one, or unset it$"),
    "no token": (answered(401, **INVALID), False, "asks for a token; set HF_TOKEN$"),
    "denied": (local(answered(403)), True, "denied access; give the token of HF_TOKEN the right to read"),
    "disabled": (answered(403, X_Error_Message="Access to this resource is disabled."), True, "has disabled this"),
    "hub is down": (local(answered(503)), False, r"cannot be reached \(it answered 503\); try again, or give the path"),
    "too many": (local(answered(429)), False, r"cannot be reached \(it answered 429\); try again"),
    "offline": (
        local(OfflineModeIsEnabled("x")),
        False,
        "HF_HUB_OFFLINE forbids to ask the hub; check the spelling, unset HF_HUB_OFFLINE",
    ),
    "offline at once": (
        OfflineModeIsEnabled("x"),
        False,
        "HF_HUB_OFFLINE forbids to ask the hub; check the spelling, unset",
    ),
    "no route": (local(httpx2.ConnectError("no route")), False, r"cannot be reached \(ConnectError: no route\); try"),
    "timeout": (httpx2.ReadTimeout("slow"), False, r"cannot be reached \(ReadTimeout: slow\); try again"),
    "connection": (ConnectionError("refused"), False, r"cannot be reached \(ConnectionError: refused\); try again"),
    "cut off": (ConnectionResetError(), False, r"cannot be reached \(ConnectionResetError\); try again"),
    "not in the cache": (local(), False, r"cannot be reached \(LocalEntryNotFoundError: Cannot find"),
    "no id": (HFValidationError("no"), False, "no id of a repository; an id is owner/name$"),
    "full disk": (OSError(28, "No space left on device"), False, r"could not be read from the hub \(OSError: .*space"),
}


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub client that is online, without a token, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def lora(name: str) -> object:
    store: Any = LoRAStore.__new__(LoRAStore)
    return store._read(LoRARequest("a", 1, name), None)


def dataset(name: str) -> object:
    return load(DatasetConfig(name="hf", path=name), None)


ASKERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "model": ("model", resolve_folder),
    "tokenizer": ("model", Tokenizer),
    "gguf": ("model", lambda name: gguf_path(f"{name}:Q8_0")),
    "lora": ("lora_path", lora),
    "head": ("source", lambda name: convert_pickles(name, Path("/nowhere"))),
    "data set": ("--dataset-path", dataset),
}


@pytest.mark.parametrize("asker", ASKERS)
@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_has_its_text_whoever_asks(kind: str, asker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, token, says = FAULTS[kind]
    field, ask = ASKERS[asker]

    def fail(*_: Any, **__: Any) -> None:
        raise fault

    def fail_to_load(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("Dataset doesn't exist on the Hub or cannot be accessed.") from fault

    datasets = ModuleType("datasets")
    monkeypatch.setattr(datasets, "load_dataset", fail_to_load, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr("specrs.bench.datasets.find_spec", lambda name: True)
    for name in ("snapshot_download", "list_repo_files", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, name, fail)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret" if token else None)
    with pytest.raises(SpecrsError) as refused:
        ask(NAME)
    said = str(refused.value)
    value = f"{NAME}:Q8_0" if asker == "gguf" else NAME
    assert said.startswith(f"{field}='{value}': ")
    if kind != "full disk" or asker != "data set":  # whose loader has an error of its own around it
        assert re.search(says, said), said
    assert "hf_secret" not in said
    assert "\n" not in said
    assert (f"{constants.ENDPOINT}/datasets/" in said) == (asker == "data set" and constants.ENDPOINT in said)


def test_a_revision_that_is_not_there() -> None:
    fault = answered(404, X_Error_Code="RevisionNotFound")
    says = (
        r"^revision='v9': someone/model has no such branch, tag or commit; its branches and tags are listed at https:"
    )
    with pytest.raises(CheckpointError, match=says):
        raise hub_error(fault, NAME, revision="v9")


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("Qwen/Qwen3-1.8B", "Qwen/Qwen3-1.7B"),
        ("qwen/qwen3_1.7b", "Qwen/Qwen3-1.7B"),
        ("Qwen3-1.7B", "Qwen/Qwen3-1.7B"),
        ("SmolLM2-135", "HuggingFaceTB/SmolLM2-135M"),
        ("llama-3", "llama-3b"),
        ("mistral", None),
        ("someone/data", None),
    ],
)
def test_near_names_of_folders_and_of_the_cache(
    asked: str, near: str | None, online: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "models--Qwen--Qwen3-1.7B",
        "models--Qwen--Qwen3-30B-A3B",
        "models--HuggingFaceTB--SmolLM2-135M",
        "datasets--someone--data1",
        "CACHEDIR.TAG",
    ):
        (online / name).mkdir()
    (tmp_path / "llama-3b").mkdir()
    monkeypatch.chdir(tmp_path)
    said = str(hub_error(answered(401), asked))
    assert ("did you mean" in said) == (near is not None)
    assert near is None or f"; did you mean {near}? check the spelling" in said


def test_near_names_of_paths(tmp_path: Path) -> None:
    (tmp_path / "qwen3-1.7b").mkdir()
    (tmp_path / "tiny-Q8_0.gguf").touch()
    (tmp_path / "notes.txt").touch()
    for asked, says in (
        ("qwen3-1.7", f"there is no such folder; did you mean {tmp_path}/qwen3-1.7b? check the path"),
        ("tiny-Q8.gguf", f"there is no such file; did you mean {tmp_path}/tiny-Q8_0.gguf? check the path"),
        ("notes", "there is no such folder; check the path"),
        ("notes.txt", "this is a file; the only files that are read as models are GGUF files"),
    ):
        with pytest.raises(CheckpointError) as refused:
            resolve_folder(str(tmp_path / asked))
        assert says in str(refused.value)
    with pytest.raises(CheckpointError, match="there is no such file; check the path"):
        resolve_folder("models/tiny.gguf")


def test_a_token_in_an_argument_is_not_printed() -> None:
    with pytest.raises(UnsupportedConfigError, match=r"^hf_token: not implemented; use the environment"):
        EngineConfig.from_kwargs(model="m/m", hf_token="hf_secret")


@contextmanager
def hub(status: int, headers: dict[str, str]) -> Iterator[str]:
    """Run a server that gives every request this answer. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("status", "headers", "says"),
    [
        (401, {"X-Error-Code": "RepoNotFound"}, "that is public; check the spelling, or set HF_TOKEN"),
        (401, {}, "the hub asks for a token; set HF_TOKEN"),
        (404, {"X-Error-Code": "RepoNotFound"}, "that is public; check the spelling"),
        (401, {"X-Error-Code": "GatedRepo"}, "is gated; accept its licence at http.*/someone/model, then set HF_TOKEN"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "^revision=None: someone/model has no such branch"),
    ],
)
def test_the_hubs_own_client_over_http(
    status: int, headers: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(status, headers) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(CheckpointError, match=says):
            resolve_folder(NAME)


def test_the_hubs_own_client_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(200, {}) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
    with pytest.raises(CheckpointError, match=r"cannot be reached \(ConnectError: .*\); try again, or give the path"):
        resolve_folder(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match="HF_HUB_OFFLINE forbids to ask the hub; check the spelling, unset HF_HUB_OFFLINE"
    ):
        resolve_folder(NAME)

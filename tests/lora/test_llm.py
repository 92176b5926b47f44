"""LoRA adapters through `LLM` and a server, next to the base model. A broken adapter ends its request alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from server.harness import Server, serving
from specrs import LLM, CheckpointError, InvalidRequestError, LoRARequest, SamplingParams
from specrs.cli import main
from specrs.pair import TARGET

from .adapters import Spec, merge, write_adapter

PROMPTS = ["def add(a, b):", "The quick brown fox", "import os\n\n"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the bundled target."""
    folder = tmp_path_factory.mktemp("adapters")
    leaves = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    return {
        "sql": write_adapter(folder / "sql", TARGET, Spec(leaves, rank=8, alpha=4), seed=1),
        "chat": write_adapter(folder / "chat", TARGET, Spec(("o_proj", "down_proj"), rank=2, alpha=1), seed=2),
    }


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, list[str]]:
    """Texts without drafts: of the base model, and of models into whose weights each adapter was merged."""
    folder = tmp_path_factory.mktemp("merged")
    models = {None: TARGET} | {name: merge(TARGET, path, folder / name) for name, path in folders.items()}
    outputs = {
        name: LLM(str(model), **SETTINGS).generate(PROMPTS, GREEDY, use_tqdm=False) for name, model in models.items()
    }
    found = {name: [output.outputs[0].text for output in made] for name, made in outputs.items()}
    assert len({str(texts) for texts in found.values()}) == 3
    return found


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        **SETTINGS,
        enable_lora=True,
        max_loras=2,
        speculative_config={"num_speculative_tokens": 3},
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )


def test_one_each(llm: LLM, folders: dict[str, Path], texts: dict[str | None, list[str]]) -> None:
    sql, chat = (LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(folders.items(), 1))
    loras = [None, sql, chat]
    names = [name for name in (None, "sql", "chat") for _ in PROMPTS]
    asked = [lora for lora in loras for _ in PROMPTS]
    outputs = llm.generate(PROMPTS * 3, GREEDY, lora_request=asked, use_tqdm=False)
    expected = [text for name in (None, "sql", "chat") for text in texts[name]]
    assert [output.outputs[0].text for output in outputs] == expected, names
    *_, last = llm.stream(PROMPTS[0], GREEDY, lora_request=chat)
    assert last.outputs[0].text == texts["chat"][0]
    (said,) = llm.generate(PROMPTS[1], GREEDY, lora_request=sql, use_tqdm=False)
    assert said.outputs[0].text == texts["sql"][1]
    conversation = [{"role": "user", "content": "Hello"}]
    answers = {
        str(llm.chat(conversation, GREEDY, lora_request=lora, use_tqdm=False)[0].outputs[0].token_ids) for lora in loras
    }
    assert len(answers) == 3
    events = [event for event in llm.engine.scheduler.take_kv_events() if hasattr(event, "lora_id")]
    assert {(event.lora_id, event.lora_name) for event in events} == {(None, None), (1, "sql"), (2, "chat")}


def test_a_wrong_one_ends_alone(llm: LLM, texts: dict[str | None, list[str]], tmp_path: Path) -> None:
    nowhere = LoRARequest("nowhere", 9, str(tmp_path / "nowhere"))
    good, bad = llm.generate(PROMPTS[:2], GREEDY, lora_request=[None, nowhere], use_tqdm=False)
    assert good.outputs[0].text == texts[None][0]
    assert isinstance(bad.error, CheckpointError)
    with pytest.raises(CheckpointError, match="lora_path="):
        llm.generate(PROMPTS[0], GREEDY, lora_request=nowhere)
    wrong: Any
    for wrong, says in (([None], "1 for 2 prompts"), ("sql", "must be a LoRARequest"), ([None, 1], "must be a LoRA")):
        with pytest.raises(InvalidRequestError, match=f"lora_request.*{says}"):
            llm.generate(PROMPTS[:2], GREEDY, lora_request=wrong)


def test_requests_need_an_engine_that_has_them(folders: dict[str, Path]) -> None:
    sql = LoRARequest("sql", 1, str(folders["sql"]))
    with pytest.raises(InvalidRequestError, match="lora_request='sql': needs enable_lora=True"):
        LLM(**SETTINGS).generate(PROMPTS[0], GREEDY, lora_request=sql)


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    chat = {"name": "chat", "path": str(folders["chat"]), "base_model_name": "tiny"}
    modules = ["--lora-modules", f"sql={folders['sql']}", json.dumps(chat)]
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    with serving(*settings, "--served-model-name", "base", "--enable-lora", "--max-loras", "1", *modules) as found:
        yield found


def test_a_server_knows_them_by_name(
    server: Server, folders: dict[str, Path], texts: dict[str | None, list[str]]
) -> None:
    models = {model["id"]: (model["root"], model["parent"]) for model in server.get("/v1/models").json["data"]}
    assert models == {
        "base": ("base", None),
        "sql": (str(folders["sql"]), "base"),
        "chat": (str(folders["chat"]), "tiny"),
    }
    assert server.get("/v1/models/sql").json["parent"] == "base"
    document = server.get("/openapi.json").json
    schema = {"$ref": "#/components/schemas/Models", "components": document["components"]}
    jsonschema.validate(server.get("/v1/models").json, schema)
    asked = [(name, i) for i in range(len(PROMPTS)) for name in ("base", "sql", "chat")] * 2

    def complete(one: tuple[str, int]) -> str:
        name, i = one
        found = server.complete(model=name, prompt=PROMPTS[i], max_tokens=20, temperature=0)
        assert found["model"] == name
        text: str = found["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(complete, asked))
    assert found == [texts[None if name == "base" else name][i] for name, i in asked]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 20}
    answers = [server.chat(model=name, **chat)["choices"][0]["message"]["content"] for name in ("base", "sql", "chat")]
    assert len({*answers}) == 3
    body = {"model": "sql", "input": "Hello", "temperature": 0, "max_output_tokens": 20}
    assert server.post("/v1/responses", body).json["output"][0]["content"][0]["text"] == answers[1]
    info = [name for name in server.metrics() if name.startswith("vllm:lora_requests_info")]
    assert info == ['vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""}']
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
        assert server.post(path, {"model": "other", **body}).error["code"] == 404


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lora-modules", "sql=a"], "--lora-modules='sql=a': needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "sql"], "--lora-modules='sql': must be NAME=PATH"),
        (["--enable-lora", "--lora-modules", '{"name": "a"}'], "must be NAME=PATH"),
        (["--enable-lora", "--lora-modules", '{"name": "a", "path": 3}'], "must be NAME=PATH"),
        (["--enable-lora", "--lora-modules", '{"name": "a", "path": "b", "rank": 3}'], "must be NAME=PATH"),
        (["--enable-lora", "--lora-modules", "a=b", "a=c"], "--lora-modules='a': must be a name that no other"),
        (["--enable-lora", "--lora-modules", "a=/nowhere/at/all"], "lora_path='/nowhere/at/all': must be a folder"),
        (["--enable-lora", "--max-cpu-loras", "1", "--max-loras", "2"], "max_cpu_loras=1: must be at least"),
    ],
)
def test_flags(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["serve", "--port", "0", "--max-model-len", "64", *flags])
    except SystemExit as exit:
        code = exit.code
    assert code
    assert says in capsys.readouterr().err

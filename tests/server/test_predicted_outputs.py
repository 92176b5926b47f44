"""OpenAI's `prediction` in chats, and `suffix` of completions."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from specrs import LLM, SamplingParams, pair
from specrs.errors import InvalidRequestError
from specrs.tokenizer import Tokenizer
from specrs.tokenizer.fill_in_middle import middle_ends, middle_prompt
from tokenizer_files import copy_of_pair, edit_tokenizer

from .harness import Server, serving

MESSAGES = [{"role": "user", "content": "Tell me about the three of them."}]


def chat(server: Server, **fields: Any) -> Any:
    return server.chat(messages=MESSAGES, max_tokens=40, temperature=0, **fields)


def test_a_prediction_changes_no_answer_and_is_counted(server: Server) -> None:
    plain = chat(server, num_speculative_tokens=0)
    text = plain["choices"][0]["message"]["content"]
    for content in (text, [{"type": "text", "text": text[:30]}, {"type": "text", "text": text[30:]}], "of no use"):
        answer = chat(server, prediction={"type": "content", "content": content})
        assert answer["choices"] == plain["choices"]
        details = answer["usage"]["completion_tokens_details"]
        assert min(details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) >= 0
        if content == text:
            assert details["accepted_prediction_tokens"] > 10
    assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "audio", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {}}]}, "prediction.content"),
        ({"type": "content", "content": "a", "more": 1}, "prediction.more"),
    ],
)
def test_wrong_predictions_name_the_field(server: Server, prediction: Any, field: str) -> None:
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "prediction": prediction})
    assert answer.status == 400
    assert field in answer.error["message"]


def test_a_prediction_needs_one_completion(server: Server) -> None:
    body = {"messages": MESSAGES, "prediction": {"type": "content", "content": "a"}, "n": 2}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.error["message"] == "prediction='a': not allowed with n=2; allowed: n=1"


MARKERS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "codestral": ("[PREFIX]", "[SUFFIX]"),
}


def marked(path: Path, markers: tuple[str, ...]) -> Path:
    """Write the pair's target with a tokenizer whose last tokens are `markers`."""
    folder = copy_of_pair(path)
    shutil.copy(Path(pair.TARGET) / "model.safetensors", folder)

    def mark(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        names = {index: token for token, index in vocab.items()}
        last = max(names)
        for i, marker in enumerate(markers):
            del vocab[names[last - i]]
            vocab[marker] = last - i
            options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            content["added_tokens"].append({"id": last - i, "content": marker, "special": True, **options})
        del content["model"]["merges"][-len(markers) :]

    edit_tokenizer(folder, mark)
    return folder


@pytest.mark.parametrize("form", MARKERS)
def test_prompts_for_the_middle_have_the_forms_of_their_models(tmp_path: Path, form: str) -> None:
    markers = MARKERS[form]
    tokenizer = Tokenizer(str(marked(tmp_path / form, markers)))
    ids = dict(zip(("prefix", "suffix", "middle"), map(tokenizer.backend.token_to_id, markers), strict=False))
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in ("def f(", "return x"))
    wanted = [ids["prefix"], *before, ids["suffix"], *after]
    wanted = [ids["suffix"], *after, ids["prefix"], *before] if form == "codestral" else [*wanted, ids["middle"]]
    assert middle_prompt(tokenizer, "def f(", "return x") == wanted
    assert {*middle_ends(tokenizer)} >= {*ids.values()}


def test_a_tokenizer_without_markers_is_named() -> None:
    tokenizer = Tokenizer(str(pair.TARGET))
    assert middle_ends(tokenizer) == []
    with pytest.raises(InvalidRequestError, match="suffix='b': the tokenizer has no tokens for text in the middle"):
        middle_prompt(tokenizer, "a", "b")


@pytest.fixture(scope="module")
def middle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = marked(tmp_path_factory.mktemp("middle") / "model", MARKERS["qwen"])
    with serving("--model", str(folder)) as server:
        yield server, folder


def test_completions_with_a_suffix_continue_the_prompt_for_the_middle(middle: tuple[Server, Path]) -> None:
    server, folder = middle
    tokenizer = Tokenizer(str(folder))
    prompt = {"prompt_token_ids": middle_prompt(tokenizer, "def add(a, b):\n", "\n    return c")}
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=middle_ends(tokenizer))
    [wanted] = LLM(str(folder)).generate(prompt, params, use_tqdm=False)
    fields = {"prompt": "def add(a, b):\n", "suffix": "\n    return c", "max_tokens": 12, "temperature": 0}
    answer = server.complete(**fields)
    assert answer["choices"][0]["text"] == wanted.outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
    plain = server.complete(**{**fields, "suffix": ""})
    assert plain["usage"]["prompt_tokens"] == len(tokenizer.encode("def add(a, b):\n"))
    for wrong in ({"echo": True}, {"prompt": [5, 6]}, {"suffix": 3}):
        refused = server.post("/v1/completions", {**fields, **wrong})
        assert refused.status == 400
        assert "suffix" in refused.error["message"]


def test_a_server_whose_model_has_no_markers_rejects_a_suffix(server: Server) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert answer.status == 400
    assert "leave it out, or use a model trained for it" in answer.error["message"]

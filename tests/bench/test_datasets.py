"""Prompts from files, random tokens and the bundled prompts: what is read, how many, and what is rejected."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from specrs.bench.datasets import DatasetConfig, load
from specrs.errors import InvalidConfigError
from specrs.pair import TARGET
from specrs.pair.prompts import PROMPTS
from specrs.tokenizer import Tokenizer

from tests.data_sets import data_file

SHAREGPT = [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "one two three"}]}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(TARGET))


def lines(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("name", ["hf", "own"])
@pytest.mark.parametrize(
    ("own", "record", "prompt", "output_len", "instruction"),
    [
        ("mt-bench", {"turns": ["first", "second"], "question_id": 1}, "first", 256, True),
        ("instructcoder", {"instruction": "Do it. ", "input": "x = 1"}, "Do it.\n\nx = 1", 200, True),
        ("sharegpt", SHAREGPT[0], "Hi", 4, False),
        ("custom", {"prompt": "text", "output_tokens": 9}, "text", 9, False),
    ],
)
def test_formats(
    name: str, own: str, record: dict[str, Any], prompt: str, output_len: int, instruction: bool, tmp_path: Path
) -> None:
    path = lines(tmp_path / "data.jsonl", [record])
    samples = load(DatasetConfig(name=own if name == "own" else name, path=path, num_prompts=3), None)
    assert [(s.prompt, s.output_len, s.instruction) for s in samples] == [(prompt, output_len, instruction)] * 3


def test_json_arrays_and_answers_counted_in_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(SHAREGPT))
    (sample,) = load(DatasetConfig(name="sharegpt", path=str(path), num_prompts=1), tokenizer)
    assert sample.output_len == len(tokenizer.encode("one two three"))


@pytest.mark.parametrize(
    ("file", "count", "begins"),
    [("mt_bench_questions.jsonl", 80, "turns"), ("instructcoder_edit_eval.jsonl", 194, "instruction")],
)
def test_published_files(file: str, count: int, begins: str) -> None:
    path = data_file(file)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    samples = load(DatasetConfig(name="hf", path=str(path), num_prompts=count), None)
    firsts = [record[begins][0] if begins == "turns" else record[begins].strip() for record in records]
    assert len({sample.prompt for sample in samples}) >= count - 2
    assert all(sample.instruction for sample in samples)
    assert sorted(str(sample.prompt)[:40] for sample in samples) == sorted(
        (first if begins == "turns" else f"{first}\n\n{record['input']}")[:40]
        for first, record in zip(firsts, records, strict=True)
    )
    # another seed, another order of the same prompts
    other = load(DatasetConfig(name="hf", path=str(path), num_prompts=count, seed=1), None)
    assert other != samples
    assert sorted(other, key=str) == sorted(samples, key=str)


def test_small_files_are_repeated_and_seeds_decide(tmp_path: Path) -> None:
    path = lines(tmp_path / "data.jsonl", [{"prompt": str(i)} for i in range(5)])
    samples = load(DatasetConfig(name="hf", path=path, num_prompts=12), None)
    texts = [s.prompt for s in samples]
    assert sorted(texts[:5]) == list("01234")
    assert texts[5:10] == texts[:5]
    assert load(DatasetConfig(name="hf", path=path, num_prompts=12), None) == samples


def test_lengths(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = lines(tmp_path / "data.jsonl", [{"prompt": "import os\n" * 20}, {"prompt": "x"}])
    config = DatasetConfig(name="hf", path=path, num_prompts=2, input_len=4, output_len=3)
    for sample in load(config, tokenizer):
        assert isinstance(sample.prompt, str)
        assert len(tokenizer.encode(sample.prompt)) <= 4
        assert sample.output_len == 3


def test_random(tokenizer: Tokenizer) -> None:
    config = DatasetConfig(name="random", num_prompts=200, input_len=20, output_len=10, range_ratio=0.5)
    samples = load(config, tokenizer)
    assert {len(s.prompt) for s in samples} == set(range(10, 31))
    assert {s.output_len for s in samples} == set(range(5, 16))
    special = set(tokenizer.all_special_ids)
    assert not any(special & set(s.prompt) for s in samples)
    exact = load(DatasetConfig(name="random", num_prompts=3, input_len=7, output_len=2), tokenizer)
    assert [(len(s.prompt), s.output_len) for s in exact] == [(7, 2)] * 3
    assert len({s.prompt for s in exact}) == 3


def test_bundled(tokenizer: Tokenizer) -> None:
    samples = load(DatasetConfig(name="bundled", num_prompts=60, input_len=16), tokenizer)
    ids = tokenizer.encode("\n\n\n".join(PROMPTS))
    ring = ids + ids[:16]
    windows = {tuple(ring[i : i + 16]) for i in range(len(ids))}
    assert all(s.prompt in windows and s.output_len == 128 for s in samples)
    assert len({s.prompt for s in samples}) == 60


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "hf", "has no prompts"),
        ("[]", "hf", "has no prompts"),
        ('{"prompt": ""}\n', "hf", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt": \n', "hf", "line 2: is not JSON"),
        ("[1,\n2", "hf", "line 2: is not JSON"),
        ("3\n", "hf", "line 1: 3 is no record"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "hf", "line 2: has the fields text; must have turns or instruction and"),
        ('{"prompt": "a"}\n', "mt-bench", "line 1: has the fields prompt; must have turns"),
        ('{"prompt": 3}\n', "hf", "prompt must be a string"),
        ('{"prompt": "a", "output_tokens": 0}\n', "hf", "output_tokens=0"),
        ('{"turns": []}\n', "hf", "turns must be a list of strings"),
        ('{"instruction": "a", "input": null}\n', "hf", "instruction and input must be strings"),
        ('{"conversations": [{"value": "a"}]}\n', "hf", "at least two turns"),
        ('{"conversations": [{"value": "a"}, {"value": 1}]}\n', "hf", "value of a turn must be a string"),
    ],
)
def test_files_that_do_not_work(text: str, name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidConfigError) as caught:
        load(DatasetConfig(name=name, path=str(path)), None)
    assert message in str(caught.value)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="is not there"):
        load(DatasetConfig(name="custom", path=str(tmp_path / "x.jsonl")), None)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidConfigError, match="could not be read as text"):
        load(DatasetConfig(name="hf", path=str(binary)), None)
    for config in (DatasetConfig(name="random"), DatasetConfig(name="hf", path="x", input_len=3)):
        with pytest.raises(InvalidConfigError, match="--tokenizer=None"):
            load(config, None)


def test_hub_names_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrs.bench.datasets.find_spec", lambda name: None)
    with pytest.raises(InvalidConfigError, match="pip install datasets"):
        load(DatasetConfig(name="hf", path="somebody/something"), None)

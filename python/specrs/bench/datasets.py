"""Prompts for measurements: local files, hub data sets, random tokens, and the bundled prompts. Sends nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.errors import InvalidConfigError, check_choice, check_int, check_number, invalid_config, short

if TYPE_CHECKING:
    from specrs.tokenizer import Tokenizer

DEFAULT_OUTPUT_LEN = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, and the number of tokens to generate for it. `instruction`: the prompt is a user's turn, not text to
    continue.

    `prompt` is text, or token ids if exactly these ids are wanted.
    """

    prompt: str | tuple[int, ...]
    output_len: int
    instruction: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """Choice of prompts. `path` is a file or hub name. `input_len` is the length to which prompts are cut, or the
    length of random ones.

    With `range_ratio` r, lengths of random prompts are uniform over `[len * (1 - r), len * (1 + r)]`. `num_prompts`
    prompts are taken in an order that depends on `seed`; a smaller data set is repeated.
    """

    name: str
    path: str | None = None
    num_prompts: int = 1000
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float = 0.0
    seed: int = 0
    hf_split: str | None = None
    hf_subset: str | None = None

    def __post_init__(self) -> None:
        check_choice(InvalidConfigError, "--dataset-name", self.name, NAMES)
        check_int(InvalidConfigError, "--num-prompts", self.num_prompts, 1)
        for name, value in (("--input-len", self.input_len), ("--output-len", self.output_len)):
            if value is not None:
                check_int(InvalidConfigError, name, value, 1)
        check_number(InvalidConfigError, "--random-range-ratio", self.range_ratio, 0.0, 0.999999)
        if (self.path is None) != (self.name in ("random", "bundled")):
            allowed = "must be left out" if self.path else "must be a file" + " or a hub name" * (self.name == "hf")
            raise invalid_config("--dataset-path", self.path, f"{allowed} for --dataset-name {self.name}")

    @property
    def label(self) -> str:
        """Name of the data in results: the file, the last part of the hub name, or the kind of data."""
        return self.name if self.path is None else Path(self.path).stem


def load(config: DatasetConfig, tokenizer: Tokenizer | None) -> list[Sample]:
    """Load `num_prompts` prompts. Random, bundled and cut prompts need a tokenizer.

    Raises `InvalidConfigError` for data that are missing, empty or of another form; the message names the line.
    """
    if tokenizer is None and (config.name in ("random", "bundled") or config.input_len is not None):
        what = f"--dataset-name {config.name}" if config.input_len is None else "--input-len"
        raise InvalidConfigError(f"--tokenizer=None: must be a folder or hub id where {what} is given")
    rng = random.Random(config.seed)
    if config.name == "random":
        assert tokenizer is not None
        return _random(config, tokenizer, rng)
    if config.name == "bundled":
        assert tokenizer is not None
        return _bundled(config, tokenizer, rng)
    samples = _read(config, tokenizer)
    rng.shuffle(samples)
    chosen = [samples[i % len(samples)] for i in range(config.num_prompts)]
    if config.output_len is not None:
        chosen = [replace(sample, output_len=config.output_len) for sample in chosen]
    if config.input_len is not None:
        assert tokenizer is not None
        chosen = [_cut(sample, config.input_len, tokenizer) for sample in chosen]
    return chosen


def _turns(record: Mapping[str, Any], _: Tokenizer | None) -> Sample:
    turns = record["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ValueError("turns must be a list of strings")
    return Sample(turns[0], DEFAULT_OUTPUT_LEN, instruction=True)


def _edit(record: Mapping[str, Any], _: Tokenizer | None) -> Sample:
    instruction, code = record["instruction"], record["input"]
    if not isinstance(instruction, str) or not isinstance(code, str):
        raise ValueError("instruction and input must be strings")
    return Sample(f"{instruction.strip()}\n\n{code}", 200, instruction=True)


def _conversation(record: Mapping[str, Any], tokenizer: Tokenizer | None) -> Sample:
    turns = record["conversations"]
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
        raise ValueError("conversations must be a list of at least two turns")
    texts = [turn.get("value") for turn in turns[:2]]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the value of a turn must be a string")
    answer = str(texts[1])
    # without a tokenizer by the rule of thumb that four tokens are three words
    length = round(len(answer.split()) * 4 / 3) if tokenizer is None else len(tokenizer.encode(answer))
    return Sample(str(texts[0]), max(1, length))


def _prompt(record: Mapping[str, Any], _: Tokenizer | None) -> Sample:
    length = record.get("output_tokens", DEFAULT_OUTPUT_LEN)
    if not isinstance(record["prompt"], str):
        raise ValueError("prompt must be a string")
    return Sample(record["prompt"], check_int(InvalidConfigError, "output_tokens", length, 1))


FORMATS: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], Tokenizer | None], Sample]]] = {
    "mt-bench": (("turns",), _turns),
    "instructcoder": (("instruction", "input"), _edit),
    "sharegpt": (("conversations",), _conversation),
    "custom": (("prompt",), _prompt),
}
"""For each format, the fields that a record must have, and the function that turns it into a prompt."""
NAMES = ("random", "bundled", "hf", *FORMATS)


def _read(config: DatasetConfig, tokenizer: Tokenizer | None) -> list[Sample]:
    assert config.path is not None
    path = Path(config.path)
    if path.exists():
        records, where = _records(path), "line"
    elif config.name == "hf":
        records, where = _hub(config), "row"
    else:
        raise invalid_config("--dataset-path", config.path, "is not there; must be a .json or .jsonl file")
    samples = []
    for number, record in records:
        at = f"{config.path}, {where} {number}"
        if not isinstance(record, Mapping):
            raise InvalidConfigError(f"{at}: {short(record)} is no record; must be a JSON object")
        names = [config.name] if config.name in FORMATS else [*FORMATS]
        name = next((name for name in names if all(field in record for field in FORMATS[name][0])), None)
        if name is None:
            expected = " or ".join(" and ".join(FORMATS[name][0]) for name in names)
            raise InvalidConfigError(f"{at}: has the fields {', '.join(map(str, record))}; must have {expected}")
        try:
            sample = FORMATS[name][1](record, tokenizer)
        except ValueError as error:
            raise InvalidConfigError(f"{at}: {error}") from None
        if sample.prompt:  # a record may have an empty prompt; nothing can be sent for it
            samples.append(sample)
    if not samples:
        raise invalid_config("--dataset-path", config.path, "has no prompts; must have at least one record")
    return samples


def _records(path: Path) -> Iterable[tuple[int, Any]]:
    """Yield the records of a JSON array or of JSON lines, with their numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid_config("--dataset-path", str(path), f"could not be read as text: {error}") from None
    if text.lstrip().startswith("["):
        try:
            return list(enumerate(json.loads(text), start=1))
        except json.JSONDecodeError as error:
            raise InvalidConfigError(f"{path}, line {error.lineno}: is not JSON: {error.msg}") from None
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                records.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise InvalidConfigError(f"{path}, line {number}: is not JSON: {error.msg}") from None
    return records


def _hub(config: DatasetConfig) -> Iterable[tuple[int, Any]]:
    if find_spec("datasets") is None:
        raise invalid_config(
            "--dataset-path", config.path, "is no file; a hub name needs the package datasets: pip install datasets"
        )
    import datasets

    from specrs.models.hub import hub_error

    try:
        data = datasets.load_dataset(config.path, name=config.hf_subset, split=config.hf_split or "train")
    except Exception as fault:  # whatever the hub's client raises is about this name
        assert config.path is not None
        raise hub_error(
            fault, config.path, field="--dataset-path", error=InvalidConfigError, repo_type="dataset"
        ) from fault
    return enumerate(data)


def _length(middle: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(max(1, round(middle * (1 - ratio))), max(1, round(middle * (1 + ratio))))


def _random(config: DatasetConfig, tokenizer: Tokenizer, rng: random.Random) -> list[Sample]:
    special = set(tokenizer.all_special_ids)
    allowed = [token for token in range(tokenizer.vocab_size) if token not in special]
    samples = []
    for _ in range(config.num_prompts):
        prompt = tuple(rng.choices(allowed, k=_length(config.input_len or 1024, config.range_ratio, rng)))
        samples.append(Sample(prompt, _length(config.output_len or 128, config.range_ratio, rng)))
    return samples


def _bundled(config: DatasetConfig, tokenizer: Tokenizer, rng: random.Random) -> list[Sample]:
    """Return windows of the joined bundled prompts: Python, which the bundled pair was trained to continue."""
    from specrs.pair.prompts import PROMPTS

    ids = tokenizer.encode("\n\n\n".join(PROMPTS))
    length = config.input_len or 64
    starts = list(range(len(ids)))
    rng.shuffle(starts)
    ring = ids * (2 + length // len(ids))
    return [
        Sample(tuple(ring[start : start + length]), config.output_len or 128)
        for start in (starts[i % len(starts)] for i in range(config.num_prompts))
    ]


def _cut(sample: Sample, length: int, tokenizer: Tokenizer) -> Sample:
    ids: Sequence[int] = (
        tokenizer.encode(sample.prompt, add_special_tokens=False) if isinstance(sample.prompt, str) else sample.prompt
    )
    if len(ids) <= length:
        return sample
    return replace(sample, prompt=tokenizer.decode(ids[:length]))

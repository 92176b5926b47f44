"""Models in several GGUF files: names of the files, and checks that all are there and belong together. Reads no
file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from specrs.errors import CheckpointError, short

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """Return the names of all files of the model that the file `name` belongs to; only `name` for a model in one
    file."""
    found = _NAME.fullmatch(name)
    if found is None or int(found["count"]) < 2:
        return [name]
    return [f"{found['stem']}-{part:05}-of-{found['count']}.gguf" for part in range(1, int(found["count"]) + 1)]


def whole_name(name: str) -> str:
    """Return the name that the model's file would have if the model were in one file."""
    found = _NAME.fullmatch(name)
    return name if found is None else f"{found['stem']}.gguf"


def first_parts(names: Collection[str]) -> list[str]:
    """Return the name of the first file of each model that has a file in `names`."""
    return sorted({part_names(name)[0] for name in names})


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model that begins with `path`.

    Raises CheckpointError if `path` is another part, or if a part is missing.
    """
    names = part_names(path.name)
    if path.name != names[0]:
        number = names.index(path.name) + 1 if path.name in names else path.name
        reason = f"is part {number} of {len(names)}; pass the first one: {path.with_name(names[0])}"
        raise CheckpointError(f"model={short(str(path))}: {reason}")
    parts = [path.with_name(name) for name in names]
    for number, part in enumerate(parts, 1):
        if not part.is_file():
            reason = f"is missing, part {number} of {len(parts)}; put all parts into one folder"
            raise CheckpointError(f"{part}: {reason}")
    return parts


def check_parts(files: Sequence[tuple[Path, Mapping[str, Any], Collection[str]]]) -> None:
    """Check path, metadata and tensor names of each file of a model. Raises CheckpointError, which names the file, if a
    part is out of order or contradicts the others."""
    names: dict[str, Path] = {}
    for number, (path, metadata, tensors) in enumerate(files):
        split = len(files) > 1
        _check(path, metadata, "split.count", (len(files),) if split else (None, 0, 1))
        if split:
            _check(path, metadata, "split.no", (number,))
        for name in tensors:
            if name in names:
                raise CheckpointError(f"{path}: damaged: tensor {short(name)} is in {names[name].name}, too")
            names[name] = path
    for path, metadata, _ in files:
        if len(files) > 1:
            _check(path, metadata, "split.tensors.count", (len(names),))


def _check(path: Path, metadata: Mapping[str, Any], field: str, allowed: tuple[int | None, ...]) -> None:
    value = metadata.get(field)
    if type(value) is bool or value not in allowed:
        expected = allowed[-1]
        reason = f"must be {expected}, as its name and the other parts say; download all parts of one model again"
        if field == "split.count" and expected == 1:
            reason = "must be 1 or missing; parts of a model are called NAME-00001-of-00002.gguf and so on"
        raise CheckpointError(f"{path}: {field}={short(value)}: {reason}")

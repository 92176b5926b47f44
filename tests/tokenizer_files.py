"""Variants of the bundled pair's tokenizer on disk. Holds no tests."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specrs import pair


def copy_of_pair(path: Path) -> Path:
    """Copy the pair's JSON files and chat template to `path` (created)."""
    path.mkdir()
    for file in Path(pair.TARGET).iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, path)
    return path


def edit_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit the content of tokenizer.json."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def with_bos(path: Path) -> Path:
    """Write the pair's tokenizer, changed to put id 0 before every text."""

    def put_bos(content: dict[str, Any]) -> None:
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
        }

    copy_of_pair(path)
    edit_tokenizer(path, put_bos)
    return path

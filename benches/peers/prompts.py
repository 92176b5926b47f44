"""Makes prompts of one length for any model: windows of the bundled ones, or the demo's chats. Reads the model's
tokenizer, loads no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrs.cli.demo.chats import CHATS
from specrs.pair.prompts import PROMPTS
from specrs.tokenizer import Tokenizer as ChatTokenizer
from tokenizers import Tokenizer

from peers.job import Ids
from peers.settings import Setting


def windows(ids: list[int], number: int, length: int) -> Ids:
    """Return `number` windows of `ids`, repeated if necessary, whose starts are evenly spread."""
    step = max(1, len(ids) // number)
    longer = ids * (1 + -(-(number * step + length) // len(ids)))
    return [longer[i * step : i * step + length] for i in range(number)]


def make_prompts(setting: Setting, folder: Path) -> dict[str, Any]:
    """Return `groups` of prompts for the setting, and `warm`, one more group of other prompts; for chats, the first
    group again.

    The tokenizer is that of `folder`, which may be a GGUF file.
    """
    if setting.chats:
        chats = ChatTokenizer(str(folder))
        texts = [chats.render_chat([{"role": "user", "content": chat}]) for chat in CHATS[: setting.num_prompts]]
        asked = [[chats.encode(text, add_special_tokens=False)] for text in texts]
        return {"warm": asked[:1], "groups": asked}
    text = "\n\n\n".join(PROMPTS)
    if folder.is_file():
        ids = ChatTokenizer(str(folder)).encode(text, add_special_tokens=False)
    else:
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    prompts = windows(ids, setting.num_prompts + setting.batch, setting.prompt_tokens)
    groups = [prompts[i : i + setting.batch] for i in range(0, len(prompts), setting.batch)]
    return {"warm": groups[-1:], "groups": groups[:-1]}

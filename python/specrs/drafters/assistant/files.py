"""Opens the files of a Gemma 4 assistant for a target. Reads its configuration and the names of its tensors."""

from __future__ import annotations

from specrs.drafters.assistant.config import TARGET, describes_assistant, parse_assistant_config
from specrs.drafters.assistant.reader import AssistantFiles
from specrs.drafters.method import wrong
from specrs.drafters.vocabulary import draft_ids
from specrs.models.checkpoint import Checkpoint, read_json, resolve_folder
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.errors import of_folder, unsupported
from specrs.models.gguf.checkpoint import gguf_path
from specrs.models.quantization.table import FIELDS


def is_assistant(source: str, revision: str | None) -> bool:
    """Return whether a folder or hub id has the config.json of an assistant. Weights of a hub id are not downloaded.
    Raises CheckpointError if there is no readable config.json."""
    if gguf_path(source, revision) is not None:
        return False
    return describes_assistant(read_json(resolve_folder(source, revision, weights=False) / "config.json"))


def open_assistant(
    source: str, target: DecoderFacts, *, revision: str | None, size: int | None, counts: str | None
) -> AssistantFiles:
    """Open the assistant in a folder or hub id for `target`. It drafts only the `size` ids that `draft_ids` chooses by
    the file `counts`; all ids if `size` is None.

    Raises InvalidConfigError if the target is no Gemma 4, for an assistant in a GGUF file, and for a wrong `size` or
    `counts`; UnsupportedModelError for what is not implemented; CheckpointError if the assistant is not one of this
    target.
    """
    if target.config.architecture != TARGET:
        reason = (
            f"must be None with method='mtp' and a {target.config.architecture}: assistants are for Gemma 4; leave it "
            "out for the target's own MTP head, or use another method"
        )
        raise wrong("model", source, reason)
    if gguf_path(source, revision) is not None:
        reason = "must be a folder or hub id of safetensors files; GGUF files of assistants are not implemented"
        raise wrong("model", source, reason)
    folder = resolve_folder(source, revision)
    raw = read_json(folder / "config.json")
    with of_folder(folder):
        config = parse_assistant_config(raw, target.config)
        for field in FIELDS:
            if raw.get(field) is not None:
                raise unsupported(field, raw[field], "null: a quantized assistant")
    ids = draft_ids(size, counts, target.vocab_size)
    return AssistantFiles(source, config, Checkpoint(folder), ids)

"""Finds the MTP head in a target's checkpoint. Reads no tensor."""

from __future__ import annotations

import contextlib

from specrs.drafters.method import WHERE
from specrs.drafters.mtp.reader import MtpFiles, head_config
from specrs.drafters.vocabulary import draft_ids
from specrs.errors import CheckpointError, SpecrsError, UnsupportedModelError, invalid
from specrs.models.checkpoint import DTYPES, INDEX, Checkpoint, read_json, resolve_folder
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.gguf.checkpoint import GGUFCheckpoint, gguf_path
from specrs.models.loader import load_config
from specrs.models.quantization.checkpoint import QuantizedCheckpoint
from specrs.models.quantization.table import read_config, scheme_of
from specrs.models.registry import FAMILIES
from specrs.models.stacked import StackedCheckpoint
from specrs.models.tensors import Tensors
from specrs.models.wrappers import is_of_mtp_head


def has_mtp_head(source: str, revision: str | None) -> bool:
    """Return whether the checkpoint of a folder or hub id has an MTP head. False if it cannot be read.

    Weights of a hub id are not downloaded. If it has neither an index nor weights on disk, config.json decides.
    """
    with contextlib.suppress(SpecrsError):
        if not FAMILIES[load_config(source, revision=revision).architecture].mtp:
            return False
        file = gguf_path(source, revision)
        if file is not None:
            return bool(GGUFCheckpoint(file, mtp_head=True).names())
        folder = resolve_folder(source, revision, weights=False)
        if (folder / INDEX).is_file():
            names = read_json(folder / INDEX).get("weight_map")
            return isinstance(names, dict) and any(map(is_of_mtp_head, names))
        if any(folder.glob("*.safetensors")):
            return bool(Checkpoint(folder, mtp_head=True).entries())
        raw = read_json(folder / "config.json")
        return bool((raw.get("text_config") or raw).get("mtp_num_hidden_layers"))
    return False


def open_mtp(
    source: str, target: DecoderFacts, *, revision: str | None, size: int | None, counts: str | None
) -> MtpFiles:
    """Open the MTP head in the checkpoint `source` of `target`. `size` and `counts` are those of `draft_ids`.

    Raises CheckpointError if the checkpoint has no head, UnsupportedModelError if its kind of head or file is not
    implemented, and InvalidConfigError for a wrong `size` or `counts`.
    """
    ids = draft_ids(size, counts, target.vocab_size)
    whole = load_config(source, revision=revision)  # the target may be a rank's part
    return MtpFiles(source, head_config(whole), _tensors(source, target, revision), ids)


def _tensors(source: str, target: DecoderFacts, revision: str | None) -> Tensors:
    """Return the source of the tensors `mtp.*`."""
    field, value = WHERE + "method", "mtp"
    if not FAMILIES[target.config.architecture].mtp:
        known = ", ".join(name for name, family in FAMILIES.items() if family.mtp)
        reason = f"not implemented for {target.config.architecture}; implemented for {known}"
        raise invalid(UnsupportedModelError, field, value, reason)
    reason = f"{source} has no tensors {{}}; use a checkpoint with an MTP head, or another method"
    file = gguf_path(source, revision)
    if file is not None:
        blocks = GGUFCheckpoint(file, mtp_head=True)
        if not blocks.names():
            raise invalid(CheckpointError, field, value, reason.format("nextn"))
        return blocks
    folder, experts = resolve_folder(source, revision), target.config.experts
    stacked = None if experts is None else experts.stacked
    files = Checkpoint(folder, mtp_head=True) if stacked is None else StackedCheckpoint(folder, stacked, mtp_head=True)
    found = files.entries()
    if not found:
        raise invalid(CheckpointError, field, value, reason.format("mtp.*"))
    # Quantizers often leave the head as it was and do not say so, so the tensors decide.
    scheme = scheme_of(read_config(folder))
    plain = all(dtype in DTYPES and name.endswith(".weight") for name, (_, dtype) in found.items())
    return files if scheme is None or plain else QuantizedCheckpoint(files, scheme)

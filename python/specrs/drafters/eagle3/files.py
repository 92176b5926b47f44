"""Opens the files of an EAGLE-3 head for a target. Checks that all tensor names are known and no needed tensor is
missing.

A tensor whose name fits nothing would leave weights random, which only shows as a low acceptance rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrs.drafters.eagle3.config import TargetFacts, check_fit, parse_eagle3_config
from specrs.drafters.eagle3.reader import HeadFiles
from specrs.errors import CheckpointError
from specrs.models.checkpoint import Checkpoint, read_json, resolve_folder
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.errors import of_folder


def check_head(path: str | Path, revision: str | None, target: ModelConfig) -> None:
    """Raise CheckpointError for a head in a folder or hub id whose sizes do not fit `target`, and UnsupportedModelError
    for an option that is not implemented. Reads its config.json; weights of a hub id are not downloaded."""
    folder = resolve_folder(path, revision, weights=False)
    with of_folder(folder):
        check_fit(read_json(folder / "config.json"), target.hidden_size, target.vocab_size)


def open_head(
    path: str | Path,
    target: DecoderFacts,
    *,
    aux_hidden_state_layer_ids: Sequence[int] | None = None,
    rope_theta: float | None = None,
    revision: str | None = None,
) -> HeadFiles:
    """Open the head in a folder or hub id for `target`. Reads its configuration and the names of its tensors.

    Raises CheckpointError if the head is no EAGLE-3 head of this target or exists only as a pickle,
    UnsupportedModelError for an option that is not implemented, and InvalidConfigError for an impossible override.
    """
    folder = resolve_folder(path, revision)
    with of_folder(folder):
        config = parse_eagle3_config(
            read_json(folder / "config.json"),
            TargetFacts(
                target.config.hidden_size, target.vocab_size, target.num_layers, target.max_position_embeddings
            ),
            aux_hidden_state_layer_ids=aux_hidden_state_layer_ids,
            rope_theta=rope_theta,
        )
    try:
        checkpoint = Checkpoint(folder)
    except CheckpointError as error:
        if any(folder.glob("*.safetensors*")):
            raise
        raise CheckpointError(f"{error}; for a head `specrs convert-head {path} FOLDER` does it") from error
    return HeadFiles(str(path), config, checkpoint)

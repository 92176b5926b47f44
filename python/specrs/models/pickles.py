"""Converter of pickled weights to safetensors for `specrs convert-head`. Engines never read pickles.

`torch.load(weights_only=True)` rebuilds tensors and rejects every other object. So a file can hold wrong numbers, but
it cannot run code.
"""

import pickle
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specrs.errors import CheckpointError, invalid
from specrs.models.checkpoint import SINGLE
from specrs.models.hub import download_bar, hub_error

PICKLES = (".bin", ".pt", ".pth")
_CONFIG = "config.json"


def convert_pickles(source: str | Path, out: Path, revision: str | None = None) -> int:
    """Write the pickled tensors of a folder or hub id, and its config.json, into the folder `out`. Return the number of
    tensors.

    `out` is created if it is missing, and must not hold safetensors files. Raises CheckpointError for a file that
    cannot be read, for objects other than tensors, and for a name that is in several files.
    """
    if any(out.glob("*.safetensors")):
        raise invalid(CheckpointError, "output", str(out), "must be a folder without safetensors files")
    folder = _folder(source, revision)
    files = sorted(path for path in folder.iterdir() if path.suffix in PICKLES)
    if not files:
        raise CheckpointError(f"{folder}: there are no pickled weights ({', '.join(PICKLES)})")
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{folder}: {_CONFIG} is missing, a model folder must have one")
    tensors: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in _read(path).items():
            if name in tensors:
                raise CheckpointError(f"{path}: {name} is in another file, too")
            tensors[name] = tensor.contiguous().clone()  # Tied tensors share memory, which safetensors does not allow.
    out.mkdir(parents=True, exist_ok=True)
    if folder.resolve() != out.resolve():
        shutil.copyfile(folder / _CONFIG, out / _CONFIG)
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    return len(tensors)


def _folder(source: str | Path, revision: str | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    import huggingface_hub

    patterns = [_CONFIG, *(f"*{suffix}" for suffix in PICKLES)]
    try:
        found = huggingface_hub.snapshot_download(
            str(source), revision=revision, allow_patterns=patterns, tqdm_class=download_bar()
        )
    except Exception as fault:
        raise hub_error(fault, str(source), revision=revision, field="source") from fault
    return Path(found)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as fault:
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise CheckpointError(f"{path}: no file of tensors alone, or damaged: {reason}") from fault
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) and isinstance(k, str) for k, x in found.items()):
        raise CheckpointError(f"{path}: must hold tensors by name")
    return found

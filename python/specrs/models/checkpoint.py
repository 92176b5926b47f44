"""Finds and reads the safetensors files of a model folder. Builds no model, reads no pickle."""

import contextlib
import json
import logging
import mmap
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from specrs.arrays import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, Array, converted
from specrs.errors import CheckpointError, invalid, short
from specrs.models.hub import did_you_mean, download_bar, hub_error
from specrs.models.registry import renamed
from specrs.models.shard_index import place
from specrs.models.wrappers import is_of_mtp_head, is_wrapped, log_mtp_head, text_config, text_names

logger = logging.getLogger("specrs")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_BASE_PREFIX, _BASE_EMBEDDING = "model.", "embed_tokens.weight"
"""Prefix of a causal model's tensors that its base model does not have, and a tensor of every base model."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHER_WEIGHTS = ("adapter_", "consolidated")
"""Beginnings of the names of files that do not hold the model's weights, but a LoRA adapter or a copy of the model in
its author's layout."""
DTYPES = ("F64", "F32", "BF16", "F16")
"""Safetensors' names of the dtypes that unquantized weights may have."""
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    **{f"{sign}{8 * size}": np.dtype(f"{sign.lower()}{size}") for sign in "IU" for size in (1, 2, 4, 8)},
    "BOOL": np.dtype(np.bool_),
    "BF16": BFLOAT16,
    "F8_E4M3": FLOAT8_E4M3,
    "F8_E5M2": FLOAT8_E5M2,
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""NumPy dtype for each dtype name of safetensors."""
MAX_JSON = 64 << 20
"""Largest size in bytes of a JSON file that describes a model. The largest index of shards has about 5 MB."""
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "*.tiktoken"]
_OTHER_COPIES = ["consolidated*", "original/*", "*/*"]
"""Patterns of files that are never downloaded: copies of the weights in the author's layout, and exports in
subfolders."""


def resolve_folder(source: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of `source`, a folder or a hub id. The files of a hub id are downloaded first.

    Only the hub's safetensors, JSON and tokenizer files are downloaded; with `weights=False`, no safetensors. Raises
    CheckpointError if there is no such folder or repository, if it is gated, or if the hub cannot be reached. A folder
    must not have a `revision`.
    """
    path = Path(source)
    if path.is_dir():
        if revision is not None:
            raise invalid(CheckpointError, "revision", revision, f"must be None, because {path} is a folder")
        return path
    text = str(source)
    if path.exists():
        only = "" if path.suffix == ".gguf" else "; the only files that are read as models are GGUF files"
        raise invalid(CheckpointError, "model", text, f"must be a folder or a hub id, this is a file{only}")
    is_path = isinstance(source, Path) or text.startswith((".", "~", "/")) or "\\" in text or text.count("/") > 1
    if is_path or path.suffix == ".gguf":
        is_gguf = path.suffix == ".gguf"
        allowed = "a folder, a GGUF file or a hub id" if is_gguf else "a folder or a hub id"
        kind = "file" if is_gguf else "folder"
        reason = f"must be {allowed}, there is no such {kind}; {did_you_mean(text)}check the path"
        raise invalid(CheckpointError, "model", text, reason)
    import huggingface_hub

    patterns = [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES
    try:
        return Path(
            huggingface_hub.snapshot_download(
                text,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_OTHER_COPIES,
                tqdm_class=download_bar(),
            )
        )
    except Exception as fault:
        raise hub_error(fault, text, revision=revision) from fault


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises CheckpointError if the file is missing, is larger than MAX_JSON, holds
    no JSON object, or is not a regular file (a pipe may never end)."""
    with contextlib.suppress(OSError):  # read_text below reports it
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_JSON:
            raise CheckpointError(f"{path}: must be a regular file of at most {MAX_JSON >> 20} MiB")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing, a model folder must have one") from None
    except (OSError, ValueError) as fault:
        raise CheckpointError(f"{path}: could not be read as JSON: {fault}") from fault
    except RecursionError:
        raise CheckpointError(f"{path}: could not be read as JSON: it is nested too deep") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, found {short(content)}")
    return content


class Checkpoint:
    """Tensors in a folder of safetensors files: one file, or several with an index. Tensor data is read on demand.

    Tensors of a multimodal checkpoint's text model have the names that the text model alone has: see `models.wrappers`.
    Tensors of a family that names them differently have the names of other families: see `Family.tensor_names`.
    """

    def __init__(self, folder: Path, *, allow_base_model: bool = False, mtp_head: bool = False) -> None:
        """Open the files. With `allow_base_model`, tensors of a base model are renamed: see `prefix`.

        With `mtp_head`, the tensors are those of the checkpoint's MTP head, else those of the model without it.

        Raises CheckpointError if a file is missing or damaged, or if there are only pickled weights.
        """
        self.folder = folder
        paths, weight_map = _weight_files(folder)
        files: dict[str, SafetensorsFile] = {}
        for path in paths:
            try:
                files[path.name] = SafetensorsFile(path)
            except FileNotFoundError:
                raise CheckpointError(f"{folder}: {path.name} is missing, {INDEX} names it") from None
            except (SafetensorError, OSError) as fault:
                raise CheckpointError(f"{path}: damaged or truncated: {fault}") from fault
        self.placement = place(folder, weight_map, {name: list(file.entries) for name, file in files.items()})
        config = folder / "config.json"
        placed = {name: file for name, file in self.placement.files.items() if is_of_mtp_head(name) == mtp_head}
        is_base = allow_base_model and _BASE_EMBEDDING in placed and _BASE_PREFIX + _BASE_EMBEDDING not in placed
        self.prefix = _BASE_PREFIX if is_base else ""
        """Beginning of tensor names here that the files' names lack, because they hold a base model without an LM head.
        Empty for other files."""
        if not mtp_head and len(placed) < len(self.placement.files):
            log_mtp_head(folder, len(self.placement.files) - len(placed))
        raw = read_json(config) if config.is_file() and not mtp_head else {}
        found = text_names(folder, placed) if is_wrapped(raw) else {self.prefix + name: name for name in placed}
        self._names = renamed(folder, found, text_config(raw).get("architectures"))
        """Name in the files of each tensor."""
        self.unlisted = frozenset(name for name, file in self._names.items() if file in self.placement.unlisted)
        """Tensors that the index does not list. They are read if the model has them and ignored otherwise."""
        self._files = {name: files[placed[file]] for name, file in self._names.items()}

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        optional: Mapping[str, tuple[int, ...]],
        not_checked: Sequence[str] = (),
    ) -> None:
        """Check that all `expected` tensors are there, and nothing else but `optional` ones; check shapes and dtypes.

        Tensors in `not_checked` may have any shape and dtype. Buffers of RoPE frequencies are ignored, because
        frequencies are computed, and so are tensors that the index does not list. Raises CheckpointError, which names
        the tensors.
        """
        self.check_placement((*expected, *optional))
        found = self.entries()
        shapes = {name: shape for name, (shape, _) in found.items()}
        check_tensors(self.folder, shapes, expected, optional, (*not_checked, *self.unlisted))
        for name in filter(found.__contains__, {**expected, **optional}):
            if found[name][1] not in DTYPES:
                raise CheckpointError(f"{self.folder}: {name} is {found[name][1]}; must be one of {', '.join(DTYPES)}")

    def check_placement(self, names: Iterable[str]) -> None:
        """Raise CheckpointError for the first of `names` whose file the index leaves open."""
        self.placement.check(self.folder, (self._names.get(name, name) for name in names))

    def entries(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and the safetensors dtype name of every tensor."""
        return {name: file.entries[self._names[name]] for name, file in self._files.items()}

    @property
    def modules(self) -> dict[str, str]:
        """Name in the files of each module that has tensors. It differs for a multimodal checkpoint's text model."""
        return {name.rpartition(".")[0]: file.rpartition(".")[0] for name, file in self._names.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Return the tensor `name` converted to `dtype`. Raises CheckpointError for a file dtype that is not known."""
        return converted(self.mapped(name), dtype)

    def mapped(self, name: str) -> Array:
        """Return the tensor `name` in the file's dtype as a view of the mapped file. Writing to it copies the written
        pages and never changes the file. Raises CheckpointError for a dtype that is not known."""
        try:
            return self._files[name].mapped(self._names[name])
        except KeyError as fault:
            raise CheckpointError(f"{self.folder}: {name} could not be read: its type {fault} is not known") from None


class SafetensorsFile:
    """One memory-mapped safetensors file. The safetensors library checks its header."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises SafetensorError if it is damaged, OSError if it cannot be read."""
        with safe_open(str(path), framework="np") as checked:
            slices = {name: checked.get_slice(name) for name in checked.keys()}  # noqa: SIM118, it is no dictionary
            self.entries = {name: (tuple(view.get_shape()), str(view.get_dtype())) for name, view in slices.items()}
            """Shape and safetensors dtype name of every tensor."""
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            self._pages = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        self._places = {name: [8 + length + offset for offset in header[name]["data_offsets"]] for name in self.entries}

    def mapped(self, name: str) -> Array:
        """Return a view of a tensor's pages. Raises KeyError for a dtype that NumPy does not have."""
        shape, kind = self.entries[name]
        first, end = self._places[name]
        return self._pages[first:end].view(_NUMPY_DTYPES[kind]).reshape(shape)


def check_tensors(
    folder: Path,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    not_checked: Sequence[str] = (),
) -> None:
    """Check the names and shapes in `found`. All `expected` tensors must be there, and nothing else but `optional` and
    `not_checked` ones. Raises CheckpointError, which names the tensors of `folder`."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"{folder}: {_some(missing)} missing")
    known = {**expected, **optional}
    ignored = {*not_checked, *(name for name in found if name.endswith("rotary_emb.inv_freq"))}
    extra = [name for name in found if name not in known and name not in ignored]
    if extra:
        raise CheckpointError(f"{folder}: {_some(extra)} not part of this architecture: it would be ignored")
    for name in filter(found.__contains__, known):
        if found[name] != known[name]:
            raise CheckpointError(f"{folder}: {name} has shape {found[name]}, config.json makes it {known[name]}")


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files with weights, and the index as a map from tensor to file name. The map is empty if there is one
    file.

    `model.safetensors` wins over an index that does not name it, because such an index is stale. transformers does this
    too.
    """
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file():
        weight_map: dict[str, str] = {}
        with contextlib.suppress(CheckpointError):
            weight_map = _weight_map(index)
        if SINGLE not in weight_map.values():
            if index.exists():
                logger.warning("%s: %s is not read, because %s is there, too", folder, INDEX, SINGLE)
            return [single], {}
    if index.is_file():
        weight_map = _weight_map(index)
        return [folder / name for name in sorted(set(weight_map.values()))], weight_map
    others = [path for path in folder.glob("*.safetensors") if not path.name.startswith(_OTHER_WEIGHTS)]
    if len(others) == 1:
        logger.warning("%s: %s is read as %s, which is missing", folder, others[0].name, SINGLE)
        return others, {}
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder}: holds only pickled weights ({_some(pickles)} there), which can run code when they are read; "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} is there")


def _weight_map(index: Path) -> dict[str, str]:
    """Return the `weight_map` of the index file: the file name of each tensor. Raises CheckpointError if it is
    malformed."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map={short(weight_map)}: must map tensor names to file names")
    outside = [name for name in weight_map.values() if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise CheckpointError(f"{index}: {short(min(outside))} must be a safetensors file in the same folder")
    return weight_map


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more + (" are" if len(names) > 1 else " is")

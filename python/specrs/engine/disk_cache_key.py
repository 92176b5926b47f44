"""Key of an engine's KV on disk: a digest of all that KV depends on besides tokens, salt and adapter. Reads files,
writes only the list of their hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specrs import _core
from specrs.backends.blueprint import Blueprint
from specrs.backends.model_source import draft_source
from specrs.engine_options import EngineOptions
from specrs.instruction_sets import usable_instruction_sets
from specrs.models.checkpoint import resolve_folder
from specrs.models.gguf.checkpoint import gguf_path
from specrs.models.gguf.splits import parts_of
from specrs.options import options_of

logger = logging.getLogger("specrs")

FORMAT = 1
"""Version of the layout of blocks in records."""
NOT_IN_KEY = frozenset(
    {
        *("model", "revision", "speculative_config"),  # the content of their files is in the key
        *("tokenizer", "skip_tokenizer_init", "tokenizer_revision"),  # blocks are found by token ids
        *("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "max_prefill_stall_ms"),
        *("num_reserved_decode_tokens", "priority_aging_steps", "num_gpu_blocks_override", "kv_cache_memory_bytes"),
        *("gpu_memory_utilization", "enable_prefix_caching", "tensor_parallel_size", "distributed_timeout"),
        *(
            "max_steps_in_flight",
            "cudagraph_capture_sizes",
            "threads",
            "seed",
            "max_logprobs",
            "logprobs_mode",
            "device",
        ),
        *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"),  # the adapter is in the block's hash
        *("kv_events_config", "kv_cache_path", "kv_cache_disk_bytes", "state_cache_memory_bytes"),
    }
)
"""Options that change no bit of KV on a CPU. All other options are in the key. So if one is missing here, prefix hits
are lost, but no wrong KV is read."""
NOT_IN_DRAFT_KEY = frozenset({"model", "revision", "num_speculative_tokens", "rejection_sample_method"})
"""Options of `speculative_config` that are left out of the key of the draft's KV: they change no bit of it, or their
files are in the key."""
_PATTERNS = ("*.json", "*.safetensors")
_HASHES = "hashes.json"
_MAX_HASHES = 1000
_CHUNK = 16 << 20


def namespace_of(blueprint: Blueprint, path: str) -> tuple[bytes, FileHashes]:
    """Return the key of the engine's records, 32 bytes, and the hashes of the files it was made from. `path` is the
    folder of the cache, where earlier hashes are."""
    config, drafter = blueprint.config, blueprint.drafter
    hashes = FileHashes(Path(path) / _HASHES)
    core = _core.__file__
    key: dict[str, Any] = {
        "format": FORMAT,
        "version": version("specrs"),
        "core": None if core is None else hashes.of([Path(core)]),
        "instructions": usable_instruction_sets(),
        "options": _values(config, options_of(EngineOptions), NOT_IN_KEY),
        "target": _model(blueprint.weights.target, config.target, config.revision, hashes),
        "draft": None,
    }
    source, speculative = draft_source(config), config.speculative_config
    if drafter is not None and not drafter.has_own_blocks and source is not None and speculative is not None:
        options = _values(speculative, options_of(type(speculative)), NOT_IN_DRAFT_KEY)
        key["draft"] = [_model(drafter.model, *source, hashes), options]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).digest(), hashes


def _values(settings: Any, options: Mapping[str, Any], left_out: frozenset[str]) -> dict[str, str]:
    return {name: repr(getattr(settings, name)) for name in options if name not in left_out}


def _model(model: Any, source: str, revision: str | None, hashes: FileHashes) -> list[str]:
    return [str(model.dtype), str(model.cache_dtype), *hashes.of(_files(source, revision))]


def _files(source: str, revision: str | None) -> list[Path]:
    """Return all files that a model may have been read from."""
    found = gguf_path(source, revision)
    if found is not None:
        return parts_of(found)
    folder = resolve_folder(source, revision)
    return sorted(path for pattern in _PATTERNS for path in folder.glob(pattern))


class FileHashes:
    """SHA-256 of files. A file that was hashed before is not read again if its device, inode, size and modification
    time are the same."""

    def __init__(self, path: Path) -> None:
        """Read the hashes that an earlier process saved at `path`. A missing or broken list counts as empty."""
        self._path = path
        self._known = _read(path)
        self._changed = False

    def of(self, files: Iterable[Path]) -> list[str]:
        """Return name and hash of each file."""
        return [part for file in files for part in (file.name, self._hash(file))]

    def _hash(self, file: Path) -> str:
        status = file.stat()
        place = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        if place not in self._known:
            begun = time.perf_counter()
            self._known[place] = sha256_of(file)
            self._changed = True
            seconds = time.perf_counter() - begun
            if seconds > 1.0:
                logger.info("%s was hashed in %.1f s for the prefix cache on disk; once only", file, seconds)
        return self._known[place]

    def save(self) -> None:
        """Save new hashes for later processes. A disk that cannot be written costs them time, nothing else."""
        if not self._changed:
            return
        body = json.dumps(dict(list(self._known.items())[-_MAX_HASHES:])).encode()
        new = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            new.replace(self._path)


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    found = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _read(path: Path) -> dict[str, str]:
    """Return the saved hashes. Returns none if the file is damaged, or if another user could have written it."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return {}
        sum_, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return {}
    if hashlib.sha256(body).hexdigest().encode() != sum_:
        return {}
    known: dict[str, str] = json.loads(body)
    return known

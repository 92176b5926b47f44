"""Prefix cache on disk of an engine: opens the store, and copies blocks and snapshots of states between steps. Formats
no files.

`specrs.core.KVStore` copies between KV caches and records, and its thread writes. This module decides how much time the
engine's thread spends on copies.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import time
from typing import Any
from weakref import WeakKeyDictionary

from specrs.backends.blueprint import Blueprint
from specrs.core import InvalidConfigError as CoreInvalidConfigError
from specrs.core import KVStore, Scheduler
from specrs.engine.disk_cache_key import namespace_of
from specrs.errors import InvalidConfigError, UnsupportedConfigError, invalid
from specrs.model_values import DEFAULT_DISK_CACHE_BYTES
from specrs.models.lora import LoRAAdapter
from specrs.outputs import DiskCacheStats

logger = logging.getLogger("specrs")

SAVE_SHARE = 0.02
"""Share of the engine's time that it spends on copying blocks out while requests run. Blocks that are left wait in the
KV cache until the engine is idle."""
MAX_CREDIT_MS = 20.0
"""Maximum time for copying out that is saved up while steps have nothing to save, in milliseconds."""
LOAD_MS = 20.0
"""Milliseconds per step that reading blocks may take while other requests wait for the step. The other blocks are read
after the step. At least one block is read in each step."""
LEAST_BLOCKS = 16
"""Smallest number of blocks that the limit of bytes must have room for."""
LEAST_SNAPSHOTS = 2
"""Smallest number of snapshots of states that the limit of bytes must have room for, in addition to the blocks."""
SEGMENTS = 16
"""Number of files that the limit is divided into, so that deleting one costs a small part of the cache."""
MAX_SEGMENT_BYTES = 256 << 20
_RECORD_BYTES = 64
"""Bytes of a record besides its block or snapshot."""


def open_store(blueprint: Blueprint) -> KVStore | None:
    """Open the store of an engine's `kv_cache_path`. Return None without that option, and if the disk is full.

    Raises:
        UnsupportedConfigError: the models of the engine cannot be served from a disk.
        InvalidConfigError: the folder must not be used, or its limit is too small.
    """
    config, path = blueprint.config, blueprint.config.kv_cache_path
    if path is None:
        return None
    _check_models(blueprint, path)
    block, snapshot = blueprint.bytes_per_block + _RECORD_BYTES, 0
    least, takes = LEAST_BLOCKS * block, f"{LEAST_BLOCKS} blocks"
    decoder = blueprint.weights.target.decoder
    size = 0 if decoder is None else decoder.snapshot_bytes
    if size:
        snapshot = size + _RECORD_BYTES
        least, takes = least + LEAST_SNAPSHOTS * snapshot, f"{takes} and {LEAST_SNAPSHOTS} snapshots of states"
    limit = DEFAULT_DISK_CACHE_BYTES if config.kv_cache_disk_bytes is None else config.kv_cache_disk_bytes
    if limit < least:
        reason = f"must be at least {least}, which {takes} of these models take"
        raise invalid(InvalidConfigError, "kv_cache_disk_bytes", limit, reason)
    path = os.path.expanduser(path)
    try:
        key, hashes = namespace_of(blueprint, path)
        store = KVStore(
            path,
            key,
            max_bytes=limit,
            segment_bytes=max(block, snapshot, min(limit // SEGMENTS, MAX_SEGMENT_BYTES)),
            owner=os.geteuid(),
            fresh_key=secrets.token_bytes(16),
            snapshot_bytes=size,
        )
    except CoreInvalidConfigError as fault:
        raise invalid(InvalidConfigError, "kv_cache_path", path, f"cannot be used: {fault}") from fault
    except OSError as fault:
        if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise invalid(InvalidConfigError, "kv_cache_path", path, f"cannot be used: {fault}") from fault
        logger.warning("kv_cache_path=%r: the disk is full, so there is no prefix cache on disk: %s", path, fault)
        return None
    hashes.save()
    stats = store.stats()
    role = "writes there" if stats["is_writer"] else "only reads, because another process writes there"
    logger.info("prefix cache on disk: %s has %d records; this process %s", path, stats["records"], role)
    return store


def _check_models(blueprint: Blueprint, path: str) -> None:
    """Raise `UnsupportedConfigError` for models whose KV has not always the same bits, and for models that free the KV
    of their first positions."""
    drafter = blueprint.drafter
    models = [blueprint.weights.target]
    if drafter is not None and not drafter.has_own_blocks:
        models.append(drafter.model)
    reason = None
    if any(model.decoder is None for model in models):
        reason = "not implemented for a model that torch computes, whose sums have no fixed order; allowed: None"
    elif blueprint.sliding_window is not None or blueprint.window_groups:
        reason = (
            "not implemented for a model with sliding windows, whose blocks are not kept from the start; allowed: None"
        )
    if reason is not None:
        raise invalid(UnsupportedConfigError, "kv_cache_path", path, reason)


class DiskCache:
    """The prefix cache on disk of one engine. Only the engine's thread uses it.

    Nothing here fails a request: what cannot be read is computed, and what cannot be written is not cached.
    """

    def __init__(self, store: KVStore, scheduler: Scheduler, runner: Any, block_size: int) -> None:
        """Fill the suffix trees of `scheduler` from `store`. Blocks are copied from and to the caches of `runner`."""
        self._store, self._scheduler, self._block_size = store, scheduler, block_size
        drafter = runner.drafter
        shares = drafter is not None and not drafter.on_host and drafter.text_limits is None
        of_draft = drafter.kv_cache if shares else None
        self._caches = (runner.kv_cache.native, None if of_draft is None else of_draft.native)
        self._digests: WeakKeyDictionary[LoRAAdapter, bytes] = WeakKeyDictionary()
        self._warned: set[str] = set()
        self._credit = 0.0
        self._stepped_at = time.perf_counter()
        self._closed = False
        store.restore_outputs(scheduler)
        self.reset_stats()

    @property
    def has_due(self) -> bool:
        """True if blocks or snapshots wait to be saved, and this process may write."""
        return self._scheduler.has_due() and bool(self._store.stats()["is_writer"])

    def await_load(self, request_id: int) -> None:
        """Let a request that was just added wait for its blocks on disk, if there are any."""
        self._store.await_load(self._scheduler, request_id)

    def load(self, request_ids: list[int], *, alone: bool) -> None:
        """Read blocks of requests that could be admitted now. With `alone`, no other request waits for the next step,
        so all blocks are read."""
        begun = time.perf_counter()
        for request_id in request_ids:
            while not self._load(request_id, None if alone else LOAD_MS - 1e3 * (time.perf_counter() - begun)):
                if not alone:
                    return  # the others are asked for again with the next step

    def _load(self, request_id: int, ms: float | None) -> bool:
        bound = float("inf") if ms is None else max(ms, 0.0)
        return self._store.load(self._scheduler, request_id, *self._caches, ms=bound)

    def stepped(self) -> None:
        """Copy out blocks after a step, within `SAVE_SHARE` of the time since the last call."""
        begun = time.perf_counter()
        credit = self._credit + SAVE_SHARE * 1e3 * (begun - self._stepped_at)
        self._stepped_at = begun
        if credit > 0.0 and self._scheduler.has_due():
            self._save(credit)
            credit -= 1e3 * (time.perf_counter() - begun)
        self._credit = min(credit, MAX_CREDIT_MS)

    def save(self) -> None:
        """Copy out blocks while no request waits for the engine, as many as the queue of the disk has room for."""
        self._save(float("inf"))

    def _save(self, ms: float) -> bool:
        done = self._store.save(self._scheduler, *self._caches, ms=ms)
        error = self._store.take_error()
        if error is not None and error not in self._warned:
            self._warned.add(error)
            logger.warning("the prefix cache on disk could not be written; requests go on without: %s", error)
        return done

    def digest(self, adapter: LoRAAdapter) -> bytes:
        """Return a digest of an adapter's matrices, which keys the blocks that were computed with it."""
        known = self._digests.get(adapter)
        if known is None:
            found = hashlib.sha256()
            for layer in adapter.layers:
                for projection, parts in sorted(layer.items()):
                    for part in parts:
                        found.update(
                            f"{projection} {part.first} {part.a.dtype} {part.a.shape} {part.b.shape};".encode()
                        )
                        found.update(part.a.tobytes())
                        found.update(part.b.tobytes())
                found.update(b"|")
            known = self._digests[adapter] = found.digest()
        return known

    def flush(self) -> None:
        """Save all due blocks and wait until they are written."""
        while self.has_due and not self._save(float("inf")):
            self._store.flush()
        self._store.flush()

    def close(self) -> None:
        """Save all due blocks, and end the thread that writes. May be called again."""
        if not self._closed:
            self._closed = True
            self.flush()
            self._store.close()

    def stats(self) -> DiskCacheStats:
        """Return the statistics since the start or the last `reset_stats`."""
        now, before = self._store.stats(), self._before
        since = {name: now[name] - before[name] for name in now}
        return DiskCacheStats(
            queried_tokens=self._block_size * since["queried_blocks"],
            loaded_tokens=self._block_size * since["loaded_blocks"],
            loaded_snapshots=since["loaded_snapshots"],
            read_bytes=since["read_bytes"],
            written_bytes=since["written_bytes"],
            errors=since["errors"],
            is_writer=bool(now["is_writer"]),
        )

    def reset_stats(self) -> None:
        """Set the statistics to zero."""
        self._before = self._store.stats()

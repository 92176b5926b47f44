"""LoRA adapters of an engine. An adapter is read at its first request, and kept. Schedules nothing.

All methods may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from pathlib import Path
from weakref import WeakValueDictionary

from specrs.errors import invalid_request
from specrs.lora_request import LoRARequest
from specrs.models.checkpoint import resolve_folder
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.errors import about
from specrs.models.lora import LoRAAdapter
from specrs.models.lora_config import FILE as CONFIG
from specrs.models.lora_loader import FILE, load_lora

logger = logging.getLogger("specrs")

_Identity = tuple[str, str, tuple[tuple[int, int], ...]]
"""Identity of an adapter: name, path, and size and modification time of its two files. An id always stands for the same
identity."""


class LoRAStore:
    """Store of one model's adapters, by id.

    The last `max_cpu_loras` different adapters that were requested are kept. Others are kept as long as a request uses
    them.
    """

    def __init__(
        self,
        model: DecoderFacts,
        *,
        max_lora_rank: int,
        max_cpu_loras: int,
        config: ModelConfig | None = None,
        experts: bool = True,
    ) -> None:
        """Start empty. `config` is the whole model's configuration if `model` is a rank's part of it; None: the
        model's. `experts`: whether the device computes adapters of experts."""
        self._experts = experts
        self._config = model.config if config is None else config
        self._model, self._max_rank, self._most = model, max_lora_rank, max_cpu_loras
        self._recent: OrderedDict[int, LoRAAdapter] = OrderedDict()
        self._live: WeakValueDictionary[int, LoRAAdapter] = WeakValueDictionary()
        self._known: dict[int, _Identity] = {}
        self._lock = threading.Lock()

    def get(self, lora_int_id: int) -> LoRAAdapter:
        """Return the adapter with this id, which a request must be using. Raises KeyError if none is."""
        return self._live[lora_int_id]

    def load(self, request: LoRARequest) -> LoRAAdapter:
        """Return the adapter of a request. It is read if it is not in memory.

        An id stands for one adapter as long as the engine lives, because the KV of cached prefixes is found by it.
        Raises InvalidRequestError if the id stands for another adapter, CheckpointError or a subclass if the adapter
        cannot be read.
        """
        with self._lock:
            number = request.lora_int_id
            known = self._known.get(number)
            self._check_name(request, known)
            adapter = self._live.get(number)
            if adapter is None:
                adapter = self._read(request, known)
            self._live[number] = self._recent[number] = adapter
            self._recent.move_to_end(number)
            while len(self._recent) > self._most:
                self._recent.popitem(last=False)
            return adapter

    def _check_name(self, request: LoRARequest, known: _Identity | None) -> None:
        name, path, number = request.lora_name, request.lora_path, request.lora_int_id
        if known is not None and known[:2] != (name, path):
            allowed = f"stands for {known[0]!r} of {known[1]} in this engine; another adapter needs another id"
            raise invalid_request("lora_int_id", number, allowed)
        other = next((i for i, (taken, _, _) in self._known.items() if taken == name and i != number), None)
        if other is not None:
            raise invalid_request("lora_name", name, f"is the name of lora_int_id={other} in this engine")

    def _read(self, request: LoRARequest, known: _Identity | None) -> LoRAAdapter:
        begun = time.perf_counter()
        with about("lora_path", "revision"):
            folder = resolve_folder(request.lora_path)
        identity = (request.lora_name, request.lora_path, _stamps(folder))
        if known is not None and known != identity:
            reason = "its files have changed since it was first read; another adapter needs another lora_int_id"
            raise invalid_request("lora_path", request.lora_path, reason)
        adapter = load_lora(
            folder,
            self._model,
            self._config,
            name=request.lora_name,
            lora_int_id=request.lora_int_id,
            max_lora_rank=self._max_rank,
            experts=self._experts,
        )
        self._known[request.lora_int_id] = identity
        ms = 1e3 * (time.perf_counter() - begun)
        logger.info("LoRA adapter %s (%s) read in %.0f ms", request.lora_name, request.lora_path, ms)
        return adapter


def _stamps(folder: Path) -> tuple[tuple[int, int], ...]:
    """Return size and modification time of the adapter's two files; (0, 0) for a missing file, which is reported when
    it is read."""
    found = []
    for name in (CONFIG, FILE):
        try:
            status = (folder / name).stat()
        except OSError:
            found.append((0, 0))
        else:
            found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)

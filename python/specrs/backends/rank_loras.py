"""LoRA adapters on several tensor parallel ranks. Rank 0 reads an adapter and sends every other rank its part, before
the first step with a request that has it. So only rank 0 needs the files, and all ranks have the same numbers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.lora import LoRAAdapter, LoRAPart
from specrs.models.lora_shards import AdapterCuts
from specrs.models.shards import Shard
from specrs.models.torch_weights import TorchFacts
from specrs.parallel.connection import Kind, Message
from specrs.parallel.team import Team

_HEAD = struct.Struct("<Q")
"""Number of bytes of a layer's JSON header, a multiple of 8, so that the matrices after it are aligned."""


class LeadingLoRAs:
    """Adapters of rank 0: its own parts, and which adapters the other ranks have. Use it from one thread."""

    def __init__(
        self, find: Callable[[int], LoRAAdapter], model: DecoderFacts, config: ModelConfig, team: Team
    ) -> None:
        """Start without adapters. `find` returns the whole adapter of an id that a request uses, and raises KeyError
        for others. `model` is rank 0's part of the model of `config`."""
        self._find, self._model, self._team = find, cast("TorchFacts", model), team
        self._cuts = [AdapterCuts(config, Shard(rank, team.size)) for rank in range(team.size)]
        self._own: WeakKeyDictionary[LoRAAdapter, LoRAAdapter] = WeakKeyDictionary()
        self._sent: set[int] = set()

    def get(self, lora_int_id: int) -> LoRAAdapter:
        """Return rank 0's part of the adapter with this id, which a request must be using."""
        whole = self._find(lora_int_id)
        own = self._own.get(whole)
        if own is None:
            layers = tuple(_held(self._model, self._cuts[0].layer(whole, i)) for i in range(len(whole.layers)))
            own = self._own[whole] = replace(whole, layers=layers)
        return own

    def send_new(self, ids: Iterable[int]) -> None:
        """Send every other rank its parts of the adapters `ids` that it does not have. 0 stands for no adapter. Raises
        RankLostError if a rank has ended or does not respond."""
        for number in sorted({*ids} - {0} - self._sent):
            adapter = self._find(number)
            self._sent = {sent for sent in self._sent if self._is_used(sent)}
            told = {"id": number, "name": adapter.name, "used": sorted(self._sent)}
            self._team.send(Kind.LORA, json.dumps(told).encode())
            for i in range(len(adapter.layers)):
                self._team.send_each(Kind.LORA_LAYER, partial(self._packed, adapter, i))
            self._sent.add(number)

    def _packed(self, adapter: LoRAAdapter, layer: int, rank: int) -> bytes:
        return pack_layer(self._cuts[rank].layer(adapter, layer))

    def _is_used(self, number: int) -> bool:
        try:
            self._find(number)
        except KeyError:
            return False
        return True


class ReceivedLoRAs:
    """Adapters of a rank other than 0, as rank 0 sends them."""

    def __init__(self, model: DecoderFacts) -> None:
        """Start without adapters. `model` is the rank's part of the model."""
        self._model = cast("TorchFacts", model)
        self._adapters: dict[int, LoRAAdapter] = {}
        self._last = 0

    def get(self, lora_int_id: int) -> LoRAAdapter:
        """Return the rank's part of the adapter with this id. Raises KeyError if rank 0 has not sent it."""
        return self._adapters[lora_int_id]

    def receive(self, message: Message) -> None:
        """Take a LORA or LORA_LAYER message. With the first, adapters that are no longer used are dropped."""
        if message.kind == Kind.LORA:
            told = message.json()
            self._last = told["id"]
            self._adapters = {number: self._adapters[number] for number in told["used"]}
            self._adapters[self._last] = LoRAAdapter(told["name"], self._last, ())
            return
        assert message.kind == Kind.LORA_LAYER
        adapter = self._adapters[self._last]
        layer = _held(self._model, unpack_layer(message.body, self._model.weights.dtype))
        self._adapters[self._last] = replace(adapter, layers=(*adapter.layers, layer))


def pack_layer(layer: Mapping[str, tuple[LoRAPart, ...]]) -> bytes:
    """Return a layer of an adapter, whose matrices are tensors, as bytes: the length of a JSON header, the header, and
    the matrices in its order."""
    shapes = [[name, part.first, part.a.shape, part.b.shape] for name, parts in layer.items() for part in parts]
    head = json.dumps(shapes).encode()
    head = head.ljust(-(-len(head) // 8) * 8)
    matrices = [matrix for parts in layer.values() for part in parts for matrix in (part.a, part.b)]
    return b"".join([_HEAD.pack(len(head)), head, *(_octets(matrix) for matrix in matrices)])


def unpack_layer(body: bytes, dtype: torch.dtype) -> dict[str, tuple[LoRAPart, ...]]:
    """Return the layer that `pack_layer` has made of matrices of `dtype`."""
    (length,) = _HEAD.unpack_from(body)
    data = bytearray(body[_HEAD.size + length :])
    numbers = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    layer: dict[str, tuple[LoRAPart, ...]] = {}
    for name, first, *shapes in json.loads(body[_HEAD.size : _HEAD.size + length]):
        sizes = [rows * columns for rows, columns in shapes]
        a, b, numbers = torch.split(numbers, [*sizes, len(numbers) - sum(sizes)])
        layer[name] = (*layer.get(name, ()), LoRAPart(a.view(shapes[0]), b.view(shapes[1]), first))
    return layer


def _octets(matrix: Tensor) -> bytes:
    return matrix.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _held(model: TorchFacts, layer: Mapping[str, tuple[LoRAPart, ...]]) -> dict[str, tuple[LoRAPart, ...]]:
    """Return the layer with matrices in the memory from which the model's passes or steps read them."""
    return {
        name: tuple(LoRAPart(model.held(part.a), model.held(part.b), part.first) for part in parts)
        for name, parts in layer.items()
    }

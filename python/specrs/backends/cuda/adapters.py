"""LoRA adapters on a CUDA device: slots of fixed size, what passes add for their rows, and which adapter is where.

A pass allocates nothing, waits for nothing and has no shape that depends on data. Rows without an adapter cost launches
whose programs exit immediately.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specrs.backends.cuda.workspace import MLP_ROWS
from specrs.backends.ring import Header
from specrs.kernels.cuda.linear_product import MAX_ROWS, Added
from specrs.kernels.cuda.lora import Slots, adapter_slots, lora_expand, lora_shrink, num_splits, padded_rank
from specrs.models.config import ModelConfig
from specrs.models.inputs import PassInputs
from specrs.models.lora import LoRAAdapter
from specrs.models.lora_loader import Place, places
from specrs.transfer import to_device

FUSED = ("qkv", "gate_up")
"""Projections whose outputs are normed, rotated or activated in the kernel that makes them."""
OF_NETS = {"net": "qkv", "net_o": "o"}
"""Name in `LayerWeights` of a delta net's projection, by the name of its product."""


def projections(c: ModelConfig) -> list[dict[str, list[Place]]]:
    """Return for each layer the modules of each fused projection that adapters may change, in the order of rows."""
    layers: list[dict[str, list[Place]]] = [{} for _ in range(c.num_layers)]
    for place in places(c).values():
        layers[place.layer].setdefault(place.projection, []).append(place)
    return layers


def slots_bytes(c: ModelConfig, max_loras: int, max_rank: int, itemsize: int) -> int:
    """Return the bytes of `max_loras` slots for adapters of a model whose elements have `itemsize` bytes."""
    rank = padded_rank(max_rank)
    numbers = sum(
        rank * (len(modules) * modules[0].inputs + sum(module.outputs for module in modules))
        for layer in projections(c)
        for modules in layer.values()
    )
    return max_loras * numbers * itemsize


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """Slots of a model's adapters, and buffers of one pass at a time."""

    layers: Sequence[Mapping[str, Slots]]
    """For each layer, the slots of its projections, by name in `LayerWeights`."""
    of_row: Tensor
    """[R + 1] int32, slot of each state row; -1: the row has no adapter. The last element is that of all rows of no
    request."""
    rows: Tensor
    """[max_rows] int32, slot of each row of the pass."""
    shrunk: Tensor
    """fp32, flat: `A x` of one projection, as `lora_shrink` leaves it."""
    added: Tensor
    """fp32, flat: what adapters add to one fused projection of up to 64 rows."""

    @classmethod
    def allocate(
        cls,
        c: ModelConfig,
        *,
        max_loras: int,
        max_rank: int,
        max_rows: int,
        max_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AdapterSlots:
        """Return empty slots for `max_loras` adapters of at most `max_rank`, and buffers for passes of at most
        `max_rows` rows of `max_seqs` requests."""
        rank, layers, shrunk, added = padded_rank(max_rank), [], 0, 0
        for modules in projections(c):
            layer = {}
            for name, parts in modules.items():
                k, columns, outputs = parts[0].inputs, len(parts) * rank, tuple(part.outputs for part in parts)
                a = torch.zeros((max_loras, columns, k), dtype=dtype, device=device)
                b = torch.zeros((max_loras, sum(outputs), rank), dtype=dtype, device=device)
                layer[name] = Slots(a, b, outputs)
                wide = min(max_rows, MLP_ROWS) if name in ("gate_up", "down") else max_rows
                shrunk = max(shrunk, columns * max(wide, num_splits(MAX_ROWS, k) * min(max_rows, MAX_ROWS)))
                added = max(added, sum(outputs) * min(max_rows, MAX_ROWS)) if name in FUSED else added
            layers.append(layer)
        return cls(
            layers=layers,
            of_row=torch.full((max_seqs + 1,), -1, dtype=torch.int32, device=device),
            rows=torch.full((max_rows,), -1, dtype=torch.int32, device=device),
            shrunk=torch.zeros(shrunk, dtype=torch.float32, device=device),
            added=torch.zeros(added, dtype=torch.float32, device=device),
        )

    @property
    def num_slots(self) -> int:
        """Number of adapters that have room."""
        return next(len(slots.a) for layer in self.layers for slots in layer.values())

    def load(self, slot: int, adapter: LoRAAdapter) -> None:
        """Enqueue copies of the matrices of `adapter` into `slot`. Modules that it lacks get zeros."""
        for layer, found in zip(self.layers, adapter.layers, strict=True):
            for name, slots in layer.items():
                a, b = slots.a[slot], slots.b[slot]
                a.zero_()
                b.zero_()
                begins = np.cumsum((0, *slots.parts)).tolist()
                for part in found.get(name, ()):
                    rank, outputs = part.a.shape[0], part.b.shape[0]
                    first = begins.index(part.first) * b.shape[1]
                    a[first : first + rank].copy_(part.a, non_blocking=True)
                    b[part.first : part.first + outputs, :rank].copy_(part.b, non_blocking=True)

    def begin(self, inputs: PassInputs, dependent: bool) -> PassAdapters:
        """Return what adapters add in the pass of `inputs`. Enqueues kernels that find the slot of each row."""
        count = len(inputs.input_ids)
        rows, chunks = self.rows[:count], inputs.chunks
        assert inputs.device_rows is not None, "device_rows=None: adapters need the state row of each request"
        adapter_slots(inputs.positions, inputs.q_start, inputs.device_rows, self.of_row, rows, 0, dependent)
        if chunks is not None:
            # After the others, to which the rows of chunks belong to no request.
            assert chunks.device_rows is not None
            where = [chunks.q_start, chunks.device_rows]
            adapter_slots(inputs.positions, *where, self.of_row, rows, chunks.first, dependent)
        return PassAdapters(self, rows, dependent)


@dataclass(frozen=True, slots=True)
class PassAdapters:
    """LoRA adapters of the rows of a pass, or of some of its rows."""

    slots: AdapterSlots
    rows: Tensor
    """[N] int32, slot of each row; -1: the row has no adapter."""
    dependent: bool

    def layer(self, index: int) -> LayerAdapters:
        """Return what adapters add in layer `index`."""
        return LayerAdapters(self.slots, self.slots.layers[index], self.rows, self.dependent)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """LoRA adapters of one layer, whose products are added to its projections for the rows of a pass."""

    buffers: AdapterSlots
    projections: Mapping[str, Slots]
    rows: Tensor
    """[N] int32, slot of each row; -1: the row has no adapter."""
    dependent: bool

    def narrow(self, first: int, end: int) -> LayerAdapters:
        """Return the adapters of the rows from `first` to before `end`."""
        return LayerAdapters(self.buffers, self.projections, self.rows[first:end], self.dependent)

    def added(self, name: str, x: Tensor, norm: tuple[Tensor, float] | None = None) -> Added | None:
        """Return what adapters add to the outputs of the product `name` for up to 64 rows x, in a buffer. `norm`:
        squares and eps of the projection's `Product`. Returns None if no adapter can change this projection."""
        slots = self._slots(name)
        if slots is None:
            return None
        rows, outputs = len(x), slots.b.shape[1]
        values = self.buffers.added[: rows * outputs].view(rows, outputs)
        lora_expand(self._shrink(slots, x), slots, self.rows, values, self.dependent, norm=norm)
        return Added(values, self.rows)

    def add_(self, name: str, x: Tensor, out: Tensor, multiplier: float = 1.0) -> None:
        """Compute what adapters add to the outputs of the product `name` for the rows x. Add it, times `multiplier`, to
        `out`. Mutates `out`."""
        slots = self._slots(name)
        if slots is None:
            return
        y = self._shrink(slots, x)
        lora_expand(y, slots, self.rows, out, self.dependent, accumulate=True, multiplier=multiplier)

    def _slots(self, name: str) -> Slots | None:
        return self.projections.get(OF_NETS.get(name, name))

    def _shrink(self, slots: Slots, x: Tensor) -> Tensor:
        shape = num_splits(*x.shape), len(x), slots.a.shape[1]
        y = self.buffers.shrunk[: shape[0] * shape[1] * shape[2]].view(shape)
        lora_shrink(x, slots.a, self.rows, y, self.dependent)
        return y


class Adapters:
    """Map from each state row to its adapter, and from each adapter to its slot. Updated on the host, from
    records."""

    def __init__(self, slots: AdapterSlots, find: Callable[[int], LoRAAdapter]) -> None:
        """Start without adapters. `find` returns the adapter of an id that some running request has."""
        self.slots = slots
        self._find = find
        self._ids = np.zeros(len(slots.of_row), dtype=np.int64)
        self._slot_of: OrderedDict[int, int] = OrderedDict()
        self._of_row = np.full(len(slots.of_row), -1, dtype=np.int32)

    def begin_step(self, views: Mapping[str, Tensor], header: Header) -> bool:
        """Bring the adapters of the step's sequences into slots, and tell the device which rows have which. Return
        whether some sequence has an adapter.

        `views` are the record's sections in host memory. An adapter that no sequence of the step has may lose its slot;
        it is copied again when one has. Copies are enqueued, so steps in flight keep the adapters that they began with.
        """
        admitted, sequences = slice(0, header.num_admitted), slice(0, header.num_decode + header.num_prefill)
        self._ids[views["admit_row"][admitted].numpy()] = views["admit_lora"][admitted].numpy()
        needed = [number for number in np.unique(self._ids[views["seq_row"][sequences].numpy()]).tolist() if number]
        for number in needed:
            if number in self._slot_of:
                self._slot_of.move_to_end(number)
        for number in needed:
            if number not in self._slot_of:
                self._slot_of[number] = slot = self._free(needed)
                self.slots.load(slot, self._find(number))
        of_row = np.array([self._slot_of.get(number, -1) for number in self._ids.tolist()], dtype=np.int32)
        if (of_row != self._of_row).any():
            self._of_row = of_row
            self.slots.of_row.copy_(to_device(torch.from_numpy(of_row.copy()), self.slots.of_row.device))
        return bool(needed)

    @contextlib.contextmanager
    def in_all_rows(self) -> Iterator[None]:
        """Let rows of no request have the adapter of slot 0 in the context, so that replays without requests compute
        what an adapter adds."""
        self.slots.of_row[-1] = 0
        try:
            yield
        finally:
            self.slots.of_row[-1] = -1

    def _free(self, needed: Sequence[int]) -> int:
        """Return a slot without an adapter. If there is none, take the slot of the adapter that was used longest ago.
        The adapters that are `needed` in this step must already be marked as used."""
        if len(self._slot_of) < self.slots.num_slots:
            return len(self._slot_of)
        oldest, slot = self._slot_of.popitem(last=False)
        assert oldest not in needed, f"a step has {len(needed)} adapters, and there are {self.slots.num_slots} slots"
        return slot

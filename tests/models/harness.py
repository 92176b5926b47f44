"""Feeds a model by hand: chunks, decode rows, verification rows over scattered blocks. Holds no tests."""

from dataclasses import dataclass, field
from typing import Any

import torch
from specrs.models.inputs import PassInputs
from specrs.models.lora import AdapterRows, LoRAAdapter
from torch import Tensor

from models.native_passes import over_tensors


@dataclass
class Feeder:
    """Requests on one KV cache, in which every block begins as NaN, scratch too."""

    model: Any
    """The model: a torch model or a native one."""
    num_requests: int = 1
    block_size: int = 16
    max_len: int = 128
    seed: int = 0
    hidden_layers: tuple[int, ...] = ()
    entries: Tensor | None = None
    """Hidden states that the last pass read at the entries of the layers `hidden_layers`."""
    adapters: dict[int, LoRAAdapter] = field(default_factory=dict)
    """Adapters by request; requests without one are left out."""
    cache: Any = field(init=False)
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        width = -(-self.max_len // self.block_size)
        blocks = self.num_requests * width + 2
        self.cache = self.model.allocate_cache(blocks, self.block_size)
        self.model = over_tensors(self.model)
        for layer in self.cache.layers:
            layer[...] = torch.nan
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(self.seed))
        self.table = order[: self.num_requests * width].view(self.num_requests, width)

    @torch.inference_mode()
    def feed(
        self,
        rows: dict[int, list[tuple[int, int]]],
        *,
        no_slot: frozenset[tuple[int, int]] = frozenset(),
        prompts: bool = False,
        snapshots: tuple[tuple[int, int, int], ...] = (),
    ) -> Tensor:
        """Run one pass over {request: [(token, position), ...]}. Return logits `[N, vocab]` in that order. With
        `prompts` all rows are rows of prompts. For native models whose layers have states, `rows` must have the first
        requests in order, and there are no `snapshots`: ValueError otherwise.

        Position -1 masks a row; (request, position) in `no_slot` writes nothing. `snapshots` has request, length and
        slot of snapshots of states.
        """
        ids, positions, slots, starts = [], [], [], [0]
        for b, fed in rows.items():
            for token, position in fed:
                block = int(self.table[b, max(position, 0) // self.block_size])
                slot = block * self.block_size + position % self.block_size
                ids.append(token)
                positions.append(position)
                slots.append(-1 if position < 0 or (b, position) in no_slot else slot)
            starts.append(len(ids))
        inputs = PassInputs(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            q_start=torch.tensor(starts),
            block_table=self.table[list(rows)],
            max_q_len=max(map(len, rows.values())),
            max_context=self.max_len,
            prompts=prompts,
            state_rows=tuple(rows),
            device_rows=torch.tensor(list(rows)),
            snapshots=snapshots,
            adapters=self._adapter_rows(list(rows), starts),
        )
        hidden, self.entries = self.model.forward(inputs, self.cache, self.hidden_layers)
        return self.model.compute_logits(hidden)

    def _adapter_rows(self, requests: list[int], starts: list[int]) -> tuple[AdapterRows, ...]:
        rows: dict[LoRAAdapter, list[int]] = {}
        for i, request in enumerate(requests):
            if request in self.adapters:
                rows.setdefault(self.adapters[request], []).extend(range(starts[i], starts[i + 1]))
        return tuple(AdapterRows(adapter, torch.tensor(own)) for adapter, own in rows.items())

    def feed_chunks(self, ids: list[int], chunks: list[int], request: int = 0) -> Tensor:
        """Feed `ids` from position 0 in chunks of the given lengths. Return logits `[len(ids), vocab]`."""
        assert sum(chunks) == len(ids)
        outputs, start = [], 0
        for length in chunks:
            outputs.append(self.feed({request: [(ids[p], p) for p in range(start, start + length)]}))
            start += length
        return torch.cat(outputs)

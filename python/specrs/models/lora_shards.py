"""The part of a LoRA adapter that a tensor parallel rank holds. Reads no file and sends nothing.

Projections that are split by outputs need all of A, and the rows of B for the rank's outputs. Projections that are
split by inputs need the columns of A for the rank's inputs, and all of B. Their products are parts of the sum over
ranks that the projection ends with. vLLM splits adapters alike unless `fully_sharded_loras` is set; S-LoRA (Sheng et
al. 2023, section 6) splits both matrices of all projections.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specrs.models.config import ModelConfig
from specrs.models.lora import LoRAAdapter, LoRAPart
from specrs.models.lora_loader import places
from specrs.models.registry import common_name
from specrs.models.shards import Cut, Cuts, Shard


class AdapterCuts:
    """Rules for cutting the adapters of a model to the part of one rank."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        """Make the rules of `shard` for the whole model's `config`."""
        cuts, own = Cuts(config, shard), places(shard.of_config(config), experts=True)
        self._cuts = {
            (place.layer, place.projection, place.first): (
                cuts.of(common_name(config.architecture, f"{module}.weight"), (place.outputs, place.inputs)),
                own[module].first,
            )
            for module, place in places(config, experts=True).items()
        }

    def layer(self, adapter: LoRAAdapter, index: int) -> dict[str, tuple[LoRAPart, ...]]:
        """Return the rank's part of layer `index` of an adapter, whose matrices are tensors."""
        return {
            name: tuple(self._part(part, index, name) for part in parts)
            for name, parts in adapter.layers[index].items()
        }

    def _part(self, part: LoRAPart, layer: int, projection: str) -> LoRAPart:
        cut, first = self._cuts[layer, projection, part.first]
        if cut is None:
            return LoRAPart(part.a, part.b, first)
        if len(cut.slices[0]) == 1:
            return LoRAPart(part.a, _cut(part.b, cut), first)
        return LoRAPart(_cut(part.a, cut), part.b, first)


def _cut(matrix: Tensor, cut: Cut) -> Tensor:
    """Return a rank's rows or columns of `matrix` as a contiguous copy."""
    return torch.cat([matrix[place] for place in cut.slices], cut.axis)

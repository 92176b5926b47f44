"""Models of an engine as one value: the target, and its drafter. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from specrs.drafters.base import LoadedDrafter
from specrs.models.base import Model
from specrs.models.decoder_weights import DecoderFacts


@dataclass(frozen=True, slots=True)
class Weights:
    """Loaded models of an engine: the target and its drafter. They are never changed, so several engines may share
    them."""

    target: Model
    drafter: LoadedDrafter | None = None
    """The drafter, if it has a model."""

    @property
    def models(self) -> list[Any]:
        """The target, and the draft model or head that drafts for it."""
        return [self.target, *([] if self.drafter is None else [self.drafter.model])]

    @property
    def decoder(self) -> DecoderFacts:
        """The target as a `TorchDecoder` or `NativeDecoder` decoder, which EAGLE-3 heads and LoRA adapters need.

        Loading rejects heads and adapters for a target that runs through transformers' modules, so such a target does
        not get here.
        """
        return cast("DecoderFacts", self.target)

    @property
    def device(self) -> str:
        """Device that holds the models: `cpu`, or `cuda:N`."""
        return self.target.device_name

"""Reads and checks the architecture's fields of a GGUF file. Remembers which were read, so that none is ignored."""

from __future__ import annotations

from typing import Any

import numpy as np

from specrs.errors import CheckpointError, UnsupportedModelError, short
from specrs.models.gguf.file import GGUFFile
from specrs.models.values import number, size

NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0, 3),  # none, last token
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
}
"""Fields that are not read, with the values at which they have no effect. Other values are an error."""
WITHOUT_EFFECT = frozenset(
    {
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
        "tensor_data_layout",
    }
)
"""Fields that may be ignored if no other code reads them: parameters of a RoPE scaling that the file does not use, and
notes."""


class Fields:
    """Fields of the file whose names begin with `prefix`, the architecture. Names are given without it."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file, self.prefix = file, prefix
        self._read: set[str] = set()

    def __contains__(self, field: str) -> bool:
        return f"{self.prefix}.{field}" in self.file.metadata

    def raw(self, field: str, default: Any = None) -> Any:
        """Return the value as the file has it; `default` if the field is missing."""
        self._read.add(field)
        return self.file.metadata.get(f"{self.prefix}.{field}", default)

    def get(self, field: str, default: Any = None) -> Any:
        """Return the value; for a list its first element; `default` if the field is missing. Raises
        UnsupportedModelError if the elements of a list differ."""
        value = self.raw(field, default)
        if isinstance(value, list):
            if not value or any(other != value[0] for other in value):
                raise self.unsupported(field, "the same in every layer")
            return value[0]
        return value

    def size(self, field: str, default: int | None = None) -> int:
        """Return an integer of at least 1; `default` if the field is missing. Raises CheckpointError for another value,
        and for a missing field without a default."""
        name = f"{self.prefix}.{field}"
        return size({name: self._required(field) if default is None else self.get(field, default)}, name)

    def sizes(self, field: str, layers: int) -> list[int]:
        """Return an integer of at least 1 for each of `layers` layers. The file has one for all, or a list of them.
        Raises CheckpointError for another value."""
        value = self.raw(field)
        if not isinstance(value, list):
            return [self.size(field)] * layers
        if len(value) != layers or any(type(size) is not int or size < 1 for size in value):
            raise self.unsupported(field, f"a number above 0, or one for each of {layers} layers")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Return a finite number above 0; `default` if the field is missing. It is the shortest decimal that the stored
        float32 stands for, which config.json would have.

        Raises CheckpointError for another value, and for a missing field without a default.
        """
        name = f"{self.prefix}.{field}"
        value = number({name: self._required(field) if default is None else self.get(field, default)}, name)
        return float(str(np.float32(value)))

    def check_equal(self, field: str, expected: object) -> None:
        """Raise UnsupportedModelError if the field is there and not `expected`."""
        if self.get(field, expected) != expected:
            raise self.unsupported(field, str(expected))

    def check_all_read(self) -> None:
        """Raise UnsupportedModelError for a field that was not read and may have an effect."""
        for name, value in self.file.metadata.items():
            field = name.removeprefix(f"{self.prefix}.")
            if field == name or field in self._read or field in WITHOUT_EFFECT:
                continue
            if field not in NEUTRAL:
                raise self.unsupported(field, "a file without it")
            if value not in NEUTRAL[field]:
                raise self.unsupported(field, " or ".join(map(str, NEUTRAL[field])))

    def unsupported(self, field: str, allowed: str) -> UnsupportedModelError:
        """Return, and do not raise, the exception for a value that is not implemented."""
        value = short(self.file.metadata.get(f"{self.prefix}.{field}"))
        reason = f"{self.file.path}: {self.prefix}.{field}={value}: not implemented; allowed: {allowed}"
        return UnsupportedModelError(reason)

    def _required(self, field: str) -> Any:
        if field not in self:
            raise CheckpointError(f"{self.file.path}: {self.prefix}.{field} is missing, a model must have it")
        return self.get(field)

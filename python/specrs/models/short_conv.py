"""Sizes of gated short convolutions, which have a state in the place of keys and values, and the parser of LFM2's
fields. Computes no layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs.models.errors import malformed, unsupported
from specrs.models.values import MAX_SIZE, flag, number, size

CONV, FULL = "conv", "full_attention"


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Sizes of the layers with a gated short convolution (transformers' `models/lfm2`).

    The input projection has outputs B, C and x, one of each for every channel. The layer's output is the output
    projection of `C * (causal convolution of B * x)`. The state is `B * x` at the last `kernel - 1` positions.
    """

    channels: int
    """Number of channels, each with a filter of its own: `hidden_size`, or a tensor parallel rank's part of it."""
    kernel: int
    """Number of positions that the convolution reads, including the row's own."""
    layers: tuple[bool, ...]
    """For each layer, True if it has a convolution; False: it has attention."""

    @property
    def inner(self) -> int:
        """Number of inputs of the output projection."""
        return self.channels

    @property
    def outputs(self) -> int:
        """Number of outputs of the input projection: B, C and x."""
        return 3 * self.channels

    @property
    def num_small(self) -> int:
        """Number of weights of a layer besides those of its projections."""
        return self.kernel * self.channels

    @property
    def row_bytes(self) -> int:
        """Bytes that a running request keeps in float32: of each layer the convolution's earlier inputs."""
        return 4 * (self.kernel - 1) * self.channels * sum(self.layers)

    @property
    def draft_bytes(self) -> int:
        """Bytes that a running request keeps for each draft: of each layer the convolution's inputs."""
        return 4 * self.channels * sum(self.layers)


def parse_short_conv(raw: Mapping[str, Any], num_layers: int, hidden: int) -> ShortConv | None:
    """Return the short convolutions that config.json describes. None: all layers have attention.

    Raises UnsupportedModelError and CheckpointError, which name field and value.
    """
    kinds, kernel = _kinds(raw, num_layers), size(raw, "conv_L_cache", 3)
    if kernel < 2:
        raise unsupported("conv_L_cache", kernel, "at least 2")
    if CONV not in kinds:
        return None
    return ShortConv(hidden, kernel, tuple(kind == CONV for kind in kinds))


def _kinds(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return the kind of each layer, from `layer_types` or else from `full_attn_idxs`. Without both all layers have
    attention."""
    field = "full_attn_idxs" if raw.get("layer_types") is None else "layer_types"
    kinds = raw.get(field)
    if kinds is None:
        return [FULL] * num_layers
    if field == "full_attn_idxs":
        if not isinstance(kinds, list) or any(type(i) is not int for i in kinds):
            raise malformed(field, kinds, "a list of layers")
        made = [FULL if i in kinds else CONV for i in range(num_layers)]
    else:
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (CONV, FULL) for kind in kinds):
            raise unsupported(field, kinds, f"{CONV!r} or {FULL!r} in every one of {num_layers} layers")
        made = kinds
    if FULL not in made:
        raise unsupported(field, kinds, "full attention in at least one layer")
    return made


def parse_intermediate_size(raw: Mapping[str, Any]) -> int:
    """Return the number of features between gate, up and down. The file has it before an adjustment: two thirds of
    `block_ff_dim` or `intermediate_size`, times a factor, rounded up to a multiple.

    Raises CheckpointError, which names field and value.
    """
    field = "block_ff_dim" if "block_ff_dim" in raw else "intermediate_size"
    given = size(raw, field)
    factor, multiple = number(raw, "block_ffn_dim_multiplier", 1.0), size(raw, "block_multiple_of", 256)
    if not flag(raw, "block_auto_adjust_ff_dim", default=True):
        return given
    # In floats, as transformers computes it.
    thirds = int(2 * given / 3)
    if thirds == 0:
        raise malformed(field, given, "at least 2, because the MLP has two thirds of it")
    if not 1 <= factor * thirds <= MAX_SIZE:
        allowed = f"a number whose product with two thirds of {field}={given} is from 1 to {MAX_SIZE}"
        raise malformed("block_ffn_dim_multiplier", raw["block_ffn_dim_multiplier"], allowed)
    adjusted = -(-int(factor * thirds) // multiple) * multiple
    if adjusted > MAX_SIZE:
        allowed = f"a number to whose multiple {int(factor * thirds)} is rounded up, at most {MAX_SIZE}"
        raise malformed("block_multiple_of", multiple, allowed)
    return adjusted

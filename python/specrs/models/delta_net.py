"""Sizes of gated delta nets, which have a state in the place of keys and values, and the parser of their fields.
Computes no layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs.models.errors import malformed, unsupported
from specrs.models.values import size

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of the layers with a gated delta net (Yang et al. 2025, eq. 10).

    Each value head has a state `[key_dim, value_dim]`. `value_heads / key_heads` value heads in a row share a key head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    """Number of features of a key head, and of a query head."""
    value_dim: int
    """Number of features of a value head."""
    kernel: int
    """Number of positions that the convolution reads, including the row's own."""
    layers: tuple[bool, ...]
    """For each layer, True if it has a delta net; False: it has attention."""
    turned: bool = False
    """True if the output projection reads the first value head of every key head, then the second of every key head,
    and so on, as in GGUF files. False: it reads all value heads of the first key head first."""
    by_key_head: bool = False
    """True if outputs of the input projections lie by key head: q, k, v and z of each, then b and a of each. False:
    they are q, k, v, z, b and a of all heads."""

    @property
    def conv_dim(self) -> int:
        """Number of features of q, k and v together, which the convolution mixes."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        """Number of features of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def outputs(self) -> int:
        """Number of outputs of the layer's input projection: q, k, v and z features, and b and a of each value head."""
        return self.conv_dim + self.inner + 2 * self.value_heads

    @property
    def num_small(self) -> int:
        """Number of weights of a layer besides those of its projections."""
        return self.kernel * self.conv_dim + 2 * self.value_heads + self.value_dim

    @property
    def row_bytes(self) -> int:
        """Bytes that a running request keeps in float32: of each layer all heads' states and the convolution's earlier
        inputs."""
        state = self.inner * self.key_dim + (self.kernel - 1) * self.conv_dim
        return 4 * state * sum(self.layers)

    @property
    def draft_bytes(self) -> int:
        """Bytes that a running request keeps for each draft: of each layer the inputs of the convolution and an update
        of rank 1 for each head."""
        update = self.conv_dim + self.key_heads * self.key_dim + self.inner + self.value_heads
        return 4 * update * sum(self.layers)


def parse_delta_net(raw: Mapping[str, Any], num_layers: int, *, by_key_head: bool = False) -> DeltaNet:
    """Return the delta nets that config.json describes. `by_key_head` is the layout, as in `DeltaNet`.

    Raises UnsupportedModelError and CheckpointError, which name field and value.
    """
    kinds = raw.get("layer_types")
    every = size(raw, "full_attention_interval", 4)
    if kinds is None:
        kinds = [FULL if (i + 1) % every == 0 else LINEAR for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (LINEAR, FULL) for kind in kinds):
        allowed = f"{LINEAR!r} or {FULL!r} in every one of {num_layers} layers"
        raise unsupported("layer_types", kinds, allowed)
    if FULL not in kinds:
        raise unsupported("layer_types", kinds, f"{FULL!r} in at least one layer")
    made = DeltaNet(
        key_heads=size(raw, "linear_num_key_heads", 16),
        value_heads=size(raw, "linear_num_value_heads", 32),
        key_dim=size(raw, "linear_key_head_dim", 128),
        value_dim=size(raw, "linear_value_head_dim", 128),
        kernel=size(raw, "linear_conv_kernel_dim", 4),
        layers=tuple(kind == LINEAR for kind in kinds),
        by_key_head=by_key_head,
    )
    if made.value_heads % made.key_heads:
        allowed = f"a multiple of linear_num_key_heads={made.key_heads}"
        raise malformed("linear_num_value_heads", made.value_heads, allowed)
    if made.kernel < 2:
        raise unsupported("linear_conv_kernel_dim", made.kernel, "at least 2")
    return made

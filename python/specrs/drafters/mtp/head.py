"""Forward pass of an MTP head in torch. Chooses no tokens and keeps no state.

For position i, one decoder layer reads the embedding of the token at i + 1 and the target's hidden state of i after the
final norm. While drafting, it reads its own state, after its own final norm, instead of the target's. It returns logits
for position i + 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specrs.drafters.mtp.weights import MtpFacts, MtpWeights
from specrs.kernels.linear import Weight
from specrs.kernels.rms_norm import rms_norm
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_weights import TorchHeld, TorchWeights
from specrs.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class TorchMtpWeights(MtpWeights[Tensor, Weight, torch.dtype]):
    """Weights of a head on one device, or one rank's part of them."""

    decoder: TorchWeights

    @property
    def device(self) -> torch.device:
        """Device that holds the weights."""
        return self.decoder.device


class MtpHead(TorchHeld, MtpFacts):
    """An MTP head on a CPU, computed by torch. Read-only, so it may serve several caches at once."""

    weights: TorchMtpWeights

    def __init__(self, weights: TorchMtpWeights, ranks: Ranks | None = None) -> None:
        """Use `weights`. `ranks` are the tensor parallel ranks that compute the head together, each with its part;
        None: this process computes the whole head."""
        self.weights, self.ranks = weights, ranks
        self._layer = TorchDecoder(weights.decoder, ranks=ranks)

    @property
    def target_ids(self) -> Tensor:
        """For each of the head's own ids, the target's id, `[Vd]` int64, ascending."""
        return self.weights.target_ids

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate K and V for `num_blocks` blocks of `block_size` positions on the head's device."""
        return self._layer.allocate_cache(num_blocks, block_size)

    def fuse(self, entries: Tensor) -> Tensor:
        """Return the target's hidden states `[N, 1, H]` as `forward` reads them, `[N, H]`."""
        return entries[:, 0].to(self.weights.dtype)

    def forward(
        self, inputs: PassInputs, hidden: Tensor, kv_cache: KVCache, k_start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed N rows and return (recurrent, final), each `[N, H]`. Writes K and V of every row with a slot, and
        nothing else.

        `inputs.input_ids` are the tokens after the rows' positions: t_{i+1} at position i. `hidden` `[N, H]` is `fuse`
        of the target's states there, or `recurrent` of the previous pass. `final` is the input of `compute_logits`.
        Rows attend to positions from `k_start` `[B]` on; None: from 0.
        """
        w = self.weights
        eps = w.config.rms_norm_eps
        token = rms_norm(self._layer.embed(inputs.input_ids), w.embedding_norm, eps)
        x = w.fc.product(torch.cat((token, rms_norm(hidden, w.hidden_norm, eps)), dim=1))
        final = self._layer.forward_from(x, replace(inputs, k_start=k_start), kv_cache).final
        return final, final

    def compute_logits(self, final: Tensor) -> Tensor:
        """Return logits over the head's own ids, `[N, Vd]`: fp32, or float64 for float64 heads."""
        return self._layer.compute_logits(final)

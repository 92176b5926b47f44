"""Forward pass of an MTP head on a CUDA device: its layer is a `CudaDecoder` of one layer.

A pass allocates nothing, waits for nothing and has no shape that depends on data. torch's `MtpHead` is the reference.
Kernels are not launched dependently, because there are copies between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.head_inputs import join_normed
from specrs.backends.cuda.products import product
from specrs.backends.cuda.workspace import Workspace
from specrs.drafters.mtp.head import MtpHead
from specrs.kernels.cuda.configs import LinearShape
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class MtpBuffers:
    """Persistent buffers of a head's passes, in addition to the workspace of its layer."""

    token: Tensor
    """[max_rows, H], embeddings of tokens."""
    both: Tensor
    """[max_rows, 2 * H], input of `fc`: the token's part, then the state's."""


class CudaMtpHead:
    """An MTP head on a GPU with its buffers. On a CPU, Triton's interpreter can run it."""

    def __init__(self, head: MtpHead, *, max_rows: int, max_seqs: int) -> None:
        """Allocate buffers for passes of at most `max_rows` rows, and argmaxes of at most 17 rows for each of
        `max_seqs` requests. The tensor parallel ranks of `head`, if it has some, compute it together.

        Raises:
            UnsupportedModelError: the kernels do not serve the head's layer.
        """
        self.weights = head.weights
        # Its logits are those of the drafted ids alone.
        config = replace(self.weights.config, vocab_size=head.vocab_size)
        h, dtype, device = config.hidden_size, self.weights.dtype, self.weights.device
        weights = replace(self.weights.decoder, config=config)
        decoder = CudaDecoder.allocate(weights, max_rows, max_seqs, ranks=head.ranks)
        workspace = decoder.workspace.with_product("fc", LinearShape(h, 2 * h, dtype))
        self.decoder = replace(decoder, workspace=replace(workspace, dependent=False))
        self.buffers = MtpBuffers(
            token=torch.zeros((max_rows, h), dtype=dtype, device=device),
            both=torch.zeros((max_rows, 2 * h), dtype=dtype, device=device),
        )

    @property
    def workspace(self) -> Workspace:
        """Buffers of the head's layer."""
        return self.decoder.workspace

    def fuse(self, entries: Tensor) -> Tensor:
        """Return the target's final states `[N, 1, H]` or `[N, H]`, contiguous, as `forward` reads them: a view `[N,
        H]`."""
        return entries.view(entries.shape[0], -1)

    def forward(
        self, inputs: PassInputs, hidden: Tensor, kv_cache: KVCache, k_start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed N tokens with their states `hidden` `[N, H]`. Return the states for the next pass, and final states for
        the logits, which are the same.

        Writes K and V into `kv_cache`. The results are views of the workspace; `hidden` must not be one. Rows attend to
        positions from `k_start` `[B]` on; None: from 0.
        """
        w, ws, b, rows = self.weights, self.workspace, self.buffers, inputs.input_ids.shape[0]
        token, both, x = b.token[:rows], b.both[:rows], ws.hidden[:rows]
        self.decoder.embed(inputs, token)
        norms = (token, w.embedding_norm), (hidden, w.hidden_norm)
        join_normed(*norms, w.config.rms_norm_eps, ws.normed[:rows], both)
        product(ws, "fc", both, w.fc, x)
        final = self.decoder.forward_from(x, replace(inputs, k_start=k_start), kv_cache).final
        return final, final

    def compute_logits(self, final: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of final states, `[N, Vd]` fp32. With `out` `[N, Vd]`, write them into it."""
        return self.decoder.compute_logits(final, out)

    def compute_argmax(self, final: Tensor, ids: Tensor, top: Tensor) -> None:
        """Write the most probable of the head's own ids of each row into `ids` `[N]` int64, and its logit into `top`
        `[N]` fp32. The lowest id wins a tie."""
        self.decoder.compute_argmax(final, ids, top)

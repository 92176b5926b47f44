"""Forward pass of an EAGLE-3 head on a CUDA device, with the kernels and buffers of `decoder`.

A pass allocates nothing, waits for nothing and has no shape that depends on data. torch's `Eagle3Head` is the
reference. Kernels are not launched dependently, because there are copies between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specrs.backends.cuda.attention import Attention
from specrs.backends.cuda.decoder import check_head_dim
from specrs.backends.cuda.head_inputs import join_normed
from specrs.backends.cuda.parts import EmbeddingParts, LogitsParts
from specrs.backends.cuda.products import product, stored, write_argmax, write_logits
from specrs.backends.cuda.stream import stream_of
from specrs.backends.cuda.workspace import Workspace, linear_shapes, logits_rows
from specrs.drafters.eagle3.head import Eagle3Head, Eagle3Weights
from specrs.kernels.cuda.attention_config import MAX_VERIFY_ROWS
from specrs.kernels.cuda.configs import LinearShape
from specrs.kernels.cuda.embedding import embed
from specrs.kernels.cuda.linear_product import MAX_ROWS
from specrs.kernels.cuda.rms_norm import rms_norm
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class HeadBuffers:
    """Persistent buffers of a head's passes, in addition to its workspace."""

    fused: Tensor
    """[max_rows, H], the target's hidden states projected to the head's width, output of `fuse`."""
    token: Tensor
    """[max_rows, H], embeddings of tokens."""
    both: Tensor
    """[max_rows, 2 * H], input of the layer's qkv product: the token's part, then the state's."""
    entry: Tensor
    """[max_rows, target's hidden], the target's hidden states of one layer, copied before they are normed. Empty unless
    each layer's states have a norm of their own (`fc_norm` without `norm_before_fc`)."""
    entry_normed: Tensor
    """[max_rows, target's hidden], `entry` after its norm. Empty unless each layer's states have a norm of their own
    (`fc_norm` without `norm_before_fc`)."""
    entries: Tensor
    """[max_rows, L * target's hidden], hidden states of all L layers after their norms. Empty if the checkpoint has no
    norm before `fc`."""


class CudaEagle3Head(Eagle3Head):
    """An EAGLE-3 head on a GPU with its buffers. On a CPU, Triton's interpreter can run it."""

    def __init__(self, weights: Eagle3Weights, *, max_rows: int, max_seqs: int, ranks: Ranks | None = None) -> None:
        """Allocate buffers for passes of at most `max_rows` rows, and argmaxes of at most 17 rows for each of
        `max_seqs` requests.

        `ranks` are the tensor parallel ranks that share the head. None: there is one rank.

        Raises:
            UnsupportedModelError: the kernels are not compiled for the head's number of features per attention head.
        """
        super().__init__(weights, ranks)
        config, dtype, device = weights.config, weights.dtype, weights.device
        c = replace(config.layer, vocab_size=config.draft_vocab_size)
        check_head_dim(c.head_dim, device)
        h, states = c.hidden_size, len(config.aux_layer_ids) * config.target_hidden_size
        shapes = linear_shapes(c, dtype, device)
        shapes["qkv"] = LinearShape(shapes["qkv"].sides * shapes["qkv"].n, 2 * h, dtype)
        shapes["fc"] = LinearShape(h, states, dtype)
        self.workspace = Workspace.allocate(
            c,
            max_rows=max_rows,
            max_seqs=max_seqs,
            dtype=dtype,
            device=device,
            dependent=False,
            shapes={name: [shape] for name, shape in shapes.items()},
        )
        self.embedding_parts: EmbeddingParts | None = None
        self.logits_parts: LogitsParts | None = None
        if ranks is not None:
            ranks.exchanges.reserve(min(max_rows, MAX_ROWS), h, dtype)
            self.embedding_parts = EmbeddingParts.allocate(ranks, weights.embedding, max_rows)
            most = max_seqs * MAX_VERIFY_ROWS
            self.logits_parts = LogitsParts.allocate(
                ranks, stored(weights.lm_head), self.vocab_size, logits_rows(max_seqs), most
            )

        def buffer(rows: int, width: int) -> Tensor:
            return torch.zeros((rows, width), dtype=dtype, device=device)

        each = max_rows if config.fc_norm and not config.norm_before_fc else 0
        self.buffers = HeadBuffers(
            fused=buffer(max_rows, h),
            token=buffer(max_rows, h),
            both=buffer(max_rows, 2 * h),
            entry=buffer(each, config.target_hidden_size),
            entry_normed=buffer(each, config.target_hidden_size),
            entries=buffer(max_rows if weights.fc_norm is not None else 0, states),
        )

    def fuse(self, entries: Tensor) -> Tensor:
        """Return the head's input `[N, H]` for the target's hidden states, a view of the buffers.

        `entries` is `[N, L, target's hidden]` or `[N, L * target's hidden]`, contiguous, of the head's dtype.
        """
        w, b, rows = self.weights, self.buffers, entries.shape[0]
        eps, size = w.config.layer.rms_norm_eps, w.config.target_hidden_size
        states = entries.view(rows, -1)
        if w.fc_norm is not None:
            normed = b.entries[:rows]
            if w.fc_norm.dim() == 1:
                rms_norm(states, None, w.fc_norm, normed, eps, False)
            else:
                for at, weight in enumerate(w.fc_norm.unbind(0)):
                    columns = slice(at * size, (at + 1) * size)
                    b.entry[:rows].copy_(states[:, columns])
                    rms_norm(b.entry[:rows], None, weight, b.entry_normed[:rows], eps, False)
                    normed[:, columns].copy_(b.entry_normed[:rows])
            states = normed
        fused = b.fused[:rows]
        product(self.workspace, "fc", states, w.fc, fused)
        return fused

    def forward(
        self, inputs: PassInputs, hidden: Tensor, kv_cache: KVCache, k_start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed N tokens with their states `hidden` `[N, H]`. Return the states for the next pass, and final states for
        the logits.

        Writes K and V into `kv_cache`. Both results are views of the workspace; `hidden` must not be one.
        """
        w, ws, b, rows = self.weights, self.workspace, self.buffers, inputs.input_ids.shape[0]
        layer, config = w.layer, w.config
        eps = config.layer.rms_norm_eps
        token, both, residual, normed = b.token[:rows], b.both[:rows], ws.hidden[:rows], ws.normed[:rows]
        angles = [ws.cos[:, :rows], ws.sin[:, :rows]]
        tables = [w.embedding, w.rotary.view(1, -1), None, None]

        def write(ids: Tensor, out: Tensor) -> None:
            embed(ids, inputs.positions, tables, out, angles, [], False)

        if self.embedding_parts is None:
            write(inputs.input_ids, token)
        else:
            self.embedding_parts.embed(inputs.input_ids, token, write)
        join_normed((token, layer.input_norm), (hidden, w.hidden_norm), eps, normed, both)
        residual.copy_(normed if config.norm_before_residual else hidden)
        qkv, attended = ws.qkv[:rows], ws.attended[:rows]
        product(ws, "qkv", both, layer.qkv, qkv)
        attend = Attention.of(config.layer, w.dtype, inputs, ws, k_start)
        attend.apply_rope(layer, qkv, kv_cache.layers[0])
        attend(layer, qkv, kv_cache.layers[0], attended)
        stream = stream_of(residual, inputs.positions, ws, config.layer, self.ranks)
        stream.add_product("o", attended, layer.o, layer.post_attention_norm)
        stream.add_mlp(layer, None)
        final = stream.normed(w.final_norm)
        return (final if config.norm_output else residual), final

    def compute_logits(self, final: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of final states, `[N, Vd]` fp32. With `out` `[N, Vd]`, write them into it."""
        if out is None:
            out = torch.empty((final.shape[0], self.vocab_size), dtype=torch.float32, device=final.device)
        weight = stored(self.weights.lm_head)
        if self.logits_parts is None:
            write_logits(final, weight, out, self.workspace)
        else:
            self.logits_parts.write_logits(final, out, lambda x, part: write_logits(x, weight, part, self.workspace))
        return out

    def compute_argmax(self, final: Tensor, ids: Tensor, top: Tensor) -> None:
        """Write the most probable of the head's own ids of each row into `ids` `[N]` int64, and its logit into `top`
        `[N]` fp32. The lowest id wins a tie."""
        weight = stored(self.weights.lm_head)
        if self.logits_parts is None:
            write_argmax(final, weight, (ids, top), self.workspace)
        else:
            self.logits_parts.write_argmax(
                ids, top, None, lambda held, best: write_argmax(final, weight[:held], best, self.workspace)
            )

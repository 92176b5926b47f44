"""Forward pass of a Gemma 4 assistant on a CUDA device: its layers are a `CudaDecoder` that attends the target's KV.

A pass allocates nothing, waits for nothing and has no shape that depends on data. Kernels are not launched dependently,
because there are copies between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.products import product
from specrs.backends.cuda.workspace import Workspace
from specrs.drafters.assistant.torch_loader import TorchAssistant
from specrs.kernels.cuda.configs import LinearShape
from specrs.models.config import ModelConfig
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AssistantBuffers:
    """Persistent buffers of an assistant's passes, in addition to the workspace of its layers."""

    token: Tensor
    """[max_rows, S], embeddings of tokens; S is the target's hidden size."""
    both: Tensor
    """[max_rows, 2 * S], input of `pre`: the token's embedding, then the state."""
    rotated: Tensor
    """[max_rows] int64, positions as which queries are rotated."""


class CudaAssistant:
    """An assistant on a GPU with its buffers. On a CPU, Triton's interpreter can run it.

    After n tokens, its rows stand at position n - 2, the last one with KV. They are fed the token at n - 1, and queries
    are rotated as at n - 1.
    """

    def __init__(self, assistant: TorchAssistant, *, max_rows: int, max_seqs: int) -> None:
        """Allocate buffers for passes of at most `max_rows` rows, and argmaxes of at most 17 rows for each of
        `max_seqs` requests.

        Raises:
            UnsupportedModelError: the kernels do not serve the assistant's layers.
        """
        self.weights = assistant.weights
        # Its logits are those of the drafted ids alone.
        config = replace(self.weights.config, vocab_size=assistant.vocab_size)
        h, size = config.hidden_size, self.weights.target_hidden_size
        dtype, device = self.weights.dtype, self.weights.device
        decoder = CudaDecoder.allocate(replace(self.weights.decoder, config=config), max_rows, max_seqs)
        workspace = decoder.workspace.with_product("pre", LinearShape(h, 2 * size, dtype))
        workspace = workspace.with_product("post", LinearShape(size, h, dtype))
        self.decoder = replace(decoder, workspace=replace(workspace, dependent=False))
        self.buffers = AssistantBuffers(
            token=torch.zeros((max_rows, size), dtype=dtype, device=device),
            both=torch.zeros((max_rows, 2 * size), dtype=dtype, device=device),
            rotated=torch.zeros(max_rows, dtype=torch.int64, device=device),
        )

    @property
    def workspace(self) -> Workspace:
        """Buffers of the assistant's layers."""
        return self.decoder.workspace

    def cache_of(self, target: ModelConfig, kv_cache: KVCache) -> KVCache:
        """Return the layers of the target's `kv_cache` that the assistant's layers attend, one for each. They are the
        same tensors. `target` is the target's configuration."""
        with_keys = [i for i, sizes in enumerate(target.varied) if sizes.source is None]
        sources = [sizes.source for sizes in self.weights.config.varied]
        return KVCache(
            [kv_cache.layers[with_keys[source]] for source in sources if source is not None], kv_cache.block_size
        )

    def forward(self, inputs: PassInputs, hidden: Tensor, kv_cache: KVCache, left: Tensor) -> Tensor:
        """Feed N tokens with states `hidden` `[N, S]`: the target's, or those that the previous pass left. Return final
        states for the logits `[N, H]`, a view of the workspace.

        Writes the states for the next pass into `left` `[N, S]`, which may be `hidden`, and nothing into `kv_cache`, a
        result of `cache_of`. `inputs.positions` are those of the last positions with KV, and `inputs.input_ids` the
        tokens after them, or drafts. `inputs.slots` are not read.
        """
        w, ws, b, rows = self.weights, self.workspace, self.buffers, inputs.input_ids.shape[0]
        token, both, x, rotated = b.token[:rows], b.both[:rows], ws.hidden[:rows], b.rotated[:rows]
        torch.add(inputs.positions, 1, out=rotated)
        self.decoder.embed(replace(inputs, positions=rotated), token)
        both[:, : token.shape[1]].copy_(token)
        both[:, token.shape[1] :].copy_(hidden)
        product(ws, "pre", both, w.pre, x)
        final = self.decoder.forward_from(x, inputs, kv_cache).final
        product(ws, "post", final, w.post, left)
        return final

    def compute_logits(self, final: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of final states, `[N, Vd]` fp32. With `out` `[N, Vd]`, write them into it."""
        return self.decoder.compute_logits(final, out)

    def compute_argmax(self, final: Tensor, ids: Tensor, top: Tensor) -> None:
        """Write the most probable of the assistant's own ids of each row into `ids` `[N]` int64, and its logit into
        `top` `[N]` fp32. The lowest id wins a tie."""
        self.decoder.compute_argmax(final, ids, top)

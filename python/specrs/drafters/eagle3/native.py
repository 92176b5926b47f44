"""An EAGLE-3 head whose passes run in the Rust core."""

from __future__ import annotations

import numpy as np

from specrs.arrays import FLOAT32, Array
from specrs.core import CpuWeights
from specrs.drafters.eagle3.weights import Eagle3Facts, NativeHeadWeights
from specrs.drafters.native_head import NativeHead
from specrs.models.config import ModelConfig
from specrs.models.native_decoder import model_arrays, stored_parts


class NativeEagle3Head(NativeHead, Eagle3Facts):
    """An EAGLE-3 head that runs without torch. `drafters.eagle3.head.Eagle3Head` is its reference."""

    weights: NativeHeadWeights

    @property
    def _layer(self) -> ModelConfig:
        return self.weights.config.layer

    def fuse(self, entries: Array) -> Array:
        """Return the target's hidden states `[N, L, target's hidden]` float32 projected to the head's width, `[N,
        H]`."""
        out = np.empty((len(entries), self.hidden_size), FLOAT32)
        self.decoder.fuse(np.ascontiguousarray(entries), out)
        return out

    def _borrow(self) -> CpuWeights:
        weights, c = self.weights, self._layer
        return CpuWeights(
            **model_arrays(c, weights.embedding, [weights.layer], weights.final_norm, weights.lm_head),
            frequencies=weights.rotary[c.head_dim // 2 :],
            head={
                "hidden_layers": list(weights.config.aux_layer_ids),
                "fc": stored_parts(weights.fc),
                "fc_norm": None if weights.fc_norm is None else weights.fc_norm.reshape(-1),
                "fc_norm_each": weights.config.fc_norm,
                "hidden_norm": weights.hidden_norm,
                "norm_before_residual": weights.config.norm_before_residual,
                "norm_output": weights.config.norm_output,
                "target_ids": weights.target_ids.tolist(),
            },
        )

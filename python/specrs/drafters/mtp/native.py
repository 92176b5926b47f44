"""An MTP head whose passes run in the Rust core."""

from __future__ import annotations

import numpy as np

from specrs.arrays import Array
from specrs.core import CpuWeights
from specrs.drafters.mtp.weights import MtpFacts, NativeMtpWeights
from specrs.drafters.native_head import NativeHead
from specrs.models.config import ModelConfig
from specrs.models.native_decoder import decoder_arrays, stored_parts


class NativeMtpHead(NativeHead, MtpFacts):
    """An MTP head that runs without torch. `drafters.mtp.head.MtpHead` is its reference."""

    weights: NativeMtpWeights

    @property
    def _layer(self) -> ModelConfig:
        return self.weights.config

    def fuse(self, entries: Array) -> Array:
        """Return the target's hidden states `[N, 1, H]` float32 as `forward` reads them, `[N, H]`."""
        return np.ascontiguousarray(entries[:, 0])

    def _borrow(self) -> CpuWeights:
        weights = self.weights
        return CpuWeights(
            **decoder_arrays(weights.decoder),
            mtp={
                "target_layers": weights.target_layers,
                "fc": stored_parts(weights.fc),
                "embedding_norm": weights.embedding_norm,
                "hidden_norm": weights.hidden_norm,
                "target_ids": weights.target_ids.tolist(),
            },
        )

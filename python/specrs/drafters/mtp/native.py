"""An MTP head whose passes run in the Rust core."""

from __future__ import annotations

from specrs.core import CpuWeights
from specrs.drafters.final_state import NativeFinalStateHead
from specrs.drafters.mtp.weights import MtpFacts, NativeMtpWeights
from specrs.models.native_decoder import decoder_arrays, stored_parts


class NativeMtpHead(NativeFinalStateHead, MtpFacts):
    """An MTP head that runs without torch. `drafters.mtp.head.MtpHead` is its reference."""

    weights: NativeMtpWeights

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

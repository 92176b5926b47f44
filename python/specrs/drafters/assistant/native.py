"""A Gemma 4 assistant whose passes run in the Rust core, on the KV cache of its target."""

from __future__ import annotations

from specrs.core import CpuWeights
from specrs.drafters.assistant.weights import AssistantFacts, NativeAssistantWeights
from specrs.drafters.final_state import NativeFinalStateHead
from specrs.models.native_decoder import decoder_arrays, stored_parts


class NativeAssistant(NativeFinalStateHead, AssistantFacts):
    """An assistant that runs without torch. `forward` reads the target's KV cache, and writes none.

    After n tokens, its rows stand at position n - 2, the last one with KV. They are fed the token at n - 1, and queries
    are rotated as at n - 1.
    """

    weights: NativeAssistantWeights

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Return None: an assistant has no KV cache."""

    def _borrow(self) -> CpuWeights:
        weights = self.weights
        return CpuWeights(
            **decoder_arrays(weights.decoder),
            assistant={
                "target_layers": weights.target_layers,
                "state_size": weights.target_hidden_size,
                "pre": stored_parts(weights.pre),
                "post": stored_parts(weights.post),
                "target_ids": weights.target_ids.tolist(),
            },
        )

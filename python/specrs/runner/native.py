"""The runner of the native pass on a CPU: a launch is one call of `specrs-cpu`. Plans nothing and settles nothing.

A launch in which some request asks for masks, penalties, a grammar or log probabilities goes through the eager runner,
as do all launches with a draft of another tokenizer or a head that reads hidden states: op by op, on the same row state
and KV and with the same passes. Its logits are the same bits, and drawing and verification are the core's either way.
So a request may go from one to the other at any launch, and what its neighbours ask for does not change its text.
"""

from __future__ import annotations

from typing import Any

from specrs.core import CpuDecoder, CpuIteration, CpuKVCache, CpuPool, Scheduler
from specrs.drafters.draft_model import ModelPasses
from specrs.drafters.vocabulary import TranslatedDraftModel
from specrs.models.base import Model
from specrs.models.dense_native import NativeDense, NativeKVCache
from specrs.models.kv_cache import KVCache
from specrs.runner.eager import EagerRunner
from specrs.runner.ring import Header, RingSlot


class NativeRunner(EagerRunner):
    """Runs launches as `EagerRunner` does, without the interpreter where nothing asks for it."""

    def __init__(self, scheduler: Scheduler, pool: CpuPool, *args: Any, **settings: Any) -> None:
        """`args` and `settings` are those of `EagerRunner`; target and draft are `NativeDense` on `pool`, their caches
        of their own making. `scheduler` has the settings of the launches to come."""
        self._scheduler, self._pool = scheduler, pool
        self._iteration: CpuIteration | None = None
        super().__init__(*args, **settings)
        # Drafters that the iteration does not know.
        self._op_by_op = self.hidden is not None or isinstance(self.drafter, TranslatedDraftModel)

    @property
    def rule(self) -> str:
        """`rejection` or `coupled`, for entries that sample."""
        return self._rule

    @rule.setter
    def rule(self, rule: str) -> None:
        self._rule = rule
        self._iteration = None

    def launch(self, slot: RingSlot, header: Header) -> None:
        """See `EagerRunner`."""
        if header.num_admitted:
            self.sampling.remember(slot.views, header.num_admitted)
        entries = slot.record_arrays["entry_row"][: header.num_decode + header.num_prefill]
        if self._op_by_op or not self.sampling.is_bare(entries):
            self._execute(slot, header)
            return
        slot.logprobs.clear()
        slot.prompt_logprobs.clear()
        if self._iteration is None:
            self._iteration = self._make()
        target_passes, draft_passes = self._iteration.run(slot.record, slot.results)
        self.num_target_passes += target_passes
        if draft_passes and self.drafter is not None:
            self.drafter.num_passes += draft_passes

    def close(self) -> None:
        """End the threads; launches fail from then on."""
        self._pool.close()

    def _make(self) -> CpuIteration:
        state, sampling, drafter = self.state, self.sampling, self.drafter
        tensors = {name: getattr(state, name) for name in state.__slots__}
        tensors |= {"seeds": sampling.seeds, "prompt_len": sampling.prompt_len, "params": sampling.params.values}
        return CpuIteration(
            self._scheduler,
            {name: tensor.numpy() for name, tensor in tensors.items()},
            _native(self.target, self.kv_cache),
            _native(drafter.model, drafter.kv_cache) if isinstance(drafter, ModelPasses) else None,
            rule=self._rule,
            rates=None if self.rates is None else self.rates.tolist(),
        )


def _native(model: Model, cache: KVCache) -> tuple[CpuDecoder, CpuKVCache]:
    assert isinstance(model, NativeDense)
    assert isinstance(cache, NativeKVCache)
    return model.decoder, cache.native

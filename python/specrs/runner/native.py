"""The runner of the native pass on a CPU: a launch is one call of `specrs-cpu`. Plans nothing and settles nothing.

Drafts of another tokenizer are not drawn here: `EagerRunner` runs such launches op by op.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.core import CpuDecoder, CpuIteration, CpuKVCache, CpuLora, CpuPool, Scheduler
from specrs.drafters.base import Drafter
from specrs.drafters.draft_model import ModelPasses
from specrs.drafters.hidden import HeadDrafter
from specrs.models.dense_native import NativeDense
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.models.lora import LoRAAdapter
from specrs.models.native_cache import NativeKVCache
from specrs.runner.eager import EagerRunner
from specrs.runner.grammar import LaunchGrammar, LaunchGrammars
from specrs.runner.ring import Header, RingSlot
from specrs.verify.logprobs import TokenLogprobs


class NativeRunner(EagerRunner):
    """Runs launches as `EagerRunner` does, without the interpreter where nothing asks for it."""

    def __init__(self, scheduler: Scheduler, pool: CpuPool, *args: Any, **settings: Any) -> None:
        """`args` and `settings` are those of `EagerRunner`; target and draft are `NativeDense` on `pool`, their caches
        of their own making. `scheduler` has the settings of the launches to come."""
        self._scheduler, self._pool = scheduler, pool
        self._iteration: CpuIteration | None = None
        super().__init__(*args, **settings)

    @property
    def rule(self) -> str:
        """`rejection` or `coupled`, for entries that sample."""
        return self._rule

    @rule.setter
    def rule(self, rule: str) -> None:
        self._rule = rule
        if self._iteration is not None:
            self._iteration.set_rule(rule)

    def launch(self, slot: RingSlot, header: Header) -> None:
        """See `EagerRunner`."""
        if header.num_admitted:
            self.sampling.remember(slot.views, header.num_admitted)
            if self.loras is not None:
                self.loras.admit(slot.views, header.num_admitted)
        if self._iteration is None:
            self._iteration = self._make()
        entries = slot.record_arrays["entry_row"][: header.num_decode + header.num_prefill]
        self.guard.begin(slot)
        slot.logprobs.clear()
        slot.prompt_logprobs.clear()
        if self._behind is not None:
            with torch.inference_mode():
                super()._feed_behind(slot)
        adapters = [] if self.loras is None else self._adapters(self.loras.by_adapter(entries.tolist()))
        grammars = None if self.sampling.is_bare(entries) else self._grammars(entries.tolist(), slot)
        try:
            passes, fault, logprobs, of_prompts = self._iteration.run(slot.record, slot.results, adapters, grammars)
        finally:
            if grammars is not None:
                grammars.finish()
        for entry, found in logprobs:
            slot.logprobs[entry] = TokenLogprobs(*map(torch.from_numpy, found))
        for request_id, position, found in of_prompts:
            slot.prompt_logprobs.append((request_id, position, TokenLogprobs(*map(torch.from_numpy, found))))
        self.num_target_passes += passes[0]
        self._drafted(slot, passes[1], fault)

    def _grammars(self, entries: list[int], slot: RingSlot) -> LaunchGrammars | None:
        """The grammars of the launch's entries; None where no request has one."""
        if not self.sampling.steps(entries).extras:
            return None
        count, width = slot.results_view.tokens.shape
        masks = slot.grammar_masks(0, count, width, LaunchGrammar.words(self.sampling.vocab_size))
        return LaunchGrammars(self.sampling.matcher, masks)

    def _adapters(self, held: list[tuple[LoRAAdapter, list[int]]]) -> list[tuple[CpuLora, list[int]]]:
        assert isinstance(self.target, NativeDense)
        return [(self.target.native_lora(adapter), rows) for adapter, rows in held]

    def close(self) -> None:
        """End the threads; launches fail from then on."""
        self._pool.close()

    def _feed_behind(self, slot: RingSlot) -> None:
        """See `EagerRunner`; also what a launch in one call has left."""
        super()._feed_behind(slot)
        self._feed_behind_call(slot)

    def _feed_behind_call(self, slot: RingSlot) -> None:
        if self._iteration is not None:
            self._drafted(slot, *self._iteration.feed_behind())

    def _drafted(self, slot: RingSlot, passes: int, fault: tuple[Exception, NDArray[np.int64]] | None) -> None:
        if passes and self.drafter is not None:
            self.drafter.num_passes += passes
        if fault is not None:
            slot.drafter_failed(*fault)

    def _draft_start(self) -> Tensor:
        """Where each row's draft KV begins, which launches op by op read and write, too."""
        if self.hidden is not None:
            return self.hidden.draft_start
        return torch.zeros_like(self.state.limit) if self.k_start is None else self.k_start

    def _make(self) -> CpuIteration:
        state, sampling = self.state, self.sampling
        tensors = {name: getattr(state, name) for name in state.__slots__}
        del tensors["tables"]
        tensors |= {"block_table": state.block_table, "group_tables": state.group_tables.flatten(0, 1)}
        tensors |= {"seeds": sampling.seeds, "prompt_len": sampling.prompt_len, "params": sampling.params.values}
        if self.hidden is not None:
            tensors |= {"hidden_states": self.hidden.states.flatten(1), "hidden_start": self.hidden.start}
        tensors["draft_start"] = self._draft_start()
        return CpuIteration(
            self._scheduler,
            {name: tensor.numpy() for name, tensor in tensors.items()},
            _native(self.target, self.kv_cache),
            _passes(self.drafter),
            rule=self._rule,
            rates=None if self.rates is None else self.rates.tolist(),
            logprobs_mode=self.logprobs_mode,
        )


def _passes(drafter: Drafter | None) -> tuple[CpuDecoder, CpuKVCache] | None:
    if isinstance(drafter, HeadDrafter):
        return _native(drafter.head, drafter.kv_cache)
    return _native(drafter.model, drafter.kv_cache) if isinstance(drafter, ModelPasses) else None


def _native(model: object, cache: object) -> tuple[CpuDecoder, CpuKVCache]:
    assert isinstance(model, NativeDense | NativeEagle3Head)
    assert isinstance(cache, NativeKVCache)
    return model.decoder, cache.native

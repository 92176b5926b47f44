"""The runner of a CPU: a launch is one call of `specrs-cpu`. Plans nothing and settles nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrs.core import CpuDecoder, CpuIteration, CpuKVCache, CpuLora, CpuPool, Scheduler
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.host import HostDrafter
from specrs.models.dense_native import NativeDense
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.models.native_cache import NativeKVCache
from specrs.runner.extras import ExtrasLookup
from specrs.runner.host import StepHost
from specrs.runner.lora_rows import LoRARows
from specrs.runner.ring import Header, RingSlot
from specrs.runner.row_state import RowState
from specrs.verify.token_logprobs import TokenLogprobs


class CpuRunner:
    """Runs launches on row state: uploads, prompt chunks, draft catch-up chunks, one decode iteration, in this order.

    Passes of native models are computed by `specrs-cpu`, those of others by torch (`CallableModel`). Drafting,
    verification and sampling are the same for both.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        target: Any,
        kv_cache: Any,
        drafter: CpuDrafter | HostDrafter | None,
        state: RowState,
        *,
        pool: CpuPool | None,
        rule: str,
        rates: Sequence[float] | None = None,
        logprobs_mode: str,
        ranks: Any = None,
    ) -> None:
        """
        Args:
            scheduler: plans the launches to come; its settings are read.
            target: a `NativeDense` with its `NativeKVCache`, or a model of torch and its `KVCache`.
            pool: the threads of native models, which the runner ends; None: there are none.
            rule: verifies sequences that sample, `rejection` or `coupled`.
            rates: drafts stand at these unconditional rates by position, whatever the models say: for timing only.
            ranks: a `specrs.parallel.ranks.Ranks`, where the target is computed by several.
        """
        self.target = target
        self.kv_cache = kv_cache
        self.drafter = drafter
        self.state = state
        self.loras: LoRARows | None = None  # None: no request has an adapter
        self.num_target_passes = 0
        self._pool = pool
        own = drafter if isinstance(drafter, CpuDrafter) else None
        self._host = StepHost(target.vocab_size, None if own is None else own.bridge, ranks)
        shared = None if own is None else own.shared
        self._iteration = CpuIteration(
            scheduler,
            state.arrays(),
            self._source(target, kv_cache),
            None if own is None else self._draft_source(own),
            rule=rule,
            rates=None if rates is None else list(rates),
            logprobs_mode=logprobs_mode,
            shared_tokens=None if shared is None else (list(shared.pairs), shared.unknown),
            text_limits=None if own is None else own.text_limits,
        )
        self._rule = rule

    @property
    def is_native(self) -> bool:
        """Whether `specrs-cpu` computes the target's passes."""
        return isinstance(self.target, NativeDense)

    @property
    def rule(self) -> str:
        """`rejection` or `coupled`, for sequences that sample."""
        return self._rule

    @rule.setter
    def rule(self, rule: str) -> None:
        self._iteration.set_rule(rule)
        self._rule = rule

    def use_extras(self, lookup: ExtrasLookup) -> None:
        """Set where to find what no record can say of a request."""
        self._host.extras = lookup

    def launch(self, slot: RingSlot, header: Header) -> None:
        """Execute the launch planned in `slot.record`; mutates row state, KV caches and the slot's results."""
        record = slot.record_arrays
        if header.num_admitted:
            self._host.admit(record, header.num_admitted)
            if self.loras is not None:
                self.loras.admit(record, header.num_admitted)
        slot.draft_fault = None
        slot.logprobs.clear()
        slot.prompt_logprobs.clear()
        rows = record["entry_row"][: header.num_decode + header.num_prefill]
        host = self._host.begin(slot, rows)
        adapters: list[tuple[CpuLora, list[int]]] = []
        if self.loras is not None and isinstance(self.target, NativeDense):
            adapters = [(self.target.native_lora(own), held) for own, held in self.loras.by_adapter(rows.tolist())]
        try:
            passes, fault, logprobs, of_prompts = self._iteration.run(slot.record, slot.results, adapters, host)
        finally:
            if host is not None:
                host.finish()
        for entry, found in logprobs:
            slot.logprobs[entry] = TokenLogprobs(*found)
        for request_id, position, found in of_prompts:
            slot.prompt_logprobs.append((request_id, position, TokenLogprobs(*found)))
        self.num_target_passes += passes[0]
        if self.drafter is not None:
            self.drafter.num_passes += passes[1]
        if fault is not None:
            error, blocks = fault
            slot.drafter_failed(self._host.cause or error, blocks)

    def wait(self, slot: RingSlot) -> None:
        """Return at once: a launch has ended when `launch` returns."""

    def close(self) -> None:
        """End the threads; launches fail from then on."""
        if self._pool is not None:
            self._pool.close()

    def _source(self, model: Any, kv_cache: Any) -> Any:
        if isinstance(model, NativeDense | NativeEagle3Head):
            return _native(model, kv_cache)
        from specrs.runner.callable_model import CallableModel  # and torch, which native models do without

        return CallableModel(model, kv_cache, self._find_adapters)

    def _draft_source(self, drafter: CpuDrafter) -> Any:
        model = drafter.model
        if isinstance(model, NativeDense | NativeEagle3Head):
            return _native(model, drafter.kv_cache)
        from specrs.models.eagle3_head import Eagle3Head
        from specrs.runner.callable_model import CallableHead, CallableModel

        if isinstance(model, Eagle3Head):
            return CallableHead(model, drafter.kv_cache, self.target.vocab_size)
        return CallableModel(model, drafter.kv_cache)

    def _find_adapters(self, rows: Sequence[int]) -> Any:
        return [] if self.loras is None else self.loras.by_adapter(rows)


def _native(model: NativeDense | NativeEagle3Head, kv_cache: Any) -> tuple[CpuDecoder, CpuKVCache]:
    assert isinstance(kv_cache, NativeKVCache)
    return model.decoder, kv_cache.native

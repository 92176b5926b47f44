"""Runner of a CPU: each step is one call of `specrs-cpu`. Plans nothing and settles nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from specrs.backends.cpu.host import StepHost
from specrs.backends.cpu.lora_rows import LoRARows
from specrs.backends.cpu.row_state import RowState
from specrs.backends.extras import ExtrasLookup
from specrs.backends.ring import Header, RingSlot
from specrs.core import CostModel, CpuDecoder, CpuIteration, CpuKVCache, CpuLora, CpuPool, Scheduler
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.host import OnHost
from specrs.verify.token_logprobs import TokenLogprobs


class CpuRunner:
    """Runs steps on row state: uploads, prompt chunks, draft catch-up chunks, one decode iteration, in this order.

    `specrs-cpu` computes passes of native models, torch those of other models (`CallableModel`). Drafting, verification
    and sampling are the same for both.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        target: Any,
        kv_cache: Any,
        drafter: CpuDrafter | OnHost | None,
        state: RowState,
        *,
        pool: CpuPool | None,
        rule: str,
        rates: Sequence[float] | None = None,
        logprobs_mode: str,
        ranks: Any = None,
        loras: LoRARows | None = None,
    ) -> None:
        """
        Args:
            scheduler: planner of the steps; its settings are read.
            target: a `Model`, and `kv_cache` what its `allocate_cache` returned.
            pool: the threads of native models, which `close` ends. None: there are no native models.
            rule: acceptance rule for sequences that sample, `rejection` or `coupled`.
            rates: unconditional acceptance rate of each draft position, used instead of the rule; for timing only.
            ranks: a `specrs.parallel.ranks.Ranks` if several ranks compute the target.
            loras: the LoRA adapters of requests. None: no request has one.
        """
        self.target = target
        self.kv_cache = kv_cache
        self.drafter = drafter
        self.state = state
        self.loras = loras
        self.num_target_passes = 0
        self._pool = pool
        own = _by_passes(drafter)
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
    def supports_pooling(self) -> bool:
        """True: every model of a CPU returns the hidden states of requests with pooling."""
        return True

    def step_costs(self, *, on_host: bool, has_lora: bool = False) -> CostModel | None:
        """Return None: only steps of requests tell what steps cost."""
        return None

    @property
    def is_native(self) -> bool:
        """True if `specrs-cpu` computes the target's passes, so that a step is one native call."""
        return self.target.decoder is not None

    @property
    def rule(self) -> str:
        """Acceptance rule for sequences that sample: `rejection` or `coupled`."""
        return self._rule

    @rule.setter
    def rule(self, rule: str) -> None:
        self._iteration.set_rule(rule)
        self._rule = rule

    def use_extras(self, lookup: ExtrasLookup) -> None:
        """Set the function that finds the grammar of a request id, which records cannot hold."""
        self._host.extras = lookup

    def execute(self, slot: RingSlot, header: Header) -> None:
        """Execute the step planned in `slot.record`. Mutates row state, KV caches and the slot's results."""
        record = slot.record_arrays
        if header.num_admitted:
            self._host.admit(record, header.num_admitted)
            if self.loras is not None:
                self.loras.admit(record, header.num_admitted)
        slot.draft_fault = None
        slot.logprobs.clear()
        slot.prompt_logprobs.clear()
        slot.pooled.clear()
        rows = record["seq_row"][: header.num_decode + header.num_prefill]
        host = self._host.begin(slot, rows)
        adapters: list[tuple[CpuLora, list[int]]] = []
        if self.loras is not None and self.is_native:
            adapters = [(self.target.native_lora(own), held) for own, held in self.loras.by_adapter(rows.tolist())]
        try:
            passes, fault, logprobs, of_prompts, pooled = self._iteration.run(slot.record, slot.results, adapters, host)
        finally:
            if host is not None:
                host.finish()
        for sequence, found in logprobs:
            slot.logprobs[sequence] = TokenLogprobs(*found)
        for request_id, position, found in of_prompts:
            slot.prompt_logprobs.append((request_id, position, TokenLogprobs(*found)))
        slot.pooled += pooled
        self.num_target_passes += passes[0]
        if self.drafter is not None:
            self.drafter.num_passes += passes[1]
        if fault is not None:
            error, blocks = fault
            slot.drafter_failed(self._host.cause or error, blocks)

    def wait(self, slot: RingSlot) -> None:
        """Return immediately: a step has finished when `execute` returns."""

    def close(self) -> None:
        """End the threads. Later steps fail."""
        if self._pool is not None:
            self._pool.close()

    def _source(self, model: Any, kv_cache: Any) -> Any:
        if model.decoder is not None:
            return _native(model, kv_cache)
        from specrs.backends.cpu.callable_model import CallableModel  # and torch, which native models do without

        # no method of this runner: Python collects no cycle through an object of the core
        return CallableModel(model, kv_cache, None if self.loras is None else self.loras.by_adapter)

    def _draft_source(self, drafter: CpuDrafter) -> Any:
        model = drafter.model
        if model.decoder is not None:
            return _native(model, drafter.kv_cache)
        from specrs.backends.cpu.callable_model import CallableHead, CallableModel

        if drafter.hidden_layers:
            return CallableHead(model, drafter.kv_cache, self.target.vocab_size)
        return CallableModel(model, drafter.kv_cache)


def _native(model: Any, kv_cache: Any) -> tuple[CpuDecoder, CpuKVCache | None]:
    """Return the decoder and cache of a native model, which the core runs. None for an assistant, which has no
    cache."""
    return model.decoder, None if kv_cache is None else kv_cache.native


def _by_passes(drafter: CpuDrafter | OnHost | None) -> CpuDrafter | None:
    """Return the drafter if it drafts with passes of a model; None if `Scheduler.plan` writes its drafts."""
    return None if drafter is None or drafter.on_host else cast("CpuDrafter", drafter)

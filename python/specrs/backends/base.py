"""Protocols: `Backend`, all that depends on the kind of device, and `Runner`, which it makes. Implements none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from specrs.backends.blueprint import Blueprint, MergedPrefill
from specrs.backends.extras import ExtrasLookup
from specrs.backends.model_source import ModelSource
from specrs.backends.ring import Header, RingSlot
from specrs.config import EngineConfig
from specrs.core import CostModel, Scheduler
from specrs.drafters.assistant.reader import AssistantFiles
from specrs.drafters.base import DrafterCounts
from specrs.drafters.eagle3.reader import HeadFiles
from specrs.drafters.hidden_state import HeadFacts
from specrs.drafters.mtp.reader import MtpFiles
from specrs.models.base import Model
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.loader import DeviceDtypes
from specrs.models.lora import LoRAAdapter

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks  # and torch
    from specrs.parallel.start import Meeting

FindAdapter = Callable[[int], LoRAAdapter]
"""Function that returns the LoRA adapter with a given id. Some running request must use it."""
SlotType = Callable[[Scheduler, int], RingSlot]
"""Function that makes a ring slot for a scheduler and the engine's K."""


class Runner(Protocol):
    """Executes planned steps on a device."""

    num_target_passes: int
    """Number of passes of the target so far."""

    @property
    def drafter(self) -> DrafterCounts | None:
        """The drafter, with its count of passes. None without speculation."""

    @property
    def kv_cache(self) -> Any:
        """KV cache of the target, in the backend's own type."""

    @property
    def is_native(self) -> bool:
        """True if a step is one call of the Rust core. Such steps are short and alike, so timing a few is enough."""

    def step_costs(self, *, on_host: bool, has_lora: bool = False) -> CostModel | None:
        """Return the milliseconds of steps by batch and K, measured without requests; `on_host` if the record has the
        drafts, `has_lora` if all rows have a LoRA adapter. None: the runner cannot, and steps of requests have to be
        timed. Nothing may be in flight."""

    @property
    def supports_pooling(self) -> bool:
        """True if the runner returns the final hidden states of requests with pooling, in `RingSlot.pooled`."""

    def use_extras(self, lookup: ExtrasLookup) -> None:
        """Set the function that finds the grammar of a request id, which records cannot hold."""

    def execute(self, slot: RingSlot, header: Header) -> None:
        """Execute or enqueue the step planned in `slot.record`."""

    def wait(self, slot: RingSlot) -> None:
        """Wait until `slot.results` has the step's results."""

    def close(self) -> None:
        """End the threads and processes that the runner has started."""


class Backend(Protocol):
    """A kind of device: it checks whether the device serves, loads models onto it, and makes runners.

    Devices are named as in the option `device`: `cpu`, or `cuda:N` for a GPU.
    """

    @property
    def name(self) -> str:
        """The kind of device, with which the names of its devices begin."""

    @property
    def dtypes(self) -> DeviceDtypes:
        """Dtypes in which this kind of device computes."""

    @property
    def max_steps_in_flight(self) -> int:
        """Default of the option `max_steps_in_flight`: number of steps that are planned and not yet settled."""

    @property
    def max_speculative_tokens(self) -> int:
        """Default of the option `max_num_speculative_tokens`: maximum number of drafts with K chosen by the engine."""

    @property
    def gpus_per_rank(self) -> int:
        """Number of GPUs that each rank uses."""

    @property
    def drafts_text(self) -> bool:
        """True if a draft model of another tokenizer drafts text under the rule `coupled`. False: it drafts tokens."""

    @property
    def adapts_experts(self) -> bool:
        """True if passes compute LoRA adapters of experts."""

    def is_available(self) -> bool:
        """Return whether `device="auto"` may choose this backend. Raises nothing."""

    def resolve_device(self, device: str) -> str:
        """Return the full name of the device that `device` means, such as `cuda:0` for `cuda`.

        Raises `InvalidConfigError` or `UnsupportedConfigError` if it is missing or cannot serve.
        """

    def device_of_rank(self, device: str, size: int, place: tuple[int, int]) -> str:
        """Return the device of one of `size` ranks. `place` is a pair: the rank's number among the ranks of its
        machine, and how many ranks that machine has."""

    def current(self, device: str) -> AbstractContextManager[None]:
        """Make `device` the calling thread's current one while the context lasts."""

    def free_memory(self, device: str, ranks: int = 1) -> int:
        """Return the bytes of `device` that are free for an engine, or for one of its `ranks` ranks on this machine."""

    def check_config(self, config: EngineConfig, device: str, ranks: Ranks | None) -> None:
        """Raise an `InvalidConfigError` for models or options that `device` cannot serve. Reads no weights."""

    def check_rank_parts(self, model: ModelConfig, field: str, size: int) -> None:
        """Raise `UnsupportedModelError`, which names `field`, for a model that `size` ranks cannot compute."""

    def load_model(self, source: ModelSource, device: str, ranks: Ranks | None) -> Model:
        """Load a model, or this rank's part of it.

        Raises `InvalidConfigError` and its subclasses for what is missing, broken or not supported.
        """

    def load_head(
        self, files: HeadFiles | MtpFiles | AssistantFiles, target: DecoderFacts, ranks: Ranks | None
    ) -> HeadFacts:
        """Load a head or an assistant for `target`, or this rank's part of it.

        Raises `CheckpointError` for tensors that are missing, unknown or misshapen, and `UnsupportedConfigError` for a
        head or an assistant that the device does not run.
        """

    def batched_tokens(self, device: str) -> int:
        """Return the default of `max_num_batched_tokens` on a device."""

    def merged_prefill(self, blueprint: Blueprint) -> MergedPrefill:
        """Return how many prompt tokens fit into verification passes. The scheduler limits prompt chunks to that."""

    def longest_request(self, blueprint: Blueprint) -> int:
        """Return the largest `max_model_len`, at most the blueprint's, with which one request fits in the KV cache that
        an engine has by default. It is the blueprint's if the user sized the cache, if not even a short request fits,
        or if the backend measures the memory later."""

    def num_blocks(self, blueprint: Blueprint) -> int:
        """Return the size of the KV block pool, which target and drafter share.

        Raises `InvalidConfigError` if no request of full length fits.
        """

    def slot_type(self, device: str) -> SlotType:
        """Return the function that makes ring slots for runners on `device`."""

    def make_runner(
        self,
        blueprint: Blueprint,
        scheduler: Scheduler,
        num_blocks: int,
        ranks: Ranks | None = None,
        find_adapter: FindAdapter | None = None,
    ) -> Runner:
        """Return the runner over `num_blocks` blocks, with its own row state and caches.

        `find_adapter` is None if no request has a LoRA adapter. Raises `UnsupportedConfigError` for options that the
        machine or the weights do not allow.
        """

    def connect_ranks(self, ranks: Ranks, device: str, meeting: Meeting, config: EngineConfig) -> None:
        """Connect this rank's `device` to the devices of the other ranks, and wait for them. Mutates `ranks`.

        Raises `ExchangeError` if a rank does not connect.
        """

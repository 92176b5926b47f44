"""`EngineConfig`: the options of an engine, with the rules between them and what follows from them.

The options themselves are declared in `specrs.engine_options`. This module knows no torch and reads no checkpoint: the
engine calls the `resolve_*` functions with the numbers of its models.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specrs import vllm_arguments
from specrs.engine_options import EngineOptions
from specrs.errors import (
    InvalidConfigError,
    UnsupportedConfigError,
    invalid,
    rejects_unknown_arguments,
    short,
    unknown_key,
)
from specrs.options import check_options
from specrs.speculative_config import AUTO


@rejects_unknown_arguments(InvalidConfigError)
@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    """Everything that an engine is told at its start. Immutable and checked at construction.

    Fields are the options of `EngineOptions`, which docs/configuration.md lists. `from_kwargs` reads the arguments of
    `LLM(...)`.

    Raises `InvalidConfigError` naming field, value and what is allowed; `UnsupportedConfigError` for a value that means
    something elsewhere and is not implemented here.
    """

    def __post_init__(self) -> None:
        error = InvalidConfigError
        check_options(self, error)
        if self.enable_kv_cache_events and not self.enable_prefix_caching:
            reason = "must be False with enable_prefix_caching=False, which leaves nothing to tell of"
            raise invalid(error, "kv_events_config.enable_kv_cache_events", True, reason)
        self._check_draft()
        self.check_native_serves(self.device, self.dtype)
        self.check_fp8_rows("cuda" if self.device == "auto" else self.device, self.dtype)
        self.check_ranks_serve(self.device)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            reason = f"must be at least max_loras={self.max_loras}, or None"
            raise invalid(error, "max_cpu_loras", self.max_cpu_loras, reason)
        self.check_loras_serve(self.device)

    @property
    def most_cpu_loras(self) -> int:
        """Adapters kept beside those that requests have."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def check_loras_serve(self, device: str) -> None:
        """Raises `UnsupportedConfigError` for what is not computed with adapters. `device` is the configuration's, or
        what it was resolved to."""
        if self.enable_lora:
            size = self.tensor_parallel_size
            others = (
                ("device", device, not device.startswith("cuda"), "device='cpu'"),
                ("tensor_parallel_size", size, size == 1, "tensor_parallel_size=1"),
                ("model_impl", self.model_impl, self.model_impl != "transformers", "model_impl='auto' or 'specrs'"),
                ("cpu_bf16_rows", self.cpu_bf16_rows, not self.cpu_bf16_rows, "cpu_bf16_rows=False"),
            )
            _refuse_beside("enable_lora", True, "False", others)

    def check_ranks_serve(self, device: str) -> None:
        """Raises `UnsupportedConfigError` for what ranks do not compute, `InvalidConfigError` for a draft of another
        degree than 1 and theirs. `device` is the configuration's, or what it was resolved to."""
        size, speculative = self.tensor_parallel_size, self.speculative_config
        draft, field = 1, "speculative_config.draft_tensor_parallel_size"
        if speculative is not None:
            draft = speculative.draft_tensor_parallel_size
        if draft not in (1, size):
            also = "" if size == 1 else f" or {size}, the target's tensor_parallel_size"
            raise invalid(InvalidConfigError, field, draft, f"must be 1{also}")
        if size == 1:
            return
        coded = None if speculative is None or draft == 1 else speculative.quantization
        translates = speculative is not None and draft > 1 and speculative.use_heterogeneous_vocab
        on_cpu = not device.startswith("cuda")
        others = (
            ("model_impl", self.model_impl, self.model_impl != "transformers", "model_impl='auto' or 'specrs'"),
            ("quantization", self.quantization, self.quantization not in ("int8", "int4"), "quantization=None"),
            ("speculative_config.quantization", coded, coded not in ("int8", "int4"), f"{field}=1"),
            ("cpu_bf16_rows", self.cpu_bf16_rows, not self.cpu_bf16_rows, "cpu_bf16_rows=False"),
            ("speculative_config.use_heterogeneous_vocab", translates, on_cpu or not translates, f"{field}=1"),
        )
        _refuse_beside("tensor_parallel_size", size, "1", others)

    def check_native_serves(self, device: str, dtype: str) -> None:
        """Raises `UnsupportedConfigError` for rows in bf16 where no native pass of a CPU reads bf16 weights.

        `device` and `dtype` are the configuration's, or what they were resolved to.
        """
        if not self.cpu_bf16_rows:
            return
        quantized = {"quantization": self.quantization}
        if self.speculative_config is not None:
            quantized["speculative_config.quantization"] = self.speculative_config.quantization
        of_cache = self.kv_cache_dtype
        others = (
            ("device", device, not device.startswith("cuda"), "device='cpu'"),
            ("dtype", dtype, dtype != "float64", "dtype='float32' or 'bfloat16'"),
            ("enforce_eager", self.enforce_eager, not self.enforce_eager, "enforce_eager=False"),
            ("kv_cache_dtype", of_cache, not of_cache.startswith("fp8"), "kv_cache_dtype='auto'"),
            *((name, method, method is None, f"{name}=None") for name, method in quantized.items()),
        )
        _refuse_beside("cpu_bf16_rows", True, "False", others)

    def check_fp8_rows(self, device: str, dtype: str) -> None:
        """Raises `UnsupportedConfigError` for rows in FP8 where no kernel makes them. Arguments as of
        `check_native_serves`."""
        if self.cuda_fp8_rows:
            others = (
                ("device", device, device.startswith("cuda"), "device='cuda'"),
                ("dtype", dtype, dtype in ("auto", "bfloat16", "float32"), "dtype='bfloat16'"),
            )
            _refuse_beside("cuda_fp8_rows", True, "False", others)

    def _check_draft(self) -> None:
        speculative = self.speculative_config
        if speculative is None:
            return
        if speculative.drafts_on_host and self.launch_depth not in (None, 1):
            raise invalid(
                InvalidConfigError,
                "launch_depth",
                self.launch_depth,
                f"must be 1 or None with speculative_config.method={speculative.method!r}, which needs every token "
                "settled before it drafts",
            )
        if speculative.on_host:
            return
        head = speculative.reads_hidden
        if speculative.model is None and not self.uses_bundled_target:
            kind = "an EAGLE-3 head" if head else "a draft"
            raise InvalidConfigError(
                f"speculative_config.model is missing: a folder or hub id of {kind} for model={short(self.model)}; "
                "it may be left out only for the bundled target"
            )
        if head and self.quantization is not None:
            reason = "not implemented with speculative_config.method='eagle3'; allowed: None"
            raise invalid(UnsupportedConfigError, "quantization", self.quantization, reason)

    @property
    def uses_bundled_target(self) -> bool:
        """Whether `model` is the target that comes with the package."""
        if self.model is None:
            return True
        bundled = bundled_pair()[0]
        return os.path.isdir(self.model) and os.path.realpath(self.model) == os.path.realpath(bundled)

    @property
    def target(self) -> str:
        """Folder or hub id of the target, the bundled one if `model` is None."""
        return bundled_pair()[0] if self.model is None else self.model

    @property
    def draft(self) -> str | None:
        """Folder or hub id of the draft model or head, None without one."""
        if self.speculative_config is None or self.speculative_config.on_host:
            return None
        bundled = bundled_head() if self.speculative_config.reads_hidden else bundled_pair()[1]
        return self.speculative_config.model or bundled

    @property
    def enable_kv_cache_events(self) -> bool:
        """Whether the engine tells of its prefix cache."""
        return self.kv_events_config is not None and self.kv_events_config.enable_kv_cache_events

    @property
    def num_speculative_tokens(self) -> int:
        """The engine's K: drafts per iteration at most, 0 without speculation."""
        return 0 if self.speculative_config is None else self.speculative_config.most_speculative_tokens

    @property
    def plans_speculation(self) -> bool:
        """Whether K is chosen launch by launch."""
        return self.speculative_config is not None and self.speculative_config.num_speculative_tokens == AUTO

    @property
    def rule(self) -> str:
        """What verifies sampled drafts: `coupled`, or `rejection`, under which synthetic acceptance runs too."""
        coupled = self.speculative_config is not None and self.speculative_config.rejection_sample_method == "coupled"
        return "coupled" if coupled else "rejection"

    @property
    def synthetic(self) -> bool:
        """Whether acceptance is made up, for timing."""
        return self.speculative_config is not None and self.speculative_config.rejection_sample_method == "synthetic"

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Read the arguments of vLLM's `LLM(...)`: what is implemented, and the rest where it changes nothing.

        Raises `UnsupportedConfigError` for an argument whose value specrs does not honour, `InvalidConfigError` for an
        unknown argument.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in known:
                values[name] = value
            elif name == "async_scheduling" and isinstance(value, bool):
                depth = 2 if value else 1
                if kwargs.get("launch_depth") not in (None, depth):
                    raise invalid(InvalidConfigError, name, value, f"contradicts launch_depth={kwargs['launch_depth']}")
                values["launch_depth"] = depth
            elif name in vllm_arguments.ENGINE:
                argument = vllm_arguments.ENGINE[name]
                if not argument.accepts(value):
                    raise UnsupportedConfigError(argument.reason(name, value))
            else:
                raise unknown_key(
                    InvalidConfigError, "LLM", name, known
                )  # vLLM's arguments are no help: most values are rejected
        return cls(**values)


def bundled_pair() -> tuple[str, str]:
    """Folders of the target and the draft that come with the package."""
    from specrs.pair import DRAFT, TARGET

    return str(TARGET), str(DRAFT)


def bundled_head() -> str:
    """Folder of the EAGLE-3 head that comes with the package, for the bundled target."""
    from specrs.pair import EAGLE3

    return str(EAGLE3)


def resolve_max_model_len(config: EngineConfig, max_position_embeddings: int) -> int:
    """The engine's context in tokens. Raises `InvalidConfigError` if `max_model_len` is above the model's."""
    asked = config.max_model_len
    if asked is not None and asked > max_position_embeddings:
        raise invalid(
            InvalidConfigError,
            "max_model_len",
            asked,
            f"must be at most {max_position_embeddings}, the max_position_embeddings of {config.target}",
        )
    return max_position_embeddings if asked is None else asked


def resolve_draft_max_model_len(config: EngineConfig, draft_max_position_embeddings: int) -> int:
    """The draft's context in tokens; a request beyond it goes on without drafts.

    Raises `InvalidConfigError` if `speculative_config.max_model_len` is above the draft model's.
    """
    asked = None if config.speculative_config is None else config.speculative_config.max_model_len
    if asked is not None and asked > draft_max_position_embeddings:
        raise invalid(
            InvalidConfigError,
            "speculative_config.max_model_len",
            asked,
            f"must be at most {draft_max_position_embeddings}, the max_position_embeddings of {config.draft}",
        )
    return draft_max_position_embeddings if asked is None else asked


def _refuse_beside(field: str, value: object, neutral: str, others: Iterable[tuple[str, object, bool, str]]) -> None:
    """Raises `UnsupportedConfigError` for `field` at `value` beside the first other setting, of (name, its value,
    whether they go together, what would), that it does not go with; `neutral` goes with all."""
    for other, found, serves, allowed in others:
        if not serves:
            reason = f"not implemented with {other}={found!r}; allowed: {neutral}, or {allowed}"
            raise invalid(UnsupportedConfigError, field, value, reason)

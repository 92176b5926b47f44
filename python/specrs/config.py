"""`EngineConfig`: the options of an engine, the rules between them, and values derived from them.

The options themselves are declared in `specrs.engine_options`. This module imports no torch. It reads a checkpoint's
configuration and the names of its tensors only to find an MTP head.
The engine calls the `resolve_*` functions with sizes of its models.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from specrs import vllm_arguments
from specrs.drafters.mtp.files import has_mtp_head
from specrs.engine_options import BATCHED_TOKENS, INTEGER_ACTIVATIONS, SPLIT_DRAFT_TRANSLATES_ON, EngineOptions, may_be
from specrs.errors import (
    InvalidConfigError,
    UnsupportedConfigError,
    invalid,
    rejects_unknown_arguments,
    short,
    unknown_key,
)
from specrs.model_values import DEFAULT_MAX_NUM_SEQS, INTEGERS_AT_LOAD
from specrs.options import check_options, options_of
from specrs.speculative_config import AUTO

logger = logging.getLogger("specrs")


@rejects_unknown_arguments(InvalidConfigError)
@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    """Settings of an engine, fixed at its start. Immutable and checked at construction.

    Fields are the options of `EngineOptions`, which docs/configuration.md lists. `from_kwargs` reads the arguments of
    `LLM(...)`.

    Raises `InvalidConfigError` naming field, value and what is allowed; `UnsupportedConfigError` for a value that means
    something elsewhere and is not implemented here.
    """

    def __post_init__(self) -> None:
        error = InvalidConfigError
        check_options(self, error)
        if self.enable_kv_cache_events and self.enable_prefix_caching is False:
            reason = "must be False with enable_prefix_caching=False, which leaves nothing to tell of"
            raise invalid(error, "kv_events_config.enable_kv_cache_events", True, reason)
        if self.kv_cache_disk_bytes is not None and self.kv_cache_path is None:
            reason = "needs kv_cache_path, the folder whose size it limits; set it, or leave kv_cache_disk_bytes out"
            raise invalid(error, "kv_cache_disk_bytes", self.kv_cache_disk_bytes, reason)
        self._choose_method()
        self._check_draft()
        self.check_device(self.device, self.dtype)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            reason = f"must be at least max_loras={self.max_loras}, or None"
            raise invalid(error, "max_cpu_loras", self.max_cpu_loras, reason)

    @property
    def most_seqs(self) -> int:
        """Maximum number of requests that run at once (`max_num_seqs`, or its default)."""
        return DEFAULT_MAX_NUM_SEQS if self.max_num_seqs is None else self.max_num_seqs

    @property
    def most_cpu_loras(self) -> int:
        """Number of recently used LoRA adapters that are kept in memory (`max_cpu_loras`, or its default)."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def batched_tokens(self) -> int:
        """Maximum number of tokens per step (`max_num_batched_tokens`, or its default on a device that is unknown). The
        configuration of an engine that is built has the default of its device."""
        return BATCHED_TOKENS if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    def check_device(self, device: str, dtype: str) -> None:
        """Raise an error for options that a device, or its ranks, do not serve.

        `device` and `dtype` are the configuration's, or what they were resolved to. `device="auto"` serves all options.

        Raises:
            UnsupportedConfigError: an option that is not implemented on the device, or with the other options.
            InvalidConfigError: the degree of a draft's ranks is neither 1 nor the target's.
        """
        self._check_activations(device, dtype)
        if self.cuda_fp8_rows:
            served = ("dtype", dtype, dtype in ("auto", "bfloat16", "float32"), "dtype='bfloat16'")
            _refuse_beside("cuda_fp8_rows", True, "False", (_of_device("cuda_fp8_rows", device), served))
        self._check_ranks(device)
        if self.kv_cache_path is not None:
            self._check_disk_cache(device, dtype)
        if self.enable_lora:
            others = (
                ("model_impl", self.model_impl, self.model_impl != "transformers", "model_impl='auto' or 'specrs'"),
                ("cpu_activations", self.cpu_activations, not self.rounds_to_bf16, "cpu_activations='auto'"),
            )
            _refuse_beside("enable_lora", True, "False", others)

    def _check_disk_cache(self, device: str, dtype: str) -> None:
        """Raise `UnsupportedConfigError` for options with which KV on disk would not have the bits of computed KV."""
        size, caching, eager = self.tensor_parallel_size, self.enable_prefix_caching, self.enforce_eager
        others = (
            _of_device("kv_cache_path", device),
            ("enable_prefix_caching", caching, caching is not False, "enable_prefix_caching=True"),
            ("tensor_parallel_size", size, size == 1, "tensor_parallel_size=1"),
            ("dtype", dtype, dtype != "float64", "dtype='float32' or 'bfloat16'"),
            ("enforce_eager", eager, not eager, "enforce_eager=False"),
            ("model_impl", self.model_impl, self.model_impl != "transformers", "model_impl='auto' or 'specrs'"),
            ("load_format", self.load_format, self.load_format != "dummy", "load_format='auto'"),
            ("cpu_prefill", self.cpu_prefill, self.cpu_prefill == "exact", "cpu_prefill='exact'"),
        )
        _refuse_beside("kv_cache_path", self.kv_cache_path, "None", others)

    def _check_ranks(self, device: str) -> None:
        size, speculative = self.tensor_parallel_size, self.speculative_config
        draft, field = 1, "speculative_config.draft_tensor_parallel_size"
        if speculative is not None:
            draft = speculative.draft_tensor_parallel_size
        if draft not in (1, size):
            also = "" if size == 1 else f" or {size}, the target's tensor_parallel_size"
            raise invalid(InvalidConfigError, field, draft, f"must be 1{also}")
        if size == 1:
            return
        quantization = None if speculative is None or draft == 1 else speculative.quantization
        activations = self.cpu_activations
        translates = speculative is not None and draft > 1 and speculative.use_heterogeneous_vocab
        fewer = None if speculative is None or draft == 1 else speculative.draft_vocab_size
        parts = not translates or may_be(device, SPLIT_DRAFT_TRANSLATES_ON)
        others = (
            ("model_impl", self.model_impl, self.model_impl != "transformers", "model_impl='auto' or 'specrs'"),
            ("quantization", self.quantization, self.quantization not in INTEGERS_AT_LOAD, "quantization=None"),
            ("speculative_config.quantization", quantization, quantization not in INTEGERS_AT_LOAD, f"{field}=1"),
            ("cpu_activations", activations, activations in ("auto", "fp32"), "cpu_activations='auto'"),
            ("speculative_config.use_heterogeneous_vocab", translates, parts, f"{field}=1"),
            ("speculative_config.draft_vocab_size", fewer, fewer is None, f"{field}=1"),
        )
        _refuse_beside("tensor_parallel_size", size, "1", others)

    @property
    def rounds_to_bf16(self) -> bool:
        """True if passes on a CPU round activations to bf16."""
        return self.cpu_activations == "bf16"

    @property
    def rounds_to_integers(self) -> bool:
        """True if `cpu_activations` is a type of integers, which only quantized weights can have."""
        return self.cpu_activations in INTEGER_ACTIVATIONS

    def _check_activations(self, device: str, dtype: str) -> None:
        """Raise `UnsupportedConfigError` for rounded activations if no native pass on a CPU can compute them."""
        if not (self.rounds_to_bf16 or self.rounds_to_integers):
            return
        others = [
            _of_device("cpu_activations", device),
            ("dtype", dtype, dtype != "float64", "dtype='float32' or 'bfloat16'"),
            ("enforce_eager", self.enforce_eager, not self.enforce_eager, "enforce_eager=False"),
        ]
        if self.rounds_to_bf16:
            of_cache = self.kv_cache_dtype
            others.append(("kv_cache_dtype", of_cache, not of_cache.startswith("fp8"), "kv_cache_dtype='auto'"))
            methods = [("quantization", self.quantization)]
            if self.speculative_config is not None:
                methods.append(("speculative_config.quantization", self.speculative_config.quantization))
            others += [(name, method, method is None, f"{name}=None") for name, method in methods]
        _refuse_beside("cpu_activations", self.cpu_activations, "'auto'", others)

    def _choose_method(self) -> None:
        """Replace the method `draft_model` by `mtp` if no draft model is named and the target has an MTP head. Replaces
        `speculative_config`."""
        speculative = self.speculative_config
        if speculative is None or speculative.model is not None or "draft_model" not in speculative.methods:
            return
        if self.uses_bundled_target or self.load_format == "dummy" or not has_mtp_head(self.target, self.revision):
            return
        method = ",".join("mtp" if name == "draft_model" else name for name in speculative.methods)
        logger.info(
            "%s: speculative_config.method is %r: no draft model is named, and it has an MTP head", self.target, method
        )
        object.__setattr__(self, "speculative_config", replace(speculative, method=method))

    def _check_draft(self) -> None:
        speculative = self.speculative_config
        if speculative is None:
            return
        if speculative.drafts_on_host and self.max_steps_in_flight not in (None, 1):
            raise invalid(
                InvalidConfigError,
                "max_steps_in_flight",
                self.max_steps_in_flight,
                f"must be 1 or None with speculative_config.method={speculative.method!r}, which needs every token "
                "settled before it drafts",
            )
        method = speculative.model_method
        if method is None:
            return
        if method.bundled is None and self.load_format == "dummy":
            reason = f"not implemented with speculative_config.method={method.name!r}; allowed: 'auto'"
            raise invalid(UnsupportedConfigError, "load_format", self.load_format, reason)
        if method.bundled is not None and speculative.model is None and not self.uses_bundled_target:
            reason = f"must be a folder or hub id of {method.what} for model={short(self.model)}; "
            reason += "name one, or set speculative_config.method='suffix', which needs none"
            raise invalid(InvalidConfigError, "speculative_config.model", None, reason)
        if not method.quantized_target and self.quantization is not None:
            reason = f"not implemented with speculative_config.method={method.name!r}; allowed: None"
            raise invalid(UnsupportedConfigError, "quantization", self.quantization, reason)

    @property
    def uses_bundled_target(self) -> bool:
        """True if `model` is the target that comes with the package."""
        if self.model is None:
            return True
        bundled = bundled_target()
        return os.path.isdir(self.model) and os.path.realpath(self.model) == os.path.realpath(bundled)

    @property
    def target(self) -> str:
        """Folder or hub id of the target; the bundled target if `model` is None."""
        return bundled_target() if self.model is None else self.model

    @property
    def draft(self) -> str | None:
        """Folder or hub id of the draft model or head; None if there is none."""
        speculative = self.speculative_config
        method = None if speculative is None else speculative.model_method
        if speculative is None or method is None:
            return None
        return self.target if method.bundled is None else speculative.model or method.bundled()

    @property
    def enable_kv_cache_events(self) -> bool:
        """True if the engine reports changes of its prefix cache as events."""
        return self.kv_events_config is not None and self.kv_events_config.enable_kv_cache_events

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of drafts per iteration (the engine's K); 0 without speculation."""
        return 0 if self.speculative_config is None else self.speculative_config.most_speculative_tokens

    @property
    def plans_speculation(self) -> bool:
        """True if the engine chooses K anew for each step."""
        return self.speculative_config is not None and self.speculative_config.num_speculative_tokens == AUTO

    @property
    def rule(self) -> str:
        """Rule that verifies sampled drafts: `coupled` or `rejection`. Synthetic acceptance runs under `rejection`."""
        coupled = self.speculative_config is not None and self.speculative_config.rejection_sample_method == "coupled"
        return "coupled" if coupled else "rejection"

    @property
    def synthetic(self) -> bool:
        """True if drafts are accepted at given rates, for timing."""
        return self.speculative_config is not None and self.speculative_config.rejection_sample_method == "synthetic"

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build a configuration from the arguments of vLLM's `LLM(...)`. Arguments that are not implemented are
        accepted at values that change nothing.

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
                if kwargs.get("max_steps_in_flight") not in (None, depth):
                    raise invalid(
                        InvalidConfigError,
                        name,
                        value,
                        f"contradicts max_steps_in_flight={kwargs['max_steps_in_flight']}",
                    )
                values["max_steps_in_flight"] = depth
            elif name in vllm_arguments.ENGINE:
                argument = vllm_arguments.ENGINE[name]
                if not argument.accepts(value):
                    raise UnsupportedConfigError(argument.reason(name, value))
            else:
                raise unknown_key(
                    InvalidConfigError, "LLM", name, known
                )  # vLLM's arguments are no help: most values are rejected
        return cls(**values)


def bundled_target() -> str:
    """Return the folder of the target that comes with the package."""
    from specrs.pair import TARGET

    return str(TARGET)


def resolve_max_model_len(config: EngineConfig, max_position_embeddings: int) -> int:
    """Return the maximum number of tokens of a request. Raises `InvalidConfigError` if `max_model_len` exceeds the
    model's own maximum, `max_position_embeddings`."""
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
    """Return the maximum number of tokens up to which the draft model drafts. A longer request goes on without drafts.

    Raises `InvalidConfigError` if `speculative_config.max_model_len` exceeds the draft model's own maximum.
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


def _of_device(option: str, device: str) -> tuple[str, object, bool, str]:
    """Return the requirement that `device` is of the kind that has `option`, in the form of the argument `others` of
    `_refuse_beside`."""
    kind = options_of(EngineOptions)[option].device
    assert kind is not None
    return "device", device, may_be(device, kind), f"device={kind!r}"


def _refuse_beside(field: str, value: object, neutral: str, others: Iterable[tuple[str, object, bool, str]]) -> None:
    """Raise `UnsupportedConfigError` if another setting does not work with `field` at `value`.

    Each of `others` is (name of the setting, its value, whether it works with `field`, values that do). The error names
    the first that does not work. `neutral` is a value of `field` that works with all.
    """
    for other, found, serves, allowed in others:
        if not serves:
            reason = f"not implemented with {other}={found!r}; allowed: {neutral}, or {allowed}"
            raise invalid(UnsupportedConfigError, field, value, reason)

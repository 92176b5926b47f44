"""What a user can set on an engine, under vLLM's names, checked once. How it drafts has a file of its own.

Knows no torch and reads no checkpoint: what depends on the model's numbers is checked by the `resolve_*` functions,
which the engine calls with those numbers.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specrs.errors import (
    InvalidConfigError,
    UnsupportedConfigError,
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_text,
    invalid,
    rejects_unknown_arguments,
    short,
    unknown_key,
)
from specrs.kv_events_config import KVEventsConfig
from specrs.speculative_config import (
    AUTO,
    SpeculativeConfig,
    check_kv_cache_dtype,
    check_model_path,
    check_quantization,
)
from specrs.vllm_arguments import HONOURED, INSTEAD

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
_DTYPE_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "fp32": "float32", "bf16": "bfloat16"}
DEFAULT_CPU_KV_CACHE_BYTES = 4 << 30
"""Bytes of KV cache on a CPU unless told otherwise. The pool is mapped lazily, so unused blocks cost no memory."""
DEVICES = ("auto", "cpu", "cuda", "cuda:N")
"""Allowed devices. N is the number of a GPU, as torch counts them."""
LOAD_FORMATS = ("auto", "safetensors", "dummy")
CPU_PREFILLS = ("exact", "amx", "torch")
MODEL_IMPLS = ("auto", "specrs", "transformers")
STREAMING_PREFILL_STALL_MS = 75.0
"""What prompts may hold up streams for, unless told otherwise. Streams pause for it and for one iteration: where
prompts take twice as long as was expected, and the iteration takes 100 ms, that is 250 ms."""
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@rejects_unknown_arguments(InvalidConfigError)
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is told at its start. Immutable and checked at construction; `from_kwargs` reads `LLM(...)`.

    `model`: folder, hub id or GGUF file; None is the bundled target. `tokenizer`, `tokenizer_revision`: None is the
    model's.
    `device`: `auto` (a GPU if there is one that serves), `cpu`, `cuda` or `cuda:N`.
    `dtype`: type of activations and KV cache, `float32`, `bfloat16`, `float16` (GPUs only) or `float64` (CPUs only).
    `auto` is the checkpoint's on a GPU; on a CPU it is `float32`, or `float64` for a checkpoint of that type.
    `load_format`: `dummy` fills weights with random numbers, so that a model's speed can be measured without its
    weights.
    `model_impl`: `specrs` computes models by our own decoders, `transformers` by transformers' modules over our KV
    cache, on a CPU; `auto` takes the first for the families that it knows (docs/supported.md) and the second for all
    others. It holds for target and draft alike.
    `quantization`: None is what the checkpoint says; its own method (`fp8`, `compressed-tensors`, `gptq`, `awq`,
    `mxfp4`, `gguf`) may be named, too. Where its weights are not quantized, `fp8`, `int8` and `int4` quantize the
    projections of the target's layers as they are loaded: FP8 and INT8 with a scale for each output, INT4 with one for
    128 inputs (64 or 32 where 128 does not divide them). The text is that of the quantized model. Embedding and LM head
    are kept.
    `kv_cache_dtype`: what K and V are cached as. `auto` is `dtype`, whose name may be given, too; `fp8` (which is
    `fp8_e4m3`) and `fp8_e5m2` are floats of 8 bits times a scale of each layer, the checkpoint's or 1: half the memory
    of 16 bits, and the text of a model that attends rounded K and V.
    `max_model_len`: tokens of prompt and output together; None is the model's `max_position_embeddings`.
    `max_num_seqs`: requests that run at once. `max_num_batched_tokens`: tokens of one launch.
    `long_prefill_token_threshold`: the most prompt tokens of a request in one launch; 0 leaves a quarter to others, and
    what they leave, it gets.
    `max_prefill_stall_ms`: maximum milliseconds that prompts may take of a step in which other requests decode, since
    those wait for it. The engine predicts times from earlier steps. At least 16 prompt tokens, and 512 tokens of
    drafts' catch-up, always go through. 0 is no bound. None is 75 where answers are streamed (`AsyncLLM`, the server),
    and no bound in `LLM`. With a bound, how a prompt is cut depends on the machine's speed, and so do the last bits of
    passes other than the exact one.
    `num_reserved_decode_tokens`: positions of output kept for each running request when another is admitted. Fewer let
    more requests run at once in a full KV cache, and be preempted more often.
    `priority_aging_launches`: priorities age, so that no request waits for ever behind more important ones: one that
    arrived so many launches earlier goes before one whose `priority` is better by 1. 0 is off.
    `block_size`: positions of one KV block, a power of two. `num_gpu_blocks_override`: blocks of the pool, whatever the
    device; otherwise as many as fit in `kv_cache_memory_bytes` (None: 4 GiB on a CPU, and on a GPU what
    `gpu_memory_utilization` of its memory leaves beside weights, buffers and graphs).
    `tensor_parallel_size`: ranks, processes that compute the target together, each with its part of the weights and of
    the KV cache (docs/scaling.md). The engine starts them, or torchrun has. On GPUs each has one; on a CPU the
    target's passes are torch's then, op by op. `distributed_timeout`: seconds in which a rank that does not answer
    counts as lost.
    `launch_depth`: launches planned and not yet settled, 1 or 2; None is 1 on a CPU and 2 on a GPU. vLLM's
    `async_scheduling` is read as 2, where it is False as 1.
    `seed`: what the seeds of requests without one are derived from (`specrs.sampling.derive_seed`).
    `max_logprobs`: the most that `logprobs` and `prompt_logprobs` of a request may ask for; -1 is the vocabulary.
    `logprobs_mode`: what they report. `raw_logprobs` is the log-softmax of what the model gave, `processed_logprobs`
    that of the logits after masks, bias, penalties, temperature and filters; `raw_logits` and `processed_logits` are
    the logits themselves.
    `enable_lora`: requests may have a LoRA adapter (`LoRARequest`): PEFT's, of the projections of the target's layers,
    on a CPU. Drafts stay those of the drafter without it.
    `max_loras`: different adapters of the requests that run at once; others wait for their turn. `max_lora_rank`: the
    largest that an adapter may have, up to 512. `max_cpu_loras`: adapters kept in memory beside those that requests
    have; None is `max_loras`.
    `kv_events_config`: what to tell of the prefix cache, and where (`KVEventsConfig`); None is nothing.
    `enforce_eager`: no CUDA graphs, and on a CPU torch op by op in place of the native pass. `cudagraph_capture_sizes`:
    batch sizes that graphs are captured for; larger launches run eagerly.
    `threads`: number of threads of the native pass on a CPU. None is SPECRS_NUM_THREADS, else the physical cores that
    the process may use, or one if a measurement at start shows that a model that fits in a cache gains little by more.
    `cpu_bf16_rows`: products there are of bf16 pairs: rows are rounded to bf16 before they meet bf16 weights, an error
    of up to 2^-8 of each number, and sums stay fp32. The text is that of the model computed so, at any K. Draft models
    and heads do the same.
    `cuda_fp8_rows`: on a GPU products of FP8 weights are of rows in FP8 (e4m3), too: each number within 1/16 of itself,
    or 2^-10 of the scale of its row, or of its 128 inputs where weights have a scale for so many. The tensor cores for
    FP8 then take prompts through, and the text is that of the model computed so, at any K; draft models do the same. A
    decode pass has six kernels a layer more.
    `cpu_prefill`: what computes the target's prompts on a CPU. `exact` is the native pass, whose bits are the same
    however a prompt is cut and whether a token was decoded before it was fed again. `amx` multiplies prompts by bf16
    weights with the tiles of processors that have them, in fp32 too: almost twice as fast, the same bits however a
    prompt is cut, and other bits than decoding gives, so that text may change where decoded tokens are fed again, after
    a preemption or on a hit in the prefix cache; draft models catch up so, too. `torch` hands chunks of 256 tokens or
    more to torch's passes, on torch's own threads: faster where prompts are long, and not the same bits where they are
    cut otherwise.

    Raises `InvalidConfigError` naming field, value and what is allowed; `UnsupportedConfigError` for a value that means
    something elsewhere and is not implemented here.
    """

    model: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    speculative_config: SpeculativeConfig | None = None
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    model_impl: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    max_prefill_stall_ms: float | None = None
    num_reserved_decode_tokens: int = 64
    priority_aging_launches: int = 0
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    distributed_timeout: float = 60.0
    launch_depth: int | None = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    threads: int | None = None
    cpu_bf16_rows: bool = False
    cuda_fp8_rows: bool = False
    cpu_prefill: str = "exact"
    seed: int = 0
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    kv_events_config: KVEventsConfig | None = None

    def __post_init__(self) -> None:
        error = InvalidConfigError
        checked: dict[str, object] = {
            "model": check_model_path("model", self.model),
            "tokenizer": check_model_path("tokenizer", self.tokenizer),
            "speculative_config": _speculative(self.speculative_config),
            "kv_events_config": _kv_events(self.kv_events_config),
            "device": _device(self.device),
            "dtype": _dtype(self.dtype),
            "kv_cache_dtype": check_kv_cache_dtype("kv_cache_dtype", self.kv_cache_dtype),
            "max_num_seqs": check_int(error, "max_num_seqs", self.max_num_seqs, 1, 65536),
            "max_num_batched_tokens": check_int(
                error, "max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 24
            ),
            "long_prefill_token_threshold": check_int(
                error, "long_prefill_token_threshold", self.long_prefill_token_threshold, 0, 1 << 24
            ),
            "num_reserved_decode_tokens": check_int(
                error, "num_reserved_decode_tokens", self.num_reserved_decode_tokens, 0, 1 << 24
            ),
            "priority_aging_launches": check_int(
                error, "priority_aging_launches", self.priority_aging_launches, 0, 1 << 24
            ),
            "block_size": check_int(error, "block_size", self.block_size, 1, 1024),
            "tensor_parallel_size": check_int(error, "tensor_parallel_size", self.tensor_parallel_size, 1, 1024),
            "distributed_timeout": check_number(
                error, "distributed_timeout", self.distributed_timeout, 0.0, 86400.0, open_low=True
            ),
            "seed": check_int(error, "seed", self.seed, -(2**63), 2**63 - 1),
            "max_loras": check_int(error, "max_loras", self.max_loras, 1, 1024),
            "max_lora_rank": check_int(error, "max_lora_rank", self.max_lora_rank, 1, 512),
            "max_logprobs": check_int(error, "max_logprobs", self.max_logprobs, -1, 2**31 - 1),
        }
        for name, low, high in (
            ("max_model_len", 2, None),
            ("num_gpu_blocks_override", 1, None),
            ("kv_cache_memory_bytes", 1, None),
            ("launch_depth", 1, 2),
            ("threads", 1, None),
            ("max_cpu_loras", 1, None),
        ):
            value = getattr(self, name)
            if value is not None:
                checked[name] = check_int(error, name, value, low, high, also=", or None")
        if self.max_prefill_stall_ms is not None:
            checked["max_prefill_stall_ms"] = check_number(
                error, "max_prefill_stall_ms", self.max_prefill_stall_ms, 0.0, 1e6
            )
        for name in ("revision", "tokenizer_revision"):
            value = getattr(self, name)
            if value is not None:
                check_text(error, name, value, also=", or None")
        flags = ("skip_tokenizer_init", "enable_prefix_caching", "enforce_eager", "enable_lora")
        for name in (*flags, "cpu_bf16_rows", "cuda_fp8_rows"):
            check_bool(error, name, getattr(self, name))
        check_choice(error, "load_format", self.load_format, LOAD_FORMATS)
        check_choice(error, "model_impl", self.model_impl, MODEL_IMPLS)
        check_choice(error, "cpu_prefill", self.cpu_prefill, CPU_PREFILLS)
        checked["gpu_memory_utilization"] = check_number(
            error, "gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, open_low=True
        )
        checked["cudagraph_capture_sizes"] = _capture_sizes(self.cudagraph_capture_sizes)
        check_choice(error, "logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.block_size & (self.block_size - 1):
            raise invalid(error, "block_size", self.block_size, "must be a power of two from 1 to 1024")
        if self.enable_kv_cache_events and not self.enable_prefix_caching:
            reason = "must be False with enable_prefix_caching=False, which leaves nothing to tell of"
            raise invalid(error, "kv_events_config.enable_kv_cache_events", True, reason)
        self._check_draft()
        check_quantization("quantization", self.quantization)
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
            elif name in HONOURED:
                if not any(type(value) is type(same) and value == same for same in HONOURED[name]):
                    if name in INSTEAD:  # without the value, which may be a secret
                        raise UnsupportedConfigError(f"{name}: not implemented; use {INSTEAD[name]}")
                    allowed = " or ".join(repr(same) for same in HONOURED[name])
                    raise invalid(UnsupportedConfigError, name, value, f"not implemented; allowed: {allowed}")
            else:
                raise unknown_key(InvalidConfigError, "LLM", name, known)  # HONOURED ones are rejected at other values
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


def _speculative(value: object) -> SpeculativeConfig | None:
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, Mapping):
        return SpeculativeConfig.from_mapping(value)
    raise invalid(InvalidConfigError, "speculative_config", value, "must be a dictionary, a SpeculativeConfig, or None")


def _kv_events(value: object) -> KVEventsConfig | None:
    if value is None or isinstance(value, KVEventsConfig):
        return value
    if isinstance(value, Mapping):
        return KVEventsConfig.from_mapping(value)
    raise invalid(InvalidConfigError, "kv_events_config", value, "must be a dictionary, a KVEventsConfig, or None")


def _device(value: object) -> str:
    name = str(value)
    kind, _, index = name.rpartition(":")
    numbered = f"{kind}:N" if kind and index.isascii() and index.isdigit() else name
    if name == "cuda:N" or numbered not in DEVICES:
        *others, last = map(repr, DEVICES)
        raise invalid(InvalidConfigError, "device", name, f"must be {', '.join(others)} or {last}")
    return name


def _capture_sizes(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise invalid(InvalidConfigError, "cudagraph_capture_sizes", value, "must be a list of batch sizes, or None")
    return tuple(
        check_int(InvalidConfigError, f"cudagraph_capture_sizes[{i}]", size, 1, 65536) for i, size in enumerate(value)
    )


def _dtype(value: object) -> str:
    # a torch.dtype prints as torch.float32; its name is enough, and torch is not imported for it
    name = str(value).removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    return check_choice(InvalidConfigError, "dtype", name, DTYPES)

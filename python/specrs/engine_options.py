"""The options of an engine, each declared once. `specrs.config` adds the rules between two of them.

A new option is a field here, and code that reads it from the engine's `EngineConfig`. Nothing else names it: flags,
checks and docs/configuration.md are derived (`specrs.options`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from specrs.errors import SpecrsError, invalid
from specrs.kv_events_config import KVEventsConfig
from specrs.model_values import (
    AT_LOAD,
    CACHE_DTYPE,
    DEFAULT_CPU_KV_CACHE_BYTES,
    DEFAULT_DISK_CACHE_BYTES,
    DEFAULT_MAX_NUM_SEQS,
    MODEL_PATH,
    QUANTIZATION,
)
from specrs.options import Choice, Command, Integer, ListOf, Number, Settings, Switch, Text, Values, one_of, option
from specrs.speculative_config import SpeculativeConfig

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "cuda:N")
"""Allowed devices. N is the number of a GPU, as torch counts them."""
SPLIT_DRAFT_TRANSLATES_ON = "cpu"
"""The kind of device whose ranks can compute parts of a draft model of another tokenizer."""
LOAD_FORMATS = ("auto", "safetensors", "dummy")
CPU_PREFILLS = ("exact", "amx")
CPU_ACTIVATIONS = ("auto", "int16", "int8", "fp32", "bf16")
INTEGER_ACTIVATIONS = ("int16", "int8")
"""Types of `cpu_activations` that only quantized weights can have."""
MODEL_IMPLS = ("auto", "specrs", "transformers")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
STREAMING_PREFILL_STALL_MS = 75.0
"""Default of `max_prefill_stall_ms` where answers are streamed. If prompts take twice the predicted time and a decode
step takes 100 ms, streams pause for 250 ms."""
BATCHED_TOKENS = 2048
"""Default of `max_num_batched_tokens`, except on large GPUs (`BATCHED_TOKENS_OF_LARGE_GPUS`)."""
BATCHED_TOKENS_OF_LARGE_GPUS = 8192
"""Default of `max_num_batched_tokens` on a GPU with 80 GB or more. With 256 requests and five drafts each, decoding
takes 1,536 tokens of a step, and as many as 588 prompt tokens arrive in it."""
_POSITIONS = 1 << 24
_EVERYWHERE: tuple[Command, ...] = ("serve", "chat", "generate", "bench")
_MEASURED: tuple[Command, ...] = (*_EVERYWHERE, "advise", "forecast")
_engine_option = partial(option, commands=("serve", "bench"))
_serve_option = partial(option, commands=("serve",))


def may_be(device: str, kind: str) -> bool:
    """Return whether the option `device` names a device of `kind`, or may mean one because it is `auto`."""
    return device == "auto" or device.partition(":")[0] == kind


@dataclass(frozen=True)
class _Device(Values):
    noun = "text"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> str:
        name = str(value)
        kind, _, index = name.rpartition(":")
        numbered = f"{kind}:N" if kind and index.isascii() and index.isdigit() else name
        if name == "cuda:N" or numbered not in DEVICES:
            *others, last = map(repr, DEVICES)
            raise invalid(error, field, name, f"must be {', '.join(others)} or {last}")
        return name

    def allowed(self) -> str:
        return one_of(DEVICES)


@dataclass(frozen=True)
class _Dtype(Choice):
    """A name in `DTYPES`. A `torch.dtype` is read by its name, so torch is not imported here."""

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> str:
        return super().check(error, field, str(value).removeprefix("torch."), also)


_DTYPE = _Dtype(
    DTYPES,
    {"float": "float32", "double": "float64", "half": "float16", "fp32": "float32", "bf16": "bfloat16"},
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine. Immutable; `EngineConfig` checks them at construction."""

    model: str | None = option(
        None,
        MODEL_PATH,
        "checkpoint folder, GGUF file, hub id, or owner/name:TYPE for a GGUF file of the hub",
        default_is="the bundled pair, in float32",
        commands=("bench",),
    )
    tokenizer: str | None = _engine_option(
        None, MODEL_PATH, "folder or hub id of the tokenizer", default_is="the model's"
    )
    skip_tokenizer_init: bool = _serve_option(
        False, Switch(), "load no tokenizer", note="prompts and outputs are token ids"
    )
    revision: str | None = option(
        None,
        Text(),
        "branch, tag or commit of the model's hub id",
        default_is="main",
        commands=(*_EVERYWHERE, "tune"),
    )
    tokenizer_revision: str | None = _engine_option(
        None, Text(), "branch, tag or commit of the tokenizer's hub id", default_is="the model's"
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        Settings(SpeculativeConfig),
        'how to draft, as in \'{"model": "...", "num_speculative_tokens": 5}\', or one key at a time: '
        "--speculative-config.num_speculative_tokens=3",
        default_is="nothing is drafted, except by commands with --speculation",
        short="-sc",
        commands=_EVERYWHERE,
    )
    device: str = option(
        "auto",
        _Device(),
        "device that computes",
        default_is="a GPU if there is one that serves",
        commands=_MEASURED,
    )
    dtype: str = option(
        "auto",
        _DTYPE,
        "type of activations and KV cache",
        note="float16 needs a GPU, float64 a CPU",
        default_is="the checkpoint's on a GPU, float32 on a CPU",
        commands=(*_MEASURED, "demo"),
        details="On a CPU, `auto` is float64 for a checkpoint in float64.",
    )
    load_format: str = _engine_option(
        "auto",
        Choice(LOAD_FORMATS),
        "weights to load",
        note="dummy is random numbers",
        details="With `dummy`, a model's speed can be measured without its weights.",
    )
    model_impl: str = option(
        "auto",
        Choice(MODEL_IMPLS),
        "code that computes the model",
        note="transformers runs its modules on specrs' KV cache, on a CPU",
        commands=_EVERYWHERE,
        details="`auto` uses the decoders of specrs for the families in [what is supported](supported.md), and "
        "transformers for all others. The option holds for target and draft.",
    )
    quantization: str | None = option(
        None,
        QUANTIZATION,
        "type of the projections' weights",
        note=f"the first {len(AT_LOAD)} also quantize weights of 16 and 32 bit at load",
        default_is="the checkpoint's",
        short="-q",
        commands=_EVERYWHERE,
        details="FP8 and INT8 have one scale per output, INT4 one per 128 inputs (64 or 32 if 128 does not divide "
        "them). Embedding and LM head are not quantized. The text is that of the quantized model.",
    )
    kv_cache_dtype: str = option(
        "auto",
        CACHE_DTYPE,
        "type of the KV cache",
        default_is="that of --dtype",
        commands=_EVERYWHERE,
        details="`fp8` is `fp8_e4m3`. Both FP8 types take half the memory of 16 bits. A number is a float of 8 bits "
        "times a scale per layer, which is the checkpoint's or 1. The text is that of a model with rounded K and V.",
    )
    max_model_len: int | None = option(
        None,
        Integer(2, units=True),
        "maximum tokens of prompt and output together",
        default_is="the model's max_position_embeddings; on a CPU at most what fits in the default KV cache",
        commands=_EVERYWHERE,
    )
    max_num_seqs: int | None = _engine_option(
        None,
        Integer(1, 65536),
        "maximum requests that run at once",
        default_is=f"{DEFAULT_MAX_NUM_SEQS}; fewer if layers have states, whose memory this number multiplies",
    )
    max_num_batched_tokens: int | None = _engine_option(
        None,
        Integer(1, _POSITIONS, units=True),
        "maximum tokens per step",
        default_is=f"{BATCHED_TOKENS}, {BATCHED_TOKENS_OF_LARGE_GPUS} on a GPU with 80 GB or more",
    )
    long_prefill_token_threshold: int = _engine_option(
        0,
        Integer(0, _POSITIONS, units=True),
        "maximum prompt tokens of one request per step",
        note="0: three quarters of the step's tokens, plus what other prompts leave unused",
    )
    max_prefill_stall_ms: float | None = _engine_option(
        None,
        Number(0.0, 1e6),
        "milliseconds of a step that prompts may take while other requests decode",
        note="0: no bound",
        default_is=f"{STREAMING_PREFILL_STALL_MS:g} where answers are streamed, else no bound",
        details="Answers are streamed by `AsyncLLM` and the server, not by `LLM`. The engine predicts times from "
        "earlier steps. A step always computes at least 16 prompt tokens, and 512 tokens of draft models' catch-up. "
        "With a bound, the machine's speed decides into which chunks a prompt is divided. Passes other than the exact "
        "one may then differ in last bits.",
    )
    num_reserved_decode_tokens: int = _engine_option(
        64,
        Integer(0, _POSITIONS, units=True),
        "output tokens that KV cache is reserved for, per running request",
        details="Blocks are reserved when another request is admitted. A smaller number lets more requests run at "
        "once in a full KV cache, and preempts them more often.",
    )
    priority_aging_steps: int = _engine_option(
        0,
        Integer(0, _POSITIONS),
        "steps of waiting that count as a priority better by 1",
        note="0: waiting does not count",
        details="With aging, no request waits for ever.",
    )
    block_size: int = _engine_option(16, Integer(1, 1024, power_of_two=True), "positions per KV block")
    num_gpu_blocks_override: int | None = _engine_option(
        None, Integer(1), "number of KV blocks, on any device", default_is="what fits"
    )
    kv_cache_memory_bytes: int | None = _engine_option(
        None,
        Integer(1, units=True),
        "bytes of KV cache",
        default_is=f"{DEFAULT_CPU_KV_CACHE_BYTES >> 30} GiB on a CPU, --gpu-memory-utilization on a GPU",
    )
    gpu_memory_utilization: float = _engine_option(
        0.9,
        Number(0.0, 1.0, open_low=True),
        "share of the GPU's memory to use",
        details="The KV cache gets what is left of it after weights, buffers and graphs.",
    )
    state_cache_memory_bytes: int | None = _engine_option(
        None,
        Integer(1, units=True),
        "bytes of snapshots of states, for prefix hits of models whose layers have states",
        default_is="four snapshots per request, in at most 15 % of the memory",
        details="[Layers with states](supported.md#layers-with-states) says when snapshots are written.",
        device="cpu",
    )
    enable_prefix_caching: bool | None = _engine_option(
        None, Switch(), "reuse the KV of equal prefixes", default_is="on"
    )
    kv_cache_path: str | None = _engine_option(
        None,
        Text("a folder"),
        "on a CPU: folder of a prefix cache that outlives the engine",
        default_is="no such cache",
        details="The KV of finished blocks, target's and draft's, and snapshots of states are written there in the "
        "background. A later request with the same prefix reads them, also after a restart or in another process of "
        "the machine. The text stays the same, bit for bit. "
        "[Serve](guides/serve.md#keep-the-prefix-cache-on-disk) tells more.",
        device="cpu",
    )
    kv_cache_disk_bytes: int | None = _engine_option(
        None,
        Integer(1, units=True),
        "bytes of files in --kv-cache-path",
        note="the least recently used files are deleted beyond",
        default_is=f"{DEFAULT_DISK_CACHE_BYTES >> 30} GiB",
    )
    tensor_parallel_size: int = _engine_option(
        1,
        Integer(1, 1024),
        "processes that compute the target together",
        short="-tp",
        commands=("serve", "bench", "tune"),
        details="Each rank has its part of the weights and of the KV cache ([scaling](scaling.md)). The engine starts "
        "the ranks if torchrun has not. On GPUs, each rank has its own. On a CPU, torch computes the target's passes.",
    )
    distributed_timeout: float = _engine_option(
        60.0, Number(0.0, 86400.0, open_low=True), "seconds after which a rank that does not answer is lost"
    )
    max_steps_in_flight: int | None = _engine_option(
        None,
        Integer(1, 2),
        "maximum steps in flight",
        default_is="1 on a CPU, 2 on a GPU",
        details="`async_scheduling=True` of vLLM is read as 2, False as 1.",
    )
    enforce_eager: bool = _engine_option(False, Switch(), "no CUDA graphs, and on a CPU no native pass")
    cudagraph_capture_sizes: tuple[int, ...] | None = _engine_option(
        None,
        ListOf(Integer(1, 65536), "batch sizes"),
        "batch sizes that have CUDA graphs",
        note="larger steps run eagerly",
        default_is="sizes up to --max-num-seqs",
    )
    threads: int | None = option(
        None,
        Integer(1),
        "CPU threads that compute",
        default_is="SPECRS_NUM_THREADS, else the physical cores, or 1 for a small model that gains nothing by more",
        commands=(*_MEASURED, "demo"),
        details="At start, the engine measures whether a model that fits in a cache gains by more than one thread.",
    )
    cpu_activations: str = _engine_option(
        "auto",
        Choice(CPU_ACTIVATIONS),
        "on a CPU: type that activations are rounded to before they are multiplied by weights",
        details="`int16` rounds blocks of 32 numbers to 16-bit integers. It multiplies them by the integers of "
        "quantized weights. The error is at most 1/65024 of a block's largest number. `int8` "
        "rounds to 8-bit integers instead: an error of at most 1/254. Prompts and drafts then take less time, and the "
        "text changes, as that of llama.cpp does for the same reason. `fp32` rounds nothing; quantized "
        "weights become bf16 numbers at load. `bf16` needs bf16 weights; its error is at most 2^-8 of each number. "
        "Sums are fp32 or exact. `auto` is `int16` for quantized weights, else `fp32`. The option holds for draft "
        "models and heads, too. At any K, the text is that of a model with rounded activations.",
        device="cpu",
    )
    cuda_fp8_rows: bool = _engine_option(
        False,
        Switch(),
        "on a GPU: round activations to FP8 before they are multiplied by FP8 weights",
        details="A rounded number (e4m3) is off by at most 1/16 of its size, or 2^-10 of the scale. Each row has a "
        "scale, or each 128 inputs of a row if the weights have such scales. Prompts then use the tensor cores for "
        "FP8. A decode pass has six more kernels per layer. The option holds for draft models, too. The text is that "
        "of a model with rounded activations.",
        device="cuda",
    )
    cpu_prefill: str = _engine_option(
        "exact",
        Choice(CPU_PREFILLS),
        "code that computes prompts on a CPU",
        details="`exact` is the native pass. Its bits do not depend on the chunks of a prompt, and equal those of "
        "decoding. `amx` uses the AMX tiles of processors that have them, almost twice as fast. Its bits do not "
        "depend on the chunks either, but differ from those of decoding. Text may therefore change after a "
        "preemption or a prefix cache hit. The option holds for draft models, too.",
    )
    seed: int = _serve_option(
        0, Integer(-(2**63), 2**63 - 1), "number from which requests without a seed derive theirs"
    )
    max_logprobs: int = _serve_option(
        20,
        Integer(-1, 2**31 - 1),
        "maximum log probabilities per token that a request may ask for",
        note="-1: the vocabulary",
    )
    logprobs_mode: str = _serve_option(
        "raw_logprobs",
        Choice(LOGPROBS_MODES),
        "what log probabilities are",
        details="`raw_logprobs` is the log-softmax of the model's logits. `processed_logprobs` is the log-softmax "
        "after masks, bias, penalties, temperature and filters. `raw_logits` and `processed_logits` are the logits "
        "before and after these.",
    )
    enable_lora: bool = _serve_option(
        False,
        Switch(),
        "requests may name a LoRA adapter",
        details="An adapter is a PEFT folder for projections of the target's layers. The drafter does not use them. A "
        "GPU keeps room for `max_loras` adapters of `max_lora_rank`.",
    )
    max_loras: int = _serve_option(
        1,
        Integer(1, 1024),
        "maximum different adapters among running requests",
        details="A request with a further adapter waits until one of them is free.",
    )
    max_lora_rank: int = _serve_option(16, Integer(1, 512), "largest rank of an adapter")
    max_cpu_loras: int | None = _serve_option(
        None,
        Integer(1),
        "adapters kept in the host's memory while no request asks for them",
        note="not fewer than --max-loras",
        default_is="--max-loras",
    )
    kv_events_config: KVEventsConfig | None = option(
        None,
        Settings(KVEventsConfig),
        'publishing of prefix cache events, as in \'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\'',
        default_is="no events",
        commands=("serve",),
    )

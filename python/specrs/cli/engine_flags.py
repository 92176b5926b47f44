"""Flags that set a field of `EngineConfig`, one declaration for all commands. Parses values, and leaves checks to the
engine.

A help text names the allowed values as `one of a, b, c`, from the constant that the check reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from specrs.cli.arguments import MergeJSON, human_int
from specrs.config import (
    CPU_PREFILLS,
    DEVICES,
    DTYPES,
    LOAD_FORMATS,
    LOGPROBS_MODES,
    MODEL_IMPLS,
    STREAMING_PREFILL_STALL_MS,
)
from specrs.sampling import MAX_SPECULATIVE_TOKENS
from specrs.speculative_config import AT_LOAD, AUTO, KV_CACHE_DTYPES, METHODS, QUANTIZATIONS


def one_of(values: Iterable[object]) -> str:
    """The part of a help text that names the allowed `values`."""
    return f"one of {', '.join(map(str, values))}"


_SWITCH = argparse.BooleanOptionalAction
MODEL = "checkpoint folder, GGUF file, hub id, or owner/name:TYPE for a GGUF file of the hub"
"""Help of flags that name a model."""
METHOD = f"drafter: {one_of(METHODS)}; or several with commas between, of which at most one has a model"
"""Help of a flag that names the method of speculation."""
SPECULATIVE_TOKENS = f"draft tokens per iteration, 0 to {MAX_SPECULATIVE_TOKENS}, or {AUTO}: the engine chooses"
"""Help of a flag that sets the number of draft tokens."""

_FLAGS: dict[str, dict[str, Any]] = {
    "tokenizer": {"help": "folder or hub id; default: the model's"},
    "tokenizer_revision": {"help": "branch, tag or commit of the tokenizer's hub id"},
    "skip_tokenizer_init": {"action": _SWITCH, "help": "load no tokenizer: prompts and outputs are token ids"},
    "revision": {"help": "branch, tag or commit of the model's hub id"},
    "speculative_config": {
        "action": MergeJSON,
        "metavar": "JSON",
        "help": 'how to draft, as in \'{"model": "...", "num_speculative_tokens": 5}\', or one key at a time: '
        "--speculative-config.num_speculative_tokens=3",
    },
    "device": {"help": f"device that computes: {one_of(DEVICES)}; default: auto, a GPU if there is one that serves"},
    "dtype": {
        "help": f"type of activations and KV cache: {one_of(DTYPES)}; float16 needs a GPU, float64 a CPU; default: "
        "auto, the checkpoint's on a GPU, float32 on a CPU"
    },
    "load_format": {"help": f"weights to load: {one_of(LOAD_FORMATS)}; dummy is random numbers; default: auto"},
    "model_impl": {
        "help": f"code that computes the model: {one_of(MODEL_IMPLS)}; transformers runs its modules on specrs' KV "
        "cache, on a CPU; default: auto"
    },
    "quantization": {
        "help": f"type of the projections' weights: {one_of(QUANTIZATIONS)}; {', '.join(AT_LOAD)} also quantize "
        "weights of 16 and 32 bit at load; default: the checkpoint's"
    },
    "kv_cache_dtype": {"help": f"type of the KV cache: {one_of(KV_CACHE_DTYPES)}; default: auto, that of --dtype"},
    "max_model_len": {"type": human_int, "help": "tokens of prompt and output together; default: the model's"},
    "max_num_seqs": {"type": int, "help": "requests that run at once; default: 256"},
    "max_num_batched_tokens": {"type": human_int, "help": "tokens per step; default: 2048"},
    "long_prefill_token_threshold": {
        "type": human_int,
        "help": "maximum prompt tokens of one request per step; 0: three quarters of the step's, and what other "
        "prompts leave unused; default: 0",
    },
    "max_prefill_stall_ms": {
        "type": float,
        "help": "milliseconds that prompts may take of a step in which other requests decode; 0: no bound; default: "
        f"{STREAMING_PREFILL_STALL_MS:g}",
    },
    "num_reserved_decode_tokens": {
        "type": human_int,
        "help": "output tokens that KV cache is reserved for, per running request; default: 64",
    },
    "priority_aging_launches": {
        "type": int,
        "help": "steps of waiting that count as a priority better by 1; 0: waiting does not count; default: 0",
    },
    "block_size": {"type": int, "help": "positions per KV block, a power of two; default: 16"},
    "num_gpu_blocks_override": {"type": int, "help": "number of KV blocks, on any device; default: what fits"},
    "kv_cache_memory_bytes": {"type": human_int, "help": "bytes of KV cache; default: 4 GiB on a CPU"},
    "gpu_memory_utilization": {"type": float, "help": "share of the GPU's memory to use; default: 0.9"},
    "enable_prefix_caching": {"action": _SWITCH, "help": "reuse the KV of equal prefixes; default: on"},
    "tensor_parallel_size": {"type": int, "help": "processes that compute the target together; default: 1"},
    "distributed_timeout": {
        "type": float,
        "help": "seconds after which a process of -tp that does not answer is lost; default: 60",
    },
    "launch_depth": {
        "type": int,
        "help": f"steps planned before the oldest has ended: {one_of((1, 2))}; default: 1 on a CPU, 2 on a GPU",
    },
    "enforce_eager": {"action": _SWITCH, "help": "no CUDA graphs, and on a CPU no native pass; default: off"},
    "cudagraph_capture_sizes": {
        "nargs": "+",
        "type": int,
        "metavar": "N",
        "help": "batch sizes that have CUDA graphs; larger steps run eagerly",
    },
    "threads": {
        "type": int,
        "metavar": "N",
        "help": "CPU threads that compute; default: SPECRS_NUM_THREADS, else the physical cores, or 1 for a small "
        "model that gains nothing by more",
    },
    "cpu_bf16_rows": {
        "action": _SWITCH,
        "help": "on a CPU: round activations to bf16 before they are multiplied by bf16 weights; default: off",
    },
    "cuda_fp8_rows": {
        "action": _SWITCH,
        "help": "on a GPU: round activations to FP8 before they are multiplied by FP8 weights; default: off",
    },
    "cpu_prefill": {"help": f"code that computes prompts on a CPU: {one_of(CPU_PREFILLS)}; default: exact"},
    "seed": {"type": int, "help": "number that requests without a seed derive theirs from; default: 0"},
    "max_logprobs": {"type": int, "help": "most log probabilities per token that a request may ask for; default: 20"},
    "logprobs_mode": {"help": f"what log probabilities are: {one_of(LOGPROBS_MODES)}; default: raw_logprobs"},
    "enable_lora": {"action": _SWITCH, "help": "requests may name a LoRA adapter; default: off"},
    "max_loras": {"type": int, "help": "different adapters of the requests that run at once; default: 1"},
    "max_lora_rank": {"type": int, "help": "largest rank of an adapter; default: 16"},
    "max_cpu_loras": {
        "type": int,
        "help": "adapters kept in memory while no request asks for them; default: --max-loras",
    },
    "kv_events_config": {
        "action": MergeJSON,
        "metavar": "JSON",
        "help": 'publishing of prefix cache events, as in \'{"enable_kv_cache_events": true, "endpoint": '
        '"tcp://*:5557"}\'',
    },
}
_SHORT = {"speculative_config": "-sc", "quantization": "-q", "tensor_parallel_size": "-tp"}
"""vLLM's short forms."""


def add_engine_flags(to: argparse._ActionsContainer, *fields: str) -> None:
    """Add the flag of each of `fields` to the parser or group `to`. Its default is None, which leaves the engine's."""
    for field in fields:
        flags = [f"--{field.replace('_', '-')}", *([_SHORT[field]] if field in _SHORT else [])]
        to.add_argument(*flags, **_FLAGS[field])


def engine_settings(arguments: argparse.Namespace, *fields: str) -> dict[str, Any]:
    """Arguments of `LLM` for the `fields` whose flags were given. The engine chooses the others."""
    return {field: value for field in fields if (value := getattr(arguments, field)) is not None}

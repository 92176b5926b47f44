"""Flags of `vllm serve`: those without a counterpart here, refused by name whatever their value, and short forms.

From vLLM's own lists: `vllm/entrypoints/openai/cli_args.py`, and `vllm/engine/arg_utils.py` with the names that it has
dropped since. Flags whose default changes nothing are not here but in `serve._HONOURED` and `vllm_arguments`.
"""

from __future__ import annotations

import argparse
from typing import Any

NOT_IMPLEMENTED = (
    *("lora-extra-vocab-size", "enable-lora-bias", "long-lora-scaling-factors", "qlora-adapter-name-or-path"),
    *("enable-prompt-adapter", "max-prompt-adapters", "max-prompt-adapter-token", "prompt-adapters"),
    *("tool-parser-plugin", "tool-server", "reasoning-parser-plugin", "max-log-len", "enable-force-include-usage"),
    *("enable-tokenizer-info-endpoint", "enable-log-outputs", "enable-log-deltas", "cohere-is-reasoning-model"),
    *("cohere-format", "log-error-stack", "tokens-only", "fingerprint-mode", "fingerprint-value"),
    *("data-parallel-supervisor-port", "dp-supervisor-probe-interval-s", "dp-supervisor-probe-timeout-s"),
    *("dp-supervisor-probe-failure-threshold", "disable-access-log-for-endpoints", "enable-ssl-refresh", "ssl-ciphers"),
    *("disable-fastapi-docs", "h11-max-incomplete-event-size", "h11-max-header-count", "enable-offline-docs"),
    *("enable-flash-late-interaction", "collect-detailed-traces", "kv-transfer-config"),
    *("speculative-model", "speculative-model-quantization", "num-speculative-tokens", "ngram-prompt-lookup-max"),
    *("ngram-prompt-lookup-min", "speculative-draft-tensor-parallel-size", "speculative-max-model-len"),
    *("speculative-disable-by-batch-size", "speculative-disable-mqa-scorer", "spec-decoding-acceptance-method"),
    *("typical-acceptance-sampler-posterior-threshold", "typical-acceptance-sampler-posterior-alpha"),
    *("disable-logprobs-during-spec-decoding", "preemption-mode", "ignore-patterns", "disable-async-output-proc"),
    *("override-neuron-config", "override-pooler-config", "worker-cls", "guided-decoding-backend"),
    *("tokenizer-pool-size", "tokenizer-pool-type", "tokenizer-pool-extra-config", "ray-workers-use-nsight"),
    *("num-scheduler-steps", "num-lookahead-slots", "scheduler-delay-factor", "multi-step-stream-outputs"),
    *("use-v2-block-manager", "code-revision", "max-parallel-loading-workers", "disable-mm-preprocessor-cache"),
    *("master-addr", "master-port", "nnodes", "node-rank", "distributed-timeout-seconds", "dcp-comm-backend"),
    *("dcp-kv-cache-interleave-size", "cp-kv-cache-interleave-size", "prefill-context-parallel-size"),
    *("data-parallel-rank", "data-parallel-start-rank", "data-parallel-size-local", "data-parallel-address"),
    *("data-parallel-rpc-port", "data-parallel-backend", "data-parallel-hybrid-lb", "data-parallel-external-lb"),
    *("all2all-backend", "enable-dbo", "ubatch-size", "enable-elastic-ep", "dbo-decode-token-threshold"),
    *("dbo-prefill-token-threshold", "disable-nccl-for-dp-synchronization", "enable-eplb", "eplb-config"),
    *("expert-placement-strategy", "worker-extension-cls", "prefix-caching-hash-algo", "kv-sharing-fast-prefill"),
    *("mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size", "mamba-cache-mode", "kv-offloading-size"),
    *("kv-offloading-backend", "offload-backend", "cpu-offload-params", "offload-group-size", "offload-num-in-group"),
    *("offload-prefetch-step", "offload-params", "language-model-only", "enable-mm-embeds", "media-io-kwargs"),
    *("mm-processor-cache-gb", "mm-processor-cache-type", "mm-shm-cache-max-object-size-mb", "mm-encoder-only"),
    *("mm-encoder-tp-mode", "mm-encoder-attn-backend", "interleave-mm-strings", "skip-mm-profiling"),
    *("video-pruning-rate", "enable-tower-connector-lora", "specialize-active-lora", "show-hidden-metrics-for-version"),
    *("kv-cache-metrics", "kv-cache-metrics-sample", "cudagraph-metrics", "enable-layerwise-nvtx-tracing"),
    *("enable-mfu-metrics", "enable-logging-iteration-details", "disable-chunked-mm-input", "scheduler-cls"),
    *("disable-hybrid-kv-cache-manager", "stream-interval", "cuda-graph-sizes", "enable-flashinfer-autotune"),
    *("moe-backend", "ec-transfer-config", "attention-config", "kernel-config", "optimization-level"),
    *("performance-mode", "weight-transfer-config", "aggregate-engine-logging", "fail-on-environ-validation"),
    *("hf-config-path", "allow-deprecated-quantization", "enable-return-routed-experts", "pooler-config"),
    *("override-attention-dtype", "io-processor-plugin", "safetensors-load-strategy", "use-tqdm-on-load"),
    *("pt-load-map-location", "grpc", "enable-reasoning", "logits-processor-pattern", "allowed-media-domains"),
    *("guided-decoding-disable-fallback", "guided-decoding-disable-any-whitespace", "quantization-config"),
    *("guided-decoding-disable-additional-properties", "reasoning-config", "diffusion-config", "ec-manager-config"),
    *("return-sampling-mask", "use-fp64-gumbel", "enable-trace-replay", "model-class-overrides", "ir-op-priority"),
    *("enable-cumem-allocator", "enable-nccl-comm-suspend", "renderer-num-workers", "safetensors-prefetch-num-threads"),
    *("safetensors-prefetch-block-size", "mamba-backend", "mamba-ssu-algorithm", "mamba-cache-philox-rounds"),
    *("enable-mamba-cache-stochastic-rounding", "cpu-distributed-timeout-seconds", "numa-bind", "numa-bind-nodes"),
    *("numa-bind-cpus", "device-ids", "dcp-q-replicate", "data-parallel-multi-port-external-lb", "dp-sync-interval"),
    *("enable-batch-sharded-sampling", "enable-ep-weight-filter", "enable-fault-tolerance", "fault-tolerance-config"),
    *("prefix-cache-retention-interval", "prefix-match-unit", "kv-cache-dtype-skip-layers", "use-replayssm"),
    *("replayssm-buffer-len", "mm-hasher-algorithm", "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-path"),
    *("mm-encoder-fp8-scale-save-path", "mm-encoder-fp8-scale-save-margin", "video-pruning-method", "mm-tensor-ipc"),
    *("mm-processor-device", "mm-ipc-gpu-memory-gb", "mm-device-do-normalize", "lora-target-modules"),
    *("enable-mixed-moe-lora-format", "enable-moe-shared-loras", "jit-monitor-mode", "jit-monitor-verbose"),
    *("max-num-scheduled-tokens", "scheduler-reserve-full-isl", "watermark", "prefill-schedule-interval"),
    *("enable-bf16x3-router-gemm", "linear-backend", "gdn-prefill-backend", "kda-prefill-backend"),
)

SHORT_FORMS = {
    "pipeline-parallel-size": "-pp",
    "data-parallel-size": "-dp",
    "data-parallel-rank": "-dpn",
    "data-parallel-start-rank": "-dpr",
    "data-parallel-size-local": "-dpl",
    "data-parallel-address": "-dpa",
    "data-parallel-rpc-port": "-dpp",
    "data-parallel-backend": "-dpb",
    "data-parallel-hybrid-lb": "-dph",
    "data-parallel-external-lb": "-dpe",
    "data-parallel-multi-port-external-lb": "-dpm",
    "decode-context-parallel-size": "-dcp",
    "prefill-context-parallel-size": "-pcp",
    "enable-expert-parallel": "-ep",
    "nnodes": "-n",
    "node-rank": "-r",
    "api-server-count": "-asc",
    "speculative-draft-tensor-parallel-size": "-spec-draft-tp",
    "compilation-config": "-cc",
    "attention-config": "-ac",
    "diffusion-config": "-dc",
    "optimization-level": "-O",
}
"""vLLM's short forms of flags that are refused, or served at their defaults alone."""

INSTEAD = {
    "speculative-model": "--spec-model",
    "num-speculative-tokens": "--spec-tokens",
    "speculative-model-quantization": "--speculative-config.quantization",
    "ngram-prompt-lookup-max": "--speculative-config.prompt_lookup_max",
    "ngram-prompt-lookup-min": "--speculative-config.prompt_lookup_min",
    "speculative-draft-tensor-parallel-size": "--speculative-config.draft_tensor_parallel_size",
    "speculative-max-model-len": "--speculative-config.max_model_len",
    "speculative-disable-by-batch-size": "--spec-tokens auto",
    "spec-decoding-acceptance-method": "--speculative-config.rejection_sample_method",
    "enable-reasoning": "--reasoning-parser",
}
"""Rejected flags, and what to use in their place."""


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        short = "" if str(option).startswith("--") else f" (--{self.dest})"
        instead = f"; use {INSTEAD[self.dest]}" if self.dest in INSTEAD else ""
        parser.error(f"{option}{short}: not implemented{instead}")


def flags(name: str) -> list[str]:
    """`--name`, and the short form that vLLM has for it."""
    return [f"--{name}", *([SHORT_FORMS[name]] if name in SHORT_FORMS else [])]


def add_refusals(parser: argparse.ArgumentParser) -> None:
    """Give `parser` those of these flags that it does not have."""
    known = set(parser._option_string_actions)
    for name in NOT_IMPLEMENTED:
        for flag in (*flags(name), f"--no-{name}"):
            if flag not in known:
                parser.add_argument(
                    flag, action=_Refuse, nargs="*", default=argparse.SUPPRESS, dest=name, help=argparse.SUPPRESS
                )

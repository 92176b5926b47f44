"""OpenVINO GenAI's `LLMPipeline` on a job, with paged attention and continuous batching. Models are folders of IR."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from peers.job import NGRAM, Group, Ids, Job, measure, read_job

KV_CACHE_GB = 2


def properties(job: Job) -> dict[str, Any]:
    """Return the properties of the device. Arithmetic and KV cache have the job's dtype; with quantized weights they
    have the defaults: the cache is INT8, and activations may be quantized."""
    common = {
        "INFERENCE_NUM_THREADS": job.threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        "CACHE_DIR": "",
    }
    if job.is_quantized:
        return common
    dtype = {"float32": "f32", "bfloat16": "bf16"}[job.dtype]
    # Where a processor has no bf16 arithmetic it computes in fp32 whatever the hint, and refuses another cache.
    native = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {
        "INFERENCE_PRECISION_HINT": dtype,
        "KV_CACHE_PRECISION": dtype if native else "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        **common,
    }


def main(job: Job) -> None:
    """Measure the job. Times of first tokens are the pipeline's metrics. With drafts, batch 1 counts the target's
    passes; for larger batches, where a pass serves several requests, passes are computed as drafted tokens over K."""
    chosen = properties(job)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = KV_CACHE_GB
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = job.batch
    scheduler.max_num_batched_tokens = 4096
    extra: dict[str, Any] = {"scheduler_config": scheduler}
    began = time.perf_counter()
    if job.draft is not None:
        extra["draft_model"] = openvino_genai.draft_model(job.draft, "CPU", **chosen)
    if job.method:
        extra["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(job.model, "CPU", **chosen, **extra)
    load_s = time.perf_counter() - began
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos = job.new_tokens, False, True
    if job.draft is not None:
        config.num_assistant_tokens, config.assistant_confidence_threshold = job.k, 0.0
    if job.method:
        config.num_assistant_tokens, config.max_ngram_size = job.k, NGRAM

    def run(prompts: Ids) -> Group:
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        start = time.perf_counter()
        output = pipeline.generate(inputs, config)
        total_s = time.perf_counter() - start
        tokens = [[int(token) for token in request] for request in output.tokens]
        first_s = output.perf_metrics.get_ttft().mean / 1e3
        return Group(tokens, first_s, total_s, len(tokens), passes(output, job))

    versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
    measure(job, run, versions, load_s)


def passes(output: Any, job: Job) -> float | None:
    """Return the passes of the target after the prompt's, for each request; None without drafts, and for drafts from
    the text, which it does not report."""
    if job.draft is None:
        return None
    metrics = output.extended_perf_metrics
    if job.batch == 1:
        return len(metrics.main_model_metrics.raw_metrics.m_durations) - 1
    return float(metrics.get_num_draft_tokens() / job.k)


if __name__ == "__main__":
    main(read_job())

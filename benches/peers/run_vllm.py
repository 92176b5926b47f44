"""vLLM's offline `LLM` on a job, its CPU build. Its environment variables are set by `peers.engines`."""

from __future__ import annotations

import time
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams

from peers.job import Group, Ids, Job, measure, read_job

DRAFTS = "vllm:spec_decode_num_drafts"


def main(job: Job) -> None:
    """Measure the job. Times of first tokens are the requests' own metrics; passes are the counter of drafts, which is
    one per request."""
    speculative: dict[str, Any] | None = None
    if job.draft is not None:
        speculative = {"method": "draft_model", "model": job.draft, "num_speculative_tokens": job.k}
    began = time.perf_counter()
    llm = LLM(
        model=job.model,
        speculative_config=speculative,
        dtype=job.dtype,
        max_model_len=job.context,
        max_num_seqs=job.batch,
        enable_prefix_caching=False,
        disable_log_stats=False,  # they hold the times of first tokens
    )
    load_s = time.perf_counter() - began
    params = SamplingParams(temperature=0.0, max_tokens=job.new_tokens, ignore_eos=True, detokenize=False)

    def drafts() -> float:
        values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return values.get(DRAFTS) or values.get(f"{DRAFTS}_total") or 0

    def run(prompts: Ids) -> Group:
        before = drafts() if job.draft else 0.0
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        total_s = time.perf_counter() - start
        passes = drafts() - before if job.draft else None
        first_s = sum(output.metrics.first_token_latency for output in outputs) / len(outputs)
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        return Group(ids, first_s, total_s, len(outputs), passes)

    measure(job, run, {"vllm": vllm.__version__, "torch": torch.__version__}, load_s)


if __name__ == "__main__":  # vLLM starts processes that import this module again
    main(read_job())

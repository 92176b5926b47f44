"""specrs's offline `LLM` on a job. Imports no torch, which native passes do not need."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from specrs import LLM, SamplingParams
from specrs.speculative_config import for_repeats

from peers.job import Group, Ids, Job, measure, read_job


def main(job: Job) -> None:
    """Measure the job. Times of first tokens and counts of drafts are the requests' own metrics."""
    speculative = None
    if job.drafts:
        drafter = for_repeats({"method": job.method}) if job.method else {"model": job.draft}
        speculative = {**drafter, "num_speculative_tokens": job.k}
    began = time.perf_counter()
    llm = LLM(
        model=job.model,
        speculative_config=speculative,
        dtype="auto" if job.is_quantized else job.dtype,
        max_model_len=job.context,
        max_num_seqs=job.batch,
        enable_prefix_caching=False,
        threads=job.threads,
        cpu_prefill=job.cpu_prefill,
    )
    load_s = time.perf_counter() - began
    sampling: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9} if job.sampled else {"temperature": 0.0}
    params = SamplingParams(max_tokens=job.new_tokens, ignore_eos=True, detokenize=False, seed=0, **sampling)

    def run(prompts: Ids) -> Group:
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        total_s = time.perf_counter() - start
        metrics = [output.metrics for output in outputs]
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        passes = None
        if job.drafts:
            # An iteration without drafts gives one token; those with drafts one more than were accepted.
            accepted = sum(metric.accepted_tokens for metric in metrics)
            passes = sum(map(len, ids)) - len(prompts) - accepted
        first_s = sum(metric.time_to_first_token for metric in metrics) / len(metrics)
        return Group(ids, first_s, total_s, len(ids), passes)

    measure(job, run, {"specrs": version("specrs")}, load_s)


if __name__ == "__main__":
    main(read_job())

"""Requests that report the logits of every output token, and the logits of a text without drafts. Holds no tests."""

import functools
from pathlib import Path

import numpy as np
from specrs.engine.request import Request
from specrs.sampling import SamplingParams

from engine.harness import make_engine, run


def with_logits(request_id: int, prompt: list[int], k: int | None, engine_k: int, tokens: int) -> Request:
    """Return a greedy request that reports all logits of every output token, in an engine with the options `LOGITS`."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        num_speculative_tokens=k,
    )
    return Request(request_id, prompt, params, num_speculative_tokens=engine_k)


def logits_of(job: Request) -> np.ndarray:
    """Return a request's logits as `[tokens, V]` fp32, by id."""
    assert job.logprobs is not None
    rows = np.empty((len(job.logprobs), len(job.logprobs[0].top_ids)), np.float32)
    for row, entry in zip(rows, job.logprobs, strict=True):
        row[entry.top_ids] = entry.top_logprobs
    return rows


LOGITS = {"logprobs_mode": "raw_logits", "max_logprobs": -1}


@functools.cache
def alone(target: Path, prompt: tuple[int, ...], dtype: str, bf16_rows: bool = False) -> np.ndarray:
    """Return the logits of the prompt's text without drafts, in one chunk on one thread."""
    fields = LOGITS | {"max_num_batched_tokens": 512, "threads": 1, "cpu_activations": "bf16" if bf16_rows else "auto"}
    engine = make_engine(target, None, k=0, dtype=dtype, **fields)
    job = with_logits(0, list(prompt), 0, 0, 24)
    engine.add_request(job)
    run(engine)
    return logits_of(job)

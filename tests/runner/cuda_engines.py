"""Small requests for engines on the CUDA runner, which Triton's interpreter runs here, and on the CPU loop. Holds no
tests."""

from __future__ import annotations

from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.sampling import SamplingParams

K = 3
PROMPTS = [[5, 9, 2, 33, 7, 7, 1, 12, 40, 3, 22], [5, 9, 2, 33, 7, 7, 1, 12], [60]]


def generate(
    engine: Engine, params: list[SamplingParams], num_tokens: int = 5, prompts: list[list[int]] = PROMPTS
) -> list[Request]:
    """Every prompt to its end; ids, log probabilities and books are in the requests."""
    requests = [
        Request(i, prompt, own.replace(max_tokens=num_tokens, ignore_eos=True), num_speculative_tokens=K, seed=100 + i)
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.num_free_blocks == engine.scheduler.num_blocks
    return requests

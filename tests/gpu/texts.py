"""Texts of engines on a GPU: drawn prompts, requests run to their ends, how far two lists agree. Holds no tests."""

import random
from collections.abc import Sequence

from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.models.lora import LoRAAdapter
from specrs.sampling import SamplingParams

VOCAB = 1531
K = 4
GREEDY = SamplingParams(temperature=0.0)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 150))] for _ in range(count)]


def submit(
    engine: Engine,
    params: Sequence[SamplingParams],
    num_tokens: int,
    seed: int = 0,
    loras: Sequence[LoRAAdapter | None] | None = None,
) -> list[Request]:
    given = zip(prompts(len(params), seed), params, loras or [None] * len(params), strict=True)
    requests = [
        Request(
            i,
            prompt,
            own.replace(max_tokens=num_tokens, ignore_eos=True),
            num_speculative_tokens=K,
            seed=50 + i,
            lora=lora,
        )
        for i, (prompt, own, lora) in enumerate(given)
    ]
    for request in requests:
        engine.add_request(request)
    return requests


def generate(
    engine: Engine,
    params: Sequence[SamplingParams],
    num_tokens: int = 60,
    loras: Sequence[LoRAAdapter | None] | None = None,
) -> list[list[int]]:
    requests = submit(engine, params, num_tokens, loras=loras)
    exhaust(engine)
    engine.scheduler.check_integrity()
    assert all(request.error is None for request in requests)
    return [request.output_token_ids for request in requests]


def exhaust(engine: Engine) -> None:
    while engine.has_unfinished():
        engine.step()


def share_of_equal(mine: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of tokens before the first difference of each text."""
    same = 0
    for ours, reference in zip(mine, theirs, strict=True):
        differing = [i for i, (a, b) in enumerate(zip(ours, reference, strict=True)) if a != b]
        same += differing[0] if differing else len(reference)
    return same / sum(map(len, theirs))

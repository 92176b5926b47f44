"""Checks that hold for every kind of layer with a state: drafts and snapshots change no logits."""

import random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from models.harness import Feeder

VOCAB = 211
TOKENS = random.Random(0).choices(range(VOCAB), k=23)

ROUNDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4)
"""Number of drafts of each pass, and how many of them are accepted at most."""
ROUNDS_OR_PROMPTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), min_size=1, max_size=7)
"""Rounds as `ROUNDS` has them, and whether the pass feeds prompt chunks instead."""


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    scale = float(expected.abs().max())
    assert (found.double() - expected).abs().max() <= bound * scale, "logits differ"


def check_snapshot(model: Any, rounds: list[tuple[int, int]], prompt: int, length: int) -> Any:
    """Check by torch that rejected drafts leave no trace, and that a text continued from a snapshot after `length`
    tokens has the same logits. Return the states. Each round feeds K drafts, of which the first ones are accepted.

    Snapshots are written in a prompt, by a verification, or when the next pass finds drafts accepted; never from a
    draft that may be rejected.
    """
    expected = Feeder(model).feed_chunks(TOKENS, [1] * len(TOKENS))
    feeder, wrong, snapshots = Feeder(model), random.Random(1), ((0, length, 5),)
    feeder.feed({0: [(TOKENS[p], p) for p in range(prompt)]}, prompts=True, snapshots=snapshots)
    at = covered = prompt
    for drafts, accepted in rounds:
        rows = [(TOKENS[at + i] if i <= accepted else wrong.randrange(VOCAB), at + i) for i in range(drafts + 1)]
        found = feeder.feed({0: rows}, snapshots=snapshots)
        kept = min(drafts, accepted) + 1
        close(found[:kept], expected[at : at + kept], 1e-12)
        covered, at = at + 1, at + kept
        if at + 5 > len(TOKENS):
            break
    states = feeder.cache.states
    assert (5 in states.snapshots) == (length <= covered)
    if length <= covered:
        states.restore(0, 5)
        found = feeder.feed({0: [(TOKENS[p], p) for p in range(length, len(TOKENS))]}, prompts=True)
        close(found, expected[length:], 1e-12)
    return states


def check_native_bits(model: Any, rounds: list[tuple[int, int, bool]], seed: int) -> None:
    """Check that native bits do not depend on drafts: two requests, whose passes feed prompt chunks, or K drafts of
    which the first ones are accepted."""
    n = random.Random(seed)
    texts = [n.choices(range(VOCAB), k=40) for _ in range(2)]
    expected = [Feeder(model).feed_chunks(text, [1] * len(text)) for text in texts]
    feeder, at = Feeder(model, num_requests=2), [0, 0]
    for drafts, accepted, prompts in rounds:
        rows: dict[int, list[tuple[int, int]]] = {}
        for b, text in enumerate(texts):
            right = drafts if prompts else min(accepted + b, drafts)
            rows[b] = [(text[at[b] + i] if i <= right else n.randrange(VOCAB), at[b] + i) for i in range(drafts + 1)]
        found = feeder.feed(rows, prompts=prompts)
        for b in range(2):
            right = (drafts if prompts else min(accepted + b, drafts)) + 1
            own = found[b * (drafts + 1) :][:right]
            assert torch.equal(own, expected[b][at[b] : at[b] + right])
            at[b] += right

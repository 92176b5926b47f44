"""A world of 16 tokens, small enough to enumerate: every context has its own logits, every pair of tokens its exact
probability. 200,000 streams of speculative decoding run in it, by the rules alone, and are compared by chi-square."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from specrs.verify.processing import process_logits
from specrs.verify.rejection import verify_rejection
from specrs.verify.sample import draw_draft
from torch import Tensor

from verify.reference import Request, distribution
from verify.rows import constraints, sampling_rows, token_counts, union

VOCAB = 16
NODES = 1 + VOCAB + VOCAB**2  # contexts of 0, 1 and 2 tokens after the history
PROMPT, OUTPUT = [3, 5, 3, 11], [7, 7, 2]
STREAMS = 200_000

PATHS: list[list[int]] = [
    [],
    *([a] for a in range(VOCAB)),
    *([a, b] for a in range(VOCAB) for b in range(VOCAB)),
]


def first_child(node: Tensor) -> Tensor:
    """Return the node of the context that is one token longer, with token 0 as that token."""
    return 1 + VOCAB * node


@dataclass(frozen=True)
class World:
    """Processed logits of every context, `[NODES, VOCAB]` fp32, and the exact probabilities of a pair of tokens."""

    target: Tensor
    draft: Tensor
    pairs: NDArray[np.float64]  # [VOCAB, VOCAB], of the first two tokens


def raw_logits(seed: int) -> Tensor:
    """Return random logits of every context, spread like those of a confident model."""
    return torch.randn((NODES, VOCAB), generator=torch.Generator().manual_seed(seed)) * 1.5


def process(raw: Tensor, request: Request, *, coarse: bool = False) -> Tensor:
    """Return processed logits of every context, each as a flat row whose drafts are the tokens on its path."""
    rows, steps = sampling_rows([request] * NODES)
    contexts = [[*PROMPT, *OUTPUT, *path] for path in PATHS]
    masks = constraints([request] * NODES, VOCAB, contexts, [len(OUTPUT) + len(path) for path in PATHS])
    counts = token_counts([PROMPT] * NODES, [[*OUTPUT, *path] for path in PATHS], VOCAB)
    return process_logits(raw, rows, union(steps), constraints=masks, counts=counts, coarse=coarse)


def world(request: Request, draft: str) -> World:
    """Return a world. `draft` is "unrelated", "equal" or "negative" (of the target's logits)."""
    target = raw_logits(0)
    drafts = {"unrelated": raw_logits(1), "equal": target, "negative": -target}[draft]

    def exact(node: int) -> NDArray[np.float64]:
        return distribution(target[node].numpy().astype(np.float64), request, PROMPT, [*OUTPUT, *PATHS[node]])

    pairs = exact(0)[:, None] * np.stack([exact(1 + token) for token in range(VOCAB)])
    # "equal" shall be equal to the bit, which the coarse cut is not.
    return World(process(target, request), process(drafts, request, coarse=draft != "equal"), pairs)


@dataclass(frozen=True)
class Noise:
    """Random numbers for one iteration of S streams, which decode independently. Each stream has up to two drafts."""

    draft: Tensor  # [S, 2, VOCAB]
    accept: Tensor  # [S, 2]
    last: Tensor  # [S, VOCAB]


def make_noise(seed: int, streams: int = STREAMS) -> Noise:
    """Return random numbers for one iteration of `streams` streams, in the ranges of the counter-based generator:
    23-bit uniforms, and Gumbel values of 32-bit uniforms."""
    g = torch.Generator().manual_seed(seed)

    def gumbel(*shape: int) -> Tensor:
        words = torch.randint(0, 1 << 32, shape, generator=g).to(torch.float64).add_(0.5).mul_(2.0**-32)
        return words.log_().neg_().log_().neg_().to(torch.float32)

    accept = torch.randint(0, 1 << 23, (streams, 2), generator=g).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return Noise(gumbel(streams, 2, VOCAB), accept, gumbel(streams, VOCAB))


Verify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Noise], tuple[Tensor, Tensor]]
"""(p, q_start, q, drafts, num_drafts, nodes drafted at [S, K], noise) -> (num_accepted, tokens)."""


def by_rejection(
    p: Tensor, q_start: Tensor, q: Tensor, drafts: Tensor, num_drafts: Tensor, _: Tensor, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Verify by the `rejection` rule of specrs."""
    return verify_rejection(p, q_start, q, drafts, num_drafts, noise.accept[:, : drafts.shape[1]], noise.last)


def iterate(w: World, node: Tensor, num_drafts: Tensor, noise: Noise, verify: Verify) -> tuple[Tensor, Tensor]:
    """Run one iteration of S streams at the contexts `node` `[S]`, `num_drafts` `[S]` of at most 2 each."""
    k = int(num_drafts.max())
    nodes, drafts, qs = [node], [], []
    for i in range(k):
        token, q = draw_draft(w.draft[nodes[-1]], noise.draft[:, i])
        drafts.append(token)
        qs.append(torch.where((i < num_drafts)[:, None], q, torch.nan))  # stale columns may hold anything
        nodes.append(first_child(nodes[-1]) + token)
    rows = torch.stack(nodes, dim=1)
    used = torch.arange(k + 1) <= num_drafts[:, None]
    q_start = torch.zeros(len(node) + 1, dtype=torch.int64)
    torch.cumsum(num_drafts + 1, 0, out=q_start[1:])
    p = w.target.softmax(dim=-1)[rows[used]]
    return verify(p, q_start, torch.stack(qs, dim=1), torch.stack(drafts, dim=1), num_drafts, rows[:, :k], noise)


def decode_pairs(
    w: World, noise: tuple[Noise, Noise], verify: Verify = by_rejection
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the counts of the first two tokens of S streams: one iteration at K_r of 0, 1 or 2, and another one if the
    first gave one token.

    Returns: `(counts [VOCAB, VOCAB], accepted [3, 3])`: number of streams by pair of tokens, and number of first
    iterations by (K_r, accepted drafts).
    """
    streams = len(noise[0].last)
    num_drafts = torch.arange(streams) % 3
    accepted, tokens = iterate(w, torch.zeros(streams, dtype=torch.int64), num_drafts, noise[0], verify)
    short = (accepted == 0).nonzero().squeeze(1)
    again = Noise(noise[1].draft[short], noise[1].accept[short], noise[1].last[short])
    _, more = iterate(w, first_child(torch.tensor(0)) + tokens[short, 0], torch.ones_like(short), again, verify)
    second = tokens[:, 1].clone()
    second[short] = more[:, 0]
    counts = torch.bincount(tokens[:, 0] * VOCAB + second, minlength=VOCAB**2).view(VOCAB, VOCAB)
    return counts.numpy(), torch.bincount(num_drafts * 3 + accepted, minlength=9).view(3, 3).numpy()


def sigma(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> float:
    """Return how many standard deviations chi-square lies above its mean; infinite if a token of probability 0
    occurred.

    Cells that expect fewer than 10 are pooled: chi-square needs some.
    """
    counts, probs = counts.ravel(), probs.ravel()
    if counts[probs == 0].any():
        return math.inf
    expected = counts.sum() * probs
    large = expected >= 10
    observed = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    if expected[-1] < 10:  # too few even together: join the smallest large cell
        j = int(np.argmin(expected[:-1]))
        observed[j] += observed[-1]
        expected[j] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    degrees = len(observed) - 1
    if degrees == 0:
        return 0.0
    return (float(((observed - expected) ** 2 / expected).sum()) - degrees) / math.sqrt(2 * degrees)

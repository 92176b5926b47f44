"""A host loop built from specrs's KV blocks, slots, acceptance statistics and verification, around toy models of its
own.

    python examples/host_loop.py

The "models" look at what lies in their paged cache, so a wrong slot or block changes the text. Greedy, one request.
"""

import numpy as np
import torch
from specrs.core import AcceptanceTracker, BlockPool, SlotMapper
from specrs.kernels.verification import verify_greedy

VOCAB, DIM, BLOCK_SIZE, NUM_BLOCKS, K = 50, 16, 4, 32, 4


class Model:
    """Next token from an exponentially forgotten sum over cached values; any function of the cache would do."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(VOCAB, DIM, generator=generator)
        self.head = torch.randn(DIM, VOCAB, generator=generator)
        self.head += noise * torch.randn(DIM, VOCAB, generator=torch.Generator().manual_seed(seed + 1))
        self.cache = torch.full((NUM_BLOCKS * BLOCK_SIZE, DIM), torch.nan)

    def feed(self, tokens: list[int], first: int, slots: np.ndarray) -> torch.Tensor:
        """Return the argmax after each of `tokens`, which are at positions `first`, ...; `slots` are the slots of
        positions 0 to the last."""
        self.cache[torch.from_numpy(slots[first:])] = self.embedding[tokens]
        best = []
        for end in range(first + 1, first + len(tokens) + 1):
            decay = (-0.9) ** torch.arange(end - 1, -1, -1)
            best.append((decay @ self.cache[torch.from_numpy(slots[:end])] @ self.head).argmax())
        return torch.stack(best)


def generate(prompt: list[int], num_tokens: int, k: int = K) -> tuple[list[int], AcceptanceTracker]:
    """Continue `prompt` greedily with at most `k` drafts an iteration; the text is the target's own for every k."""
    target, draft = Model(seed=1), Model(seed=1, noise=0.1)
    pool, mapper, statistics = BlockPool(NUM_BLOCKS), SlotMapper(BLOCK_SIZE), AcceptanceTracker(max(k, 1))
    tokens, table, end = list(prompt), [], len(prompt) + num_tokens

    def slots(count: int) -> np.ndarray:
        while len(table) * BLOCK_SIZE < count:
            table.append(pool.allocate())
        out = np.empty(count, dtype=np.int64)
        mapper.map(np.array(table, dtype=np.int64), np.arange(count, dtype=np.int64), out)
        return out

    tokens.append(int(target.feed(tokens, 0, slots(len(tokens)))[-1]))
    draft_len = 0
    while len(tokens) < end:
        n, drafts = len(tokens), []
        for _ in range(min(k, end - n - 1)):
            fed = (tokens + drafts)[draft_len:]
            drafts.append(int(draft.feed(fed, draft_len, slots(draft_len + len(fed)))[-1]))
            draft_len += len(fed)
        best = target.feed([tokens[-1], *drafts], n - 1, slots(n + len(drafts)))
        accepted, new = verify_greedy(
            best[None], torch.tensor([drafts], dtype=torch.int64), torch.tensor([len(drafts)])
        )
        tokens += new[0, : int(accepted) + 1].tolist()
        draft_len = min(draft_len, len(tokens) - 1)
        if drafts:
            statistics.record(len(drafts), int(accepted))
    for block in reversed(table):
        pool.free(block)
    pool.check_integrity()
    return tokens[len(prompt) :], statistics


if __name__ == "__main__":
    text, statistics = generate([3, 14, 15, 9, 26], 40)
    print(f"{text}\n{statistics.drafts} drafts", end=", ")
    print(f"{statistics.accepted_tokens} of {statistics.draft_tokens} tokens accepted")

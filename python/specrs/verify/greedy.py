"""Greedy verification: a draft is accepted while it equals the target's argmax. Draws no random numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def verify_greedy(target_tokens: Tensor, draft_tokens: Tensor, num_drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of drafts that the target would have generated itself.

    With a_i the target's argmax at row i, accepted is m = max{j : d_i = a_{i-1} for all 1 <= i <= j <= K_r}, and the
    tokens are d_1..d_m, a_m; since d_i = a_{i-1} up to m, they are a_0..a_m. (Stern et al. 2018, blockwise decoding;
    the temperature -> 0 limit of Leviathan et al. 2023, algorithm 1.)

    Args:
        target_tokens: argmax of the target's logits, `[B, K+1]` int64; column i is the token for position n + i.
        draft_tokens: `[B, K]` int64; columns from `num_drafts` on are ignored.
        num_drafts: K_r of each row, `[B]` int64, 0 <= K_r <= K.

    Returns:
        `(num_accepted [B] int64, tokens [B, K+1] int64)`; columns of tokens past num_accepted are meaningless.
        Nothing is mutated.
    """
    k = draft_tokens.shape[1]
    if k == 0:
        return torch.zeros_like(num_drafts), target_tokens
    column = torch.arange(k, device=draft_tokens.device)
    stands = (draft_tokens == target_tokens.narrow(1, 0, k)).logical_and_(column < num_drafts[:, None])
    return torch.where(stands, k, column).amin(dim=1), target_tokens  # the first that does not

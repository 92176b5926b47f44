"""Verification by shared noise: draft and target draw with the same Gumbel values, and a draft is accepted while the
draws agree.

Every emitted token is the target's own draw argmax(log p_i + g) at its position, with g a function of (seed,
position): the same token that decoding without drafts writes there. So the text does not depend on K, the draft
model, the batch or a preemption, as far as the target's logits do not (they round differently in other batch
shapes). It is lossless, keeps no q, and accepts less than `rejection`: the coupling is not maximal (Daliri,
Musco and Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding": an acceptance of
at least (1 - d) / (1 + d) where `rejection` has 1 - d, d the total variation). Makes no noise.
"""

from __future__ import annotations

from torch import Tensor

from specrs.verify.greedy import verify_greedy
from specrs.verify.rejection import row_index
from specrs.verify.sample import draw


def verify_coupled(
    logits: Tensor, noise: Tensor, q_start: Tensor, draft_tokens: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw the target's token in every row and accept the longest prefix of drafts that equals it.

    Args:
        logits: processed target logits, `[N, V]`; row q_start[b] + i is for position n_b + i. Greedy rows as point
            masses.
        noise: `[N, V]` standard Gumbel values, row by row those of (seed, position), purpose gumbel. The drafting
            pass for that position must have used the same ones, else drafts are merely accepted less often.
        q_start: `[B+1]` int64.
        draft_tokens: `[B, K]` int64; columns from `num_drafts` on are ignored.
        num_drafts: K_r, `[B]` int64.

    Returns:
        `(num_accepted [B] int64, tokens [B, K+1] int64)`; columns of tokens past num_accepted are meaningless.
        Nothing is mutated.
    """
    drawn = draw(logits, noise)
    return verify_greedy(drawn[row_index(q_start, draft_tokens.shape[1] + 1)], draft_tokens, num_drafts)

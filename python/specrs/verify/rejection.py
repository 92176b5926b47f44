"""Speculative sampling by rejection: the emitted tokens are distributed as the target's own. Draws no noise, builds
no p or q.

Leviathan, Kalman, Matias 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2). With p_i the processed target
distribution of row i (after d_1..d_i) and q_i the distribution that d_{i+1} was drawn from: accept d_{i+1} with
probability min(1, p_i(d_{i+1}) / q_i(d_{i+1})); at the first rejection, at row m, draw from r = norm(max(0, p_m -
q_m)); after K_r acceptances draw from p_{K_r}.

Greedy rows need no case: with point masses for p and q (`greedy_as_point_mass`) a draft is accepted if it is the
argmax.

Three independent sources: the noise that drew the drafts, the uniforms, and the noise of the last draw. Reusing the
drafts' noise in the last draw is the classic bias: given that d was drawn and rejected, the noise of the other tokens
is no longer Gumbel.

Keys of that noise, for the counter-based generator: drafts and uniforms by the position of the draft, the last draw
by n, the iteration's start (once per iteration, so never twice, and it can be made before m is known), or by n + m,
its own position. Draft noise and uniforms of a position after the first rejection come up again in the next
iteration. That is no reuse: m and the emitted tokens depend only on d_1..d_{m+1} and u_1..u_{m+1}, so given these the
later ones are as good as new.

Numerics (fp32). `u * q < p` and not `u < p / q`: no division, nothing for q = 0, and p == q always accepts, because u
<= 1 - 2^-24 gives u * q < q after rounding for every normal q. Uniforms on a grid of 2^-23 shift an acceptance
probability by at most 2^-24. A softmax row is off by about 1e-7 of each entry, so max(0, p - q) of two equal
distributions holds 1e-7 of rounding, and it is drawn from with that same probability: nowhere does the error of an
emitted token's probability exceed a few 1e-7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specrs.verify.sample import draw


def verify_rejection(
    target_probs: Tensor,
    q_start: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    uniforms: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept drafts by `count_accepted`, and draw the token after them by `draw_after`.

    Args:
        target_probs: p, `[N, V]`; row q_start[b] + i is p_i of sequence b.
        q_start: `[B+1]` int64; sequence b has at least num_drafts[b] + 1 rows.
        draft_probs: q, `[B, K, V]`; any values, also NaN, in columns from num_drafts on.
        draft_tokens: `[B, K]` int64, ids of the vocabulary; columns from num_drafts on are ignored.
        num_drafts: K_r, `[B]` int64, 0 <= K_r <= K.
        uniforms: `[B, K]` in (0, 1), at most 1 - 2^-24.
        noise: `[B, V]` standard Gumbel values.

    Returns:
        `(num_accepted [B] int64, tokens [B, K+1] int64)`; columns of tokens past num_accepted are meaningless. Nothing
            is mutated.
    """
    accepted = count_accepted(target_probs, q_start, draft_probs, draft_tokens, num_drafts, uniforms)
    last = draw_after(target_probs, q_start, draft_probs, num_drafts, accepted, noise)
    return accepted, append_token(draft_tokens, accepted, last)


def count_accepted(
    target_probs: Tensor,
    q_start: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """Return m `[B]` int64, the number of drafts before the first with u * q >= p. Arguments as in
    `verify_rejection`."""
    k = draft_tokens.shape[1]
    if k == 0:
        return torch.zeros_like(num_drafts)
    drafted = torch.arange(k, device=num_drafts.device) < num_drafts[:, None]
    p = target_probs[row_index(q_start, k), draft_tokens]
    q = draft_probs.gather(2, draft_tokens[:, :, None]).squeeze(2)
    return ((uniforms * q < p) & drafted).to(torch.int64).cumprod(dim=1).sum(dim=1)


def draw_after(
    target_probs: Tensor, q_start: Tensor, draft_probs: Tensor, num_drafts: Tensor, num_accepted: Tensor, noise: Tensor
) -> Tensor:
    """Draw the token after m accepted drafts, `[B]` int64: from norm(max(0, p_m - q_m)) if m < K_r, from p_m if m =
    K_r.

    If the residual is empty (p <= q everywhere, which rounding can cause for p = q), the token is drawn from p_m.
    """
    p = target_probs.index_select(0, q_start[:-1] + num_accepted)
    k = draft_probs.shape[1]
    if k > 0:
        sequence = torch.arange(num_drafts.shape[0], device=num_drafts.device)
        q = draft_probs[sequence, num_accepted.clamp(max=k - 1)]
        residual = (p - q).clamp_(min=0.0)
        rejected = (num_accepted < num_drafts)[:, None] & (residual.sum(dim=-1, keepdim=True) > 0)
        p = torch.where(rejected, residual, p)
    return draw(p.log(), noise)


def append_token(draft_tokens: Tensor, num_accepted: Tensor, last: Tensor) -> Tensor:
    """Return `[B, K+1]` int64: drafts `[B, K]` with `last` `[B]` in column num_accepted."""
    column = torch.arange(draft_tokens.shape[1] + 1, device=last.device)
    padded = torch.cat((draft_tokens, last[:, None]), dim=1)
    return torch.where(column == num_accepted[:, None], last[:, None], padded)


def row_index(q_start: Tensor, width: int) -> Tensor:
    """Return the flat row of each column, `[B, width]` int64: q_start[b] + i, but at most the sequence's last row."""
    return torch.minimum(q_start[:-1, None] + torch.arange(width, device=q_start.device), q_start[1:, None] - 1)

"""Verification of drafts on plain tensors, on any device, for other stacks. Runs no model and keeps no state.

The rules are those of `specrs.verify`, which documents each with its source:

    verify_greedy     accept while the draft equals the target's argmax
    verify_rejection  accept with probability min(1, p / q), then draw from norm(max(0, p - q)) or from p
    verify_coupled    draft and target draw with the same noise; accept while the draws agree

For B requests of at most K drafts, N = sum(K_r + 1) flat rows (`q_start` `[B+1]` int64, row q_start[b] + i is the
distribution after i drafts) and V tokens:

    verify_greedy(target_tokens [B, K+1] int64, draft_tokens [B, K] int64, num_drafts [B] int64)
    verify_rejection(target_probs [N, V], q_start, draft_probs [B, K, V], draft_tokens, num_drafts,
                     uniforms [B, K], noise [B, V])
    verify_coupled(logits [N, V], noise [N, V], q_start, draft_tokens, num_drafts)

Each returns `(num_accepted [B] int64, tokens [B, K+1] int64)`: columns 0..num_accepted of a row are its new tokens,
the others mean nothing. Nothing is mutated, and no shape depends on data. Uniforms and Gumbel noise of any source
serve; `specrs.core.philox_uniform` and `philox_gumbel` make them by (seed, position).
"""

from specrs.verify.coupled import verify_coupled
from specrs.verify.greedy import verify_greedy
from specrs.verify.rejection import verify_rejection

__all__ = ["verify_coupled", "verify_greedy", "verify_rejection"]

"""Draws from processed logits with given Gumbel noise, for plain sampling and for drafting. Makes no noise and no
logits."""

from __future__ import annotations

from torch import Tensor


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Draw one token per row, distributed as softmax(logits): argmax(x + g) with standard Gumbel noise g (Gumbel-max).

    Args:
        logits: processed, `[N, V]`; -inf is never drawn.
        noise: `[N, V]` standard Gumbel values, finite.

    Returns:
        `[N]` int64; the lowest id in a tie. Normalising the logits changes nothing, because it adds the same number to
            a whole row.
    """
    return (logits + noise).argmax(dim=-1)


def draw_draft(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row, and return q for the `rejection` rule: `(tokens [N] int64, q = softmax(logits) [N, V])`.

    q comes from the very logits of the draw. It has to be kept: a q computed again from another temperature, filter,
    penalty state or rounding is not the distribution that was drawn from, and verification is then biased.
    """
    return draw(logits, noise), logits.softmax(dim=-1)

"""Acceptance at given rates, whatever the models say: for timing only, the text is no model's. Draws no noise."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_at_rates(rates: Tensor, uniforms: Tensor, num_drafts: Tensor) -> Tensor:
    """Number of drafts accepted, `[B]` int64: the i-th stands with probability rates[i] over all drafts.

    Given that those before it stand it does with rates[i] / rates[i - 1], so position by position the shares come out
    as given, and the acceptance length is 1 + sum(rates) where nothing cuts the drafts short.

    Args:
        rates: `[K]` in [0, 1], not increasing.
        uniforms: `[B, K]` in (0, 1).
        num_drafts: K_r, `[B]` int64.
    """
    before = torch.cat((rates.new_ones(1), rates))[: len(rates)]
    drafted = torch.arange(len(rates), device=rates.device) < num_drafts[:, None]
    return ((uniforms * before < rates) & drafted).to(torch.int64).cumprod(dim=1).sum(dim=1)

"""Log probabilities of emitted tokens and of the most probable ones. Chooses no tokens and formats no outputs."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from specrs.verify.thresholds import descending_keys
from specrs.verify.token_logprobs import TokenLogprobs

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""Values that `logprobs` can report, under vLLM's names."""


def logprob_values(mode: LogprobsMode, raw: Tensor, processed: Tensor) -> Tensor:
    """Return the values `[N, V]` that `mode` reports.

    `raw_logprobs` (vLLM's default) is log_softmax of the model's logits, before masks, penalties and temperature.
    `processed_logprobs` is log_softmax after all of them, so tokens outside top-k, top-p or min-p are -inf. A greedy
    row's processed logits are those after the penalties, without temperature. `raw_logits` and `processed_logits` are
    those logits themselves. All four depend only on the row's context, so they are the same as without drafts.

    Args:
        raw: `[N, V]`.
        processed: `[N, V]`, from `filter_logits`; the output of `process_logits` would report a greedy row as certain.
    """
    if mode not in get_args(LogprobsMode):
        raise ValueError(f"logprobs_mode={mode!r}: must be one of {', '.join(get_args(LogprobsMode))}")
    logits = raw if mode.startswith("raw") else processed
    return logits.log_softmax(dim=-1) if mode.endswith("logprobs") else logits


def token_logprobs(values: Tensor, tokens: Tensor, num_top: int) -> TokenLogprobs:
    """Look up `tokens` `[N]` int64 in `values` `[N, V]` and find the `num_top` largest; mutates nothing.

    float64 values are rounded to fp32 first. Key and id are packed into one integer, because topk orders equal values
    at will: 32 bits of key, 31 of id.
    """
    values = values.to(torch.float32)
    column = torch.arange(values.shape[1], device=values.device)
    order = (descending_keys(values) << 31) | column
    chosen = order.gather(1, tokens[:, None])
    top_ids = order.topk(num_top, dim=-1, largest=False, sorted=True).values & ((1 << 31) - 1)
    return TokenLogprobs(
        value=values.gather(1, tokens[:, None]).squeeze(1),
        rank=(order <= chosen).sum(dim=-1),
        top_ids=top_ids,
        top_values=values.gather(1, top_ids),
    )

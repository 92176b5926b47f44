"""Greedy continuations and acceptance counts of speculation, computed by transformers alone. Uses no code of specrs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


def load(path: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Load the checkpoint at `path` as a transformers model for evaluation."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch's grouped product has no float64
    return model


def generate(
    model: Any, prompt: list[int], max_new_tokens: int, eos: list[int] | None = None, **kwargs: Any
) -> list[int]:
    """Return the new tokens of greedy `model.generate`, the stop token included; `eos=None` never stops."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        **kwargs,
    )
    return out[0, len(prompt) :].tolist()


def generate_all(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Return greedy continuations of several prompts in one batch, in an eighth of the time of `generate` for each.

    Prompts are padded on the left and padding is masked: in a family of `checkpoints.FAMILIES` a text is the one that
    its prompt gets alone, except where rounding decides between two tokens. (Texts of Gemma 2 change with padding.) For
    Llama 4 transformers counts padding among the positions by which queries grow, so each prompt is generated alone.
    Nothing stops before `max_new_tokens`.
    """
    if model.config.model_type == "llama4_text":
        return [generate(model, prompt, max_new_tokens) for prompt in prompts]
    longest = max(map(len, prompts))
    out = model.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, longest:].tolist()


@dataclass
class Statistics:
    """Acceptance counts of one or more requests."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    per_position: list[int] = field(default_factory=list)


@torch.inference_mode()
def count_acceptance(
    target: Any, draft: Any, prompt: list[int], max_new_tokens: int, k: int, eos: list[int], statistics: Statistics
) -> list[int]:
    """Decode one prompt by greedy speculation, written out with two transformers models. Adds to `statistics`.

    The first token is the target's. Then each iteration with n tokens so far takes K_r = min(k, limit - n - 1) greedy
    drafts one by one. The target reads all of them, and the longest prefix that equals its own tokens is kept, with one
    more token. Drafts are counted before a stop token ends the text.
    """
    tokens, limit = list(prompt), len(prompt) + max_new_tokens
    statistics.per_position += [0] * (k - len(statistics.per_position))
    target_cache, draft_cache = DynamicCache(), DynamicCache()
    tokens.append(int(_feed(target, target_cache, tokens)[-1].argmax()))
    while tokens[-1] not in eos and len(tokens) < limit:
        n = len(tokens)
        k_r = min(k, limit - n - 1)
        proposed = list(tokens)
        for _ in range(k_r):
            proposed.append(int(_feed(draft, draft_cache, proposed)[-1].argmax()))
        best = _feed(target, target_cache, proposed)[-k_r - 1 :].argmax(dim=-1).tolist()
        drafts = proposed[n:]
        accepted = next((i for i in range(k_r) if drafts[i] != best[i]), k_r)
        if k_r:
            statistics.drafts += 1
            statistics.draft_tokens += k_r
            statistics.accepted_tokens += accepted
            for i in range(accepted):
                statistics.per_position[i] += 1
        for token in best[: accepted + 1]:
            tokens.append(token)
            if token in eos:
                break
        _forget(target_cache, len(tokens) - 1)
        _forget(draft_cache, len(tokens) - 1)
    return tokens[len(prompt) :]


def _feed(model: Any, cache: Any, tokens: list[int]) -> torch.Tensor:
    """Feed the tokens that `cache` has not seen yet, and return their logits."""
    start = cache.get_seq_length()
    return model(torch.tensor([tokens[start:]]), past_key_values=cache, use_cache=True).logits[0]


def _forget(cache: Any, length: int) -> None:
    """Drop keys and values after the first `length` tokens from `cache`."""
    surplus = cache.get_seq_length() - length
    if surplus > 0:
        cache.crop(-surplus)


@torch.inference_mode()
def count_parallel_acceptance(
    target: Any,
    draft: Any,
    mask: int,
    prompt: list[int],
    max_new_tokens: int,
    k: int,
    eos: list[int],
    statistics: Statistics,
) -> tuple[list[int], list[list[int]]]:
    """Do what `count_acceptance` does, with all drafts of an iteration from one pass of the draft: over the text and
    K_r - 1 mask tokens after it. Nothing is cached. Returns the new tokens, and the drafts of each iteration that has
    some."""
    tokens, limit, proposed = list(prompt), len(prompt) + max_new_tokens, []
    statistics.per_position += [0] * (k - len(statistics.per_position))
    tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
    while tokens[-1] not in eos and len(tokens) < limit:
        k_r = min(k, limit - len(tokens) - 1)
        drafts = []
        if k_r:
            logits = draft(torch.tensor([tokens + [mask] * (k_r - 1)])).logits[0]
            drafts = logits[-k_r:].argmax(dim=-1).tolist()
            proposed.append(drafts)
        best = target(torch.tensor([tokens + drafts])).logits[0, -k_r - 1 :].argmax(dim=-1).tolist()
        accepted = next((i for i in range(k_r) if drafts[i] != best[i]), k_r)
        if k_r:
            statistics.drafts += 1
            statistics.draft_tokens += k_r
            statistics.accepted_tokens += accepted
            for i in range(accepted):
                statistics.per_position[i] += 1
        for token in best[: accepted + 1]:
            tokens.append(token)
            if token in eos:
                break
    return tokens[len(prompt) :], proposed

"""Compares two tokenizers: whether they are the same, and which tokens both have. Reads no file."""

from __future__ import annotations

from specrs.errors import TokenizerMismatchError, short
from specrs.tokenizer.text import Tokenizer

_PROBES = (
    "Hello, world! It's 2026.",
    "def f(x):\n    return {**x, 'k': [1, 2.5]}\n\t# done\n",
    "Grüße, naïve café; 日本語 и русский 🎉",
    "  12345 67890\r\n\r\n\u00a0",
)
"""Texts that the tokenizers of draft and target must encode equally: words, code, other scripts, digits and white
space."""


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Check that every id that both tokenizers have means the same in both.

    Each tokenizer may have further tokens, as padding and as added tokens: a draft neither proposes nor is fed ids that
    its model has no row for.

    Raises `TokenizerMismatchError` with the first difference.
    """
    reason = _vocabulary_difference(_used(target), _used(draft))
    if reason is None:
        for probe in _PROBES:
            if target.encode(probe, add_special_tokens=False) != draft.encode(probe, add_special_tokens=False):
                reason = f"the vocabularies agree, but {probe!r} is split differently"
                break
    if reason is not None:
        raise TokenizerMismatchError(
            f"speculative_config.model={short(draft.source)}: its tokenizer differs from that of {target.source}: "
            f"{reason}; use a draft model with the target's tokenizer, or set "
            "use_heterogeneous_vocab=True"
        )


def _used(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the tokens that stand for text, by token."""
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    return {token: token_id for token, token_id in vocab.items() if token_id not in tokenizer.unused_ids}


def shared_ids(target: Tokenizer, draft: Tokenizer) -> list[tuple[int, int]]:
    """Return pairs (target's id, draft's id) of the tokens that both tokenizers have. Special tokens match by name, BOS
    and EOS by role, others by their bytes. Pairs are ascending, and each id occurs at most once."""
    ours, theirs = _meanings(target), _meanings(draft)
    shared = {token_id: theirs[meaning] for meaning, token_id in ours.items() if meaning in theirs}
    for role in ("bos_token_id", "eos_token_id"):
        mine, other = getattr(target, role), getattr(draft, role)
        if None not in (mine, other) and mine not in shared and other not in shared.values():
            shared[mine] = other
    return sorted(shared.items())


def unknown_id(draft: Tokenizer) -> int:
    """Return the id that the draft model is fed for a token that its tokenizer does not have: its unknown token, or
    else its EOS.

    Raises `TokenizerMismatchError` if it has neither.
    """
    for role in ("unk_token", "eos_token"):
        token_id = draft.special_id(role)
        if token_id is not None:
            return token_id
    raise TokenizerMismatchError(
        f"speculative_config.model={short(draft.source)}: its tokenizer has no unk_token and no eos_token, and "
        "use_heterogeneous_vocab=True feeds one of them for tokens that it does not know"
    )


def _meanings(tokenizer: Tokenizer) -> dict[tuple[bool, bytes], int]:
    """Return token ids by (whether it is an added token, its bytes). Of several such tokens, the lowest id is taken."""
    backend = tokenizer.backend
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    found: dict[tuple[bool, bytes], int] = {}
    for token, token_id in sorted(_used(tokenizer).items(), key=lambda item: item[1]):
        meaning = token.encode() if token in added else tokenizer.bytes_of(token)
        found.setdefault((token in added, meaning), token_id)
    return found


def _vocabulary_difference(target: dict[str, int], draft: dict[str, int]) -> str | None:
    """Return a description of the first difference: an id with different tokens, or a token with different ids. None if
    there is none."""
    ours, theirs = ({token_id: token for token, token_id in vocab.items()} for vocab in (target, draft))
    for token_id, token in sorted(ours.items()):
        other = theirs.get(token_id)
        if other == token or (other is None and token not in draft):
            continue
        where = f"id {token_id} is {short(token)} for the target and "
        what = f"{short(other)} for the draft" if other is not None else f"id {draft[token]} for the draft"
        return f"{where}{what} ({len(target)} tokens in the target's vocabulary, {len(draft)} in the draft's)"
    return None

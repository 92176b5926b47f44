"""A draft model whose tokenizer is not the target's. It drafts tokens that both tokenizers have, or text.

Tokens: token-level intersection (TLI). Text: string-level exact match (SLEM). Both are from Timor et al. 2025.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from specrs.core import TextDrafter
from specrs.drafters.base import Declared, DraftLimits, Loading
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.draft_model import DraftModelOptions, LoadedDraftModel, bundled
from specrs.drafters.method import ModelMethod
from specrs.drafters.other_tokenizer.text import Bridge, Vocabulary
from specrs.drafters.other_tokenizer.vocabulary import SharedVocabulary
from specrs.errors import InvalidConfigError, TokenizerMismatchError, invalid
from specrs.model_values import DEFAULT_CPU_KV_CACHE_BYTES
from specrs.models.base import Model
from specrs.models.errors import OF_DRAFT, about
from specrs.options import Switch, option
from specrs.tokenizer import Tokenizer, end_ids, shared_ids, unknown_id

logger = logging.getLogger("specrs")


@dataclass(frozen=True, kw_only=True)
class OtherTokenizerOptions(DraftModelOptions):
    """Options of a draft model, and the option that allows another tokenizer."""

    use_heterogeneous_vocab: bool = option(
        False,
        Switch(),
        "the draft may have another tokenizer than the target",
        details="Under `coupled`, the draft model's text is compared with the target's (string-level exact match). "
        "Under `rejection`, it proposes only tokens that both vocabularies have (token-level intersection). In place "
        "of the target's other tokens, it is fed its unknown token, or its EOS.",
    )


@dataclass(frozen=True)
class LoadedSharedTokens(LoadedDraftModel):
    """A draft model that drafts tokens which both vocabularies have. `LoadedDrafter` documents the members."""

    shared: SharedVocabulary

    def on_cpu(self, limits: DraftLimits, num_blocks: int) -> CpuDrafter:
        cache = self.model.allocate_cache(num_blocks, limits.block_size)
        return CpuDrafter(model=self.model, kv_cache=cache, shared=self.shared)


@dataclass(frozen=True)
class LoadedTextDraft(LoadedDraftModel):
    """A draft model that reads and writes text, on a CPU. `LoadedDrafter` documents the members."""

    bridge: Bridge

    has_own_blocks = True

    def declare(self, limits: DraftLimits) -> Declared:
        return TextDrafter()

    def on_cpu(self, limits: DraftLimits, num_blocks: int) -> CpuDrafter:
        # A text may be longer in its own tokens than in the target's.
        longest, size = min(limits.draft_max_model_len, 2 * limits.max_model_len), limits.block_size
        blocks = (limits.max_num_seqs + 1) * -(-longest // size)  # the padding row has blocks, too
        needed, most = blocks * self.model.bytes_per_block(size), DEFAULT_CPU_KV_CACHE_BYTES
        if needed > most:
            reason = (
                f"its KV of {longest} positions for each request takes {needed / 2**30:.1f} GiB, allowed: "
                f"{most / 2**30:.0f}; fewer max_num_seqs, or a shorter speculative_config.max_model_len"
            )
            raise invalid(InvalidConfigError, "max_num_seqs", limits.max_num_seqs, reason)
        return CpuDrafter(
            model=self.model,
            kv_cache=self.model.allocate_cache(blocks, size),
            bridge=self.bridge,
            text_limits=(longest, limits.max_num_batched_tokens, size),
        )


def load(loading: Loading) -> LoadedDraftModel:
    """Load a draft model, and both tokenizers.

    Raises `InvalidConfigError` or a subclass if a file is missing, wrong or not supported; `TokenizerMismatchError` if
    it drafts tokens and the tokenizers share none.
    """
    with about(*OF_DRAFT):
        model = loading.load_model()
    ours = Tokenizer(*loading.target_tokenizer)
    with about(*OF_DRAFT):
        theirs = Tokenizer(loading.path, loading.revision)
    if loading.drafts_text:
        return LoadedTextDraft(model, Bridge(_vocabulary(ours, loading.target), _vocabulary(theirs, model)))
    return LoadedSharedTokens(model, _shared(loading.path, ours, theirs, loading.target, model))


def _vocabulary(tokenizer: Tokenizer, model: Model) -> Vocabulary:
    bos = tokenizer.bos_token_id
    begins = bos is not None and tokenizer.encode("a")[:1] == [bos]
    ends = end_ids(model.eos_token_ids, tokenizer, model.vocab_size)
    return Vocabulary(tokenizer.backend, bos if begins else None, ends)


def _shared(draft: str, ours: Tokenizer, theirs: Tokenizer, target: Model, model: Model) -> SharedVocabulary:
    """Return the tokens that both tokenizers have. Raises TokenizerMismatchError if there are none."""
    sizes, unknown = (target.vocab_size, model.vocab_size), unknown_id(theirs)
    pairs = [pair for pair in shared_ids(ours, theirs) if pair[0] < sizes[0] and pair[1] < sizes[1]]
    if not pairs:
        reason = f"its tokenizer shares no token with that of {ours.source}, so it can propose none"
        raise invalid(TokenizerMismatchError, "speculative_config.model", draft, reason)
    logger.info(
        "%s shares %d of its %d tokens with the target's %d, and is fed id %d for others",
        draft,
        len(pairs),
        theirs.vocab_size,
        ours.vocab_size,
        unknown,
    )
    return SharedVocabulary(tuple(pairs), unknown, sizes[0])


OTHER_TOKENIZER = ModelMethod(
    name="draft_model",
    options=OtherTokenizerOptions,
    what="a draft",
    bundled=bundled,
    load=load,
    serves=lambda speculative: bool(speculative.use_heterogeneous_vocab),
    same_tokenizer=False,
)

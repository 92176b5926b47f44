"""MTP head: drafts from final hidden states of the target, with a layer that is in the target's checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

from specrs.drafters.base import Loading
from specrs.drafters.hidden_state import LoadedHead, reject_generic_target
from specrs.drafters.method import ModelMethod
from specrs.drafters.mtp.files import open_mtp
from specrs.drafters.mtp.weights import MtpFacts
from specrs.drafters.vocabulary import DraftVocabularyOptions
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.errors import OF_TARGET, about

logger = logging.getLogger("specrs")


@dataclass(frozen=True, kw_only=True)
class MtpOptions(DraftVocabularyOptions):
    """Options of `method="mtp"`."""


def load(loading: Loading) -> LoadedHead:
    """Load the head in the target's checkpoint. Raises `InvalidConfigError` or a subclass if it is missing, wrong or
    not supported."""
    reject_generic_target(loading)
    with about(*OF_TARGET):
        files = open_mtp(
            loading.path,
            cast("DecoderFacts", loading.target),
            revision=loading.revision,
            size=loading.options.draft_vocab_size,
            counts=loading.options.draft_vocab_counts,
        )
        head: MtpFacts = loading.load_head(files)
    logger.info("%s: its MTP head drafts %d of %d ids", loading.path, head.vocab_size, loading.target.vocab_size)
    return LoadedHead(head)


MTP = ModelMethod(
    name="mtp",
    options=MtpOptions,
    what="an MTP head",
    bundled=None,
    load=load,
    is_model=False,
    same_tokenizer=False,  # a head has no tokenizer
)

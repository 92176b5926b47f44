"""MTP head: drafts from final hidden states of the target, with a layer that is in the target's checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from specrs.drafters.base import Loading
from specrs.drafters.hidden_state import LoadedHead, load_head, vocabulary_options
from specrs.drafters.method import ModelMethod
from specrs.drafters.mtp.files import open_mtp
from specrs.drafters.vocabulary import DraftVocabularyOptions
from specrs.models.errors import OF_TARGET

logger = logging.getLogger("specrs")


@dataclass(frozen=True, kw_only=True)
class MtpOptions(DraftVocabularyOptions):
    """Options of `method="mtp"`."""


def load(loading: Loading) -> LoadedHead:
    """Load the head in the target's checkpoint. Raises `InvalidConfigError` or a subclass if it is missing, wrong or
    not supported."""
    _, head = load_head(loading, OF_TARGET, open_mtp, **vocabulary_options(loading))
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

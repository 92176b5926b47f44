"""MTP head: drafts from final hidden states of the target, with a layer that is in the target's checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

from specrs.drafters.base import Loading
from specrs.drafters.hidden_state import LoadedHead, reject_generic_target
from specrs.drafters.method import MethodOptions, ModelMethod, wrong
from specrs.drafters.mtp.files import open_mtp
from specrs.drafters.mtp.weights import MtpFacts
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.errors import OF_TARGET, about
from specrs.options import Integer, Text, option

logger = logging.getLogger("specrs")


@dataclass(frozen=True, kw_only=True)
class MtpOptions(MethodOptions):
    """Options of `method="mtp"`."""

    draft_vocab_size: int | None = option(
        None,
        Integer(1),
        "number of token ids that an MTP head drafts",
        default_is="all",
        details="They are the first ids, or the most frequent ones of `draft_vocab_counts`. Fewer ids make a draft "
        "cheaper, because the LM head is most of its cost in small models. The text stays the same.",
    )
    draft_vocab_counts: str | None = option(
        None,
        Text(),
        "JSON file with the count of each token id, by which `draft_vocab_size` ids are chosen",
        default_is="the first ids are chosen",
    )

    def check_rules(self) -> None:
        """Raise `InvalidConfigError` for `draft_vocab_counts` without `draft_vocab_size`."""
        if self.draft_vocab_counts is not None and self.draft_vocab_size is None:
            reason = "needs draft_vocab_size, the number of ids to choose; set it"
            raise wrong("draft_vocab_counts", self.draft_vocab_counts, reason)


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

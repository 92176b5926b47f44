"""EAGLE-3 head: drafts from hidden states of the target (Li et al. 2025)."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass

from specrs.drafters.base import Loading
from specrs.drafters.eagle3.files import check_head, open_head
from specrs.drafters.hidden_state import LoadedHead, load_head
from specrs.drafters.method import CheckpointOptions, ModelMethod, wrong
from specrs.models.errors import OF_DRAFT
from specrs.options import Integer, ListOf, Number, option

logger = logging.getLogger("specrs")


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(CheckpointOptions):
    """Options of `method="eagle3"`."""

    aux_hidden_state_layer_ids: tuple[int, ...] | None = option(
        None,
        ListOf(Integer(0), "layer ids"),
        "target layers at whose entry the head reads hidden states, ascending",
        default_is="the checkpoint's, else 2, n // 2 and n - 3 of n layers",
        details="Id 2 stands for what two layers have computed.",
    )
    rope_theta: float | None = option(
        None,
        Number(0.0, math.inf, open_low=True),
        "base of the head's rotary embedding",
        default_is="its checkpoint's",
    )

    def check_rules(self) -> None:
        """Raise `InvalidConfigError` if `aux_hidden_state_layer_ids` are not ascending."""
        ids = self.aux_hidden_state_layer_ids
        if ids is not None and any(later <= earlier for earlier, later in itertools.pairwise(ids)):
            reason = "must rise: hidden states are read in the order of the layers"
            raise wrong("aux_hidden_state_layer_ids", list(ids), reason)


def bundled() -> str:
    """Return the folder of the bundled target's head."""
    from specrs.pair import EAGLE3

    return str(EAGLE3)


def load(loading: Loading) -> LoadedHead:
    """Load a head for the target. Raises `InvalidConfigError` or a subclass if a file is missing, wrong or not
    supported."""
    ids, theta = loading.options.aux_hidden_state_layer_ids, loading.options.rope_theta
    _, head = load_head(loading, OF_DRAFT, open_head, aux_hidden_state_layer_ids=ids, rope_theta=theta)
    layers = list(head.aux_layer_ids)
    logger.info("%s reads hidden states where they enter layers %s of the target, counted from 0", loading.path, layers)
    return LoadedHead(head)


EAGLE3 = ModelMethod(
    name="eagle3",
    options=Eagle3Options,
    what="an EAGLE-3 head",
    bundled=bundled,
    check=check_head,
    load=load,
    is_model=False,
    same_tokenizer=False,  # a head has no tokenizer; its ids are checked against the target's
    quantized_target=False,
)

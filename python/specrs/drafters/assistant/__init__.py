"""Drafting by a Gemma 4 assistant: a small model that is published next to its target. Its layers attend the target's
KV."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from specrs.core import SharedKVDrafter
from specrs.drafters.assistant.files import open_assistant
from specrs.drafters.assistant.weights import AssistantFacts
from specrs.drafters.base import Declared, DraftLimits, Loading
from specrs.drafters.hidden_state import LoadedHead, load_head, vocabulary_options
from specrs.drafters.method import WHERE, CheckpointOptions, ModelMethod
from specrs.drafters.vocabulary import DraftVocabularyOptions
from specrs.errors import InvalidConfigError
from specrs.models.errors import OF_DRAFT

logger = logging.getLogger("specrs")


@dataclass(frozen=True, kw_only=True)
class AssistantOptions(DraftVocabularyOptions, CheckpointOptions):
    """Options of `method="mtp"` with a `model`, which is then an assistant."""


class LoadedAssistant(LoadedHead):
    """An assistant with its weights. It has no KV: its passes read the target's."""

    model: AssistantFacts
    has_own_blocks = True

    def declare(self, limits: DraftLimits) -> Declared:
        return SharedKVDrafter(max_model_len=limits.shared_len)

    def hidden_row_size(self, limits: DraftLimits) -> int:
        return self.model.target_hidden_size


def bundled() -> str:
    """Raise `InvalidConfigError`: no assistant comes with the package."""
    raise InvalidConfigError(f"{WHERE}model is missing: a folder or hub id of an assistant; set it")


def load(loading: Loading) -> LoadedAssistant:
    """Load an assistant for the target. Raises `InvalidConfigError` or a subclass if a file is missing, wrong or not
    supported."""
    files, head = load_head(loading, OF_DRAFT, open_assistant, **vocabulary_options(loading))
    layers = ", ".join(map(str, files.config.sources))
    logger.info("%s: its layers attend the keys and values of the target's layers %s", loading.path, layers)
    return LoadedAssistant(head)


ASSISTANT = ModelMethod(
    name="mtp",
    options=AssistantOptions,
    what="an assistant",
    bundled=bundled,
    load=load,
    serves=lambda speculative: speculative.model is not None,
    is_model=False,
    same_tokenizer=False,  # its ids are checked against the target's
)

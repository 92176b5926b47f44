"""Request bodies of the endpoints that embed and score: OpenAI's, Jina's and Cohere's, and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specrs.server.dispositions import Rejected
from specrs.server.limits import MAX_PROMPTS
from specrs.server.protocol import Body, CacheSalt, Label, Priority, PromptField, RequestId

TOO_LONG = Rejected("texts are not shortened here; send a shorter one")
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]


class PoolingBody(Body):
    """Fields that embeddings and scores share."""

    priority: Priority = None
    request_id: RequestId = None
    user: Label = None
    truncate_prompt_tokens: Annotated[Any, TOO_LONG] = None


class EmbeddingRequest(PoolingBody):
    """Body of `POST /v1/embeddings`. `input` is a text, token ids, or a list of texts or of lists of ids."""

    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None
    cache_salt: CacheSalt = None

    @property
    def has_large_answer(self) -> bool:
        """True: an answer may hold a thousand embeddings of some thousand numbers."""
        return True


class Document(BaseModel):
    """A document of a rerank request as an object."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str


class RerankRequest(PoolingBody):
    """Body of `POST /v1/rerank`: a query, and the documents to order. `top_n` limits the answer to the best; null and 0
    mean all."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_PROMPTS)]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None
    instruction: str | None = None
    max_tokens_per_doc: Annotated[Any, TOO_LONG] = None

    @property
    def texts(self) -> list[str]:
        """Text of each document."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreRequest(PoolingBody):
    """Body of `POST /v1/score`: pairs of texts. A single `text_1` goes with every `text_2`."""

    text_1: str | Texts
    text_2: str | Texts
    instruction: str | None = None

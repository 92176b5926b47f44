"""Table of the endpoints that read a body. The application's routes and the OpenAPI document are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specrs.server import endpoints, pooling, protocol, responses
from specrs.server.anthropic import endpoints as anthropic
from specrs.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from specrs.server.endpoints import Result
from specrs.server.paths import MESSAGES
from specrs.server.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from specrs.server.responses_protocol import ResponsesRequest


@dataclass(frozen=True, slots=True)
class Post:
    """One endpoint for `POST`."""

    path: str
    body: type[protocol.Body]
    handle: Callable[..., Awaitable[Result]]
    """Function that answers a body, called as `handle(context, body)`."""
    answer: str | Mapping[str, Any]
    """JSON schema of the answer, or its name in `openapi.py`."""
    summary: str
    """Summary in the OpenAPI document: a sentence that says what the endpoint does."""
    streams: bool = False
    """True if the endpoint can answer with a stream of events."""


POSTS = (
    Post(
        "/v1/completions",
        protocol.CompletionRequest,
        endpoints.completions,
        "Completion",
        "Complete prompts.",
        streams=True,
    ),
    Post(
        "/v1/chat/completions",
        protocol.ChatCompletionRequest,
        endpoints.chat_completions,
        "ChatCompletion",
        "Answer a conversation.",
        streams=True,
    ),
    Post(
        "/v1/responses",
        ResponsesRequest,
        responses.responses,
        "Response",
        "Answer a conversation, in items.",
        streams=True,
    ),
    Post(
        MESSAGES,
        MessagesRequest,
        anthropic.messages,
        "Message",
        "Answer a conversation, in Anthropic's content blocks.",
        streams=True,
    ),
    Post(
        f"{MESSAGES}/count_tokens",
        CountTokensRequest,
        anthropic.count_tokens,
        "InputTokens",
        "Number of tokens of a message's prompt.",
    ),
    Post(
        "/tokenize",
        protocol.TokenizeRequest,
        endpoints.tokenize,
        "Tokens",
        "Token ids of a text or a conversation.",
    ),
    Post("/detokenize", protocol.DetokenizeRequest, endpoints.detokenize, "Text", "Text of token ids."),
    Post("/v1/embeddings", EmbeddingRequest, pooling.embeddings, "Embeddings", "Embed texts."),
    *(
        Post(path, RerankRequest, pooling.rerank, "Ranking", "Order documents by how well they answer a query.")
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(Post(path, ScoreRequest, pooling.score, "Scores", "Score pairs of texts.") for path in ("/v1/score", "/score")),
)

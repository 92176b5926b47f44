"""Handlers of the endpoints that embed and score texts: from a parsed body to an answer."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrs.errors import InvalidRequestError
from specrs.inputs import Prompt
from specrs.outputs import RequestOutput
from specrs.pooling import (
    Pairs,
    PoolingParams,
    check_length,
    embedding_of,
    pooled_of,
)
from specrs.sampling import SamplingParams
from specrs.server.context import Context
from specrs.server.params import read_text, split_prompts
from specrs.server.pooling_protocol import EmbeddingRequest, PoolingBody, RerankRequest, ScoreRequest
from specrs.server.tools import FieldNames
from specrs.server.usage import usage

_INPUT = FieldNames(renamed={"prompt": "input", "prompt_token_ids": "input"})


async def embeddings(context: Context, body: EmbeddingRequest) -> dict[str, Any]:
    """Answer `POST /v1/embeddings`."""
    context.check_model(body.model)
    params = PoolingParams(dimensions=body.dimensions)
    if body.input is None:
        raise InvalidRequestError("input=None: must be a string, a list of strings, or token ids")
    with _INPUT.errors():
        given = split_prompts(body.input, 1)
        lone = isinstance(body.input, str) or given == [body.input]
        prompts = await context.llm.in_thread(lambda: _read(context, body, given, lone=lone))
        asked = await context.llm.in_thread(lambda: context.llm.pooling.embed_params(params, context.llm.hidden_size))
        outputs = await _pool(context, body, prompts, asked, "input")

    def data() -> list[dict[str, Any]]:
        encode = _base64 if body.encoding_format == "base64" else _numbers
        vectors = [embedding_of(pooled_of(output), params) for output in outputs]
        return [{"object": "embedding", "index": i, "embedding": encode(one)} for i, one in enumerate(vectors)]

    return _head(context, body, "embd") | {
        "object": "list",
        "data": await context.llm.in_thread(data),
        "usage": _usage(outputs),
    }


async def rerank(context: Context, body: RerankRequest) -> dict[str, Any]:
    """Answer `POST /v1/rerank`: the documents by falling score; of equal scores, in the order of the request."""
    context.check_model(body.model)
    texts = body.texts
    pairs = await _pairs(context, [body.query], texts, body.instruction, ("query", "documents"))
    outputs = await _pool(context, body, pairs.prompts, pairs.params, "documents")
    ranked = sorted(enumerate(pairs.scores(outputs)), key=lambda found: -found[1])
    results = []
    for index, score in ranked[: body.top_n or None]:
        document = {} if body.return_documents is False else {"document": {"text": texts[index]}}
        results.append({"index": index, "relevance_score": score, **document})
    return _head(context, body, "rerank") | {"results": results, "usage": _usage(outputs)}


async def score(context: Context, body: ScoreRequest) -> dict[str, Any]:
    """Answer `POST /v1/score`."""
    context.check_model(body.model)
    firsts, seconds = ([given] if isinstance(given, str) else given for given in (body.text_1, body.text_2))
    pairs = await _pairs(context, firsts, seconds, body.instruction, ("text_1", "text_2"))
    outputs = await _pool(context, body, pairs.prompts, pairs.params, "text_2")
    return _head(context, body, "score") | {
        "object": "list",
        "data": [{"index": i, "object": "score", "score": one} for i, one in enumerate(pairs.scores(outputs))],
        "usage": _usage(outputs),
    }


async def _pairs(
    context: Context, firsts: list[str], seconds: list[str], instruction: str | None, names: tuple[str, str]
) -> Pairs:
    return await context.llm.in_thread(lambda: context.llm.pooling.pairs(firsts, seconds, instruction, names))


def _read(context: Context, body: EmbeddingRequest, given: Sequence[str | list[int]], *, lone: bool) -> list[Prompt]:
    """Tokenize the inputs. Raises `InvalidRequestError`, which names the input, for one that is too long."""
    longest, salt = context.llm.limits.max_model_len, body.cache_salt or ""
    prompts = []
    for i, item in enumerate(given):
        name = "input" if lone else f"input[{i}]"
        if isinstance(item, str):
            special = body.add_special_tokens is not False
            with FieldNames(renamed={"prompt": name}).errors():
                prompt = read_text(context.llm.tokenizer, item, special=special, salt=salt, max_tokens=longest)
        else:
            prompt = Prompt(item, None, salt)
        if not prompt.token_ids:
            raise InvalidRequestError(f"{name}: has no tokens; send a text that is not empty")
        check_length(name, prompt.token_ids, longest)
        prompts.append(prompt)
    return prompts


async def _pool(
    context: Context, body: PoolingBody, prompts: Sequence[Prompt], params: SamplingParams, field: str
) -> list[RequestOutput]:
    """Run requests with pooling, and count them in the metrics. `field` is what the client sent the prompts in."""
    llm, most = context.llm, context.llm.max_num_queued_reqs
    if most is not None and len(prompts) > most:
        raise InvalidRequestError(
            f"{field}: {len(prompts)} texts, and this server takes at most {most} requests at once; send fewer"
        )
    recorder = context.metrics.request(len(prompts), 1)
    try:
        return await llm.pool(
            prompts,
            params,
            lora_request=context.lora_request(body.model),
            priority=body.priority or 0,
            observer=recorder.observe,
        )
    finally:
        recorder.close()


def _head(context: Context, body: PoolingBody, kind: str) -> dict[str, Any]:
    return {
        "id": f"{kind}-{body.request_id}",
        "created": int(time.time()),
        "model": body.model or context.model_names[0],
    }


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    return usage(outputs, completion_tokens=0, reasoning_tokens=None)


def _numbers(vector: NDArray[np.float32]) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


def _base64(vector: NDArray[np.float32]) -> str:
    """Return the little-endian float32 numbers of a vector in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()

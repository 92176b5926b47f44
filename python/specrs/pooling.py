"""Embeddings and scores: what a request with pooling asks of an engine, and how its results are read. Runs nothing.

An embedding is the final hidden state of the text's last token, cut to `dimensions` and, unless `use_activation` is
False, scaled to length 1. The score of two texts is the cosine of their embeddings if the checkpoint is an embedding
model. Any other model is asked whether the document answers the query. The score is then the probability of "yes"
against "no", as of Qwen3-Reranker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specrs.config import EngineConfig
from specrs.errors import EngineDeadError, InvalidRequestError, UnsupportedRequestError, invalid_request
from specrs.inputs import Prompt
from specrs.models.sentence_transformers import pools_last_token
from specrs.options import Integer, Switch, check_options, option
from specrs.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from specrs.sampling import RequestOutputKind, SamplingParams
from specrs.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction of a rerank request that has none."""
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Special tokens of Qwen3's vocabulary. For a model that has them, the rerank prompt is written with them directly.
Other models get the prompt through their chat template."""
_ANSWERS = ("no", "yes")
_REMEDY = "use a reranker such as Qwen3-Reranker, or an embedding model"


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of an embedding, with vLLM's names. Raises `InvalidRequestError` for a wrong value."""

    dimensions: int | None = option(
        None,
        Integer(1),
        "first numbers of the hidden state to keep",
        default_is="all",
        details="Only models that were trained for it (Matryoshka) keep their quality.",
    )
    use_activation: bool = option(True, Switch(), "scale embeddings to length 1")

    def __post_init__(self) -> None:
        check_options(self, InvalidRequestError)


def read_params(given: PoolingParams | None) -> PoolingParams:
    """Return the parameters that a caller passed as `pooling_params`, the defaults for None.

    Raises `InvalidRequestError` for anything else.
    """
    if given is None:
        return PoolingParams()
    if not isinstance(given, PoolingParams):
        raise invalid_request("pooling_params", given, "must be a PoolingParams or None")
    return given


_EMBED = SamplingParams(
    max_tokens=1,
    temperature=0.0,
    ignore_eos=True,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
    num_speculative_tokens=0,
)
"""Sampling parameters of a request that is embedded."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Prompts of a scoring request, and how their results become scores.

    `firsts` and `seconds` are, for each pair, the indices of its prompts; both are the same for a reranker. `answers`
    are a reranker's ids of "no" and "yes", None for an embedding model.
    """

    prompts: list[Prompt]
    params: SamplingParams
    firsts: list[int]
    seconds: list[int]
    answers: tuple[int, int] | None = None

    def scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """Return the score of each pair. `outputs` are the outputs of `prompts`, in the same order."""
        pooled = [pooled_of(output) for output in outputs]
        if self.answers is not None:
            # logits come in ascending order of their ids
            no = 0 if self.answers[0] < self.answers[1] else 1
            return [_probability(float(logits[no]), float(logits[1 - no])) for logits in pooled]
        vectors = [embedding_of(hidden, PoolingParams()).astype(np.float64) for hidden in pooled]
        return [float(vectors[i] @ vectors[j]) for i, j in zip(self.firsts, self.seconds, strict=True)]

    def outputs(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        """Return the score and the token ids of each pair. `outputs` are the outputs of `prompts`, in the same
        order."""
        found = []
        for i, j, score in zip(self.firsts, self.seconds, self.scores(outputs), strict=True):
            of_pair = [outputs[i]] if i == j else [outputs[i], outputs[j]]
            found.append(
                ScoringRequestOutput(
                    request_id="+".join(output.request_id for output in of_pair),
                    outputs=ScoringOutput(score=score),
                    prompt_token_ids=[token for output in of_pair for token in output.prompt_token_ids],
                    num_cached_tokens=sum(output.metrics.num_cached_tokens for output in of_pair),
                )
            )
        return found


class Pooling:
    """Embeddings and scores of one engine's model."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        """Prepare requests. Reads no files: those are read when they are first needed."""
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    @cached_property
    def embeds(self) -> bool:
        """True if the checkpoint's files say that it is an embedding model, so that scores are cosines.

        Reads a file. Raises `UnsupportedRequestError` for an embedding model that does not pool its last token.
        """
        return pools_last_token(self._config.target, self._config.revision)

    def embed_params(self, params: PoolingParams, hidden_size: int) -> SamplingParams:
        """Return the sampling parameters of requests whose embeddings have `params`.

        May read a file, so it must not run on an event loop. Raises `InvalidRequestError` if `dimensions` is more than
        `hidden_size`, the size of the model's hidden states, and `UnsupportedRequestError` for an embedding model with
        another pooling.
        """
        if params.dimensions is not None and params.dimensions > hidden_size:
            reason = f"must be from 1 to {hidden_size}, the size of the model's hidden states"
            raise invalid_request("dimensions", params.dimensions, reason)
        _ = self.embeds  # raises for a pooling that is not implemented
        return _EMBED

    def embeddings(self, outputs: Sequence[RequestOutput], params: PoolingParams) -> list[EmbeddingRequestOutput]:
        """Return the embeddings in `outputs`, the outputs of requests with `embed_params`."""
        return [
            EmbeddingRequestOutput(
                request_id=output.request_id,
                outputs=EmbeddingOutput(embedding=embedding_of(pooled_of(output), params).tolist()),
                prompt_token_ids=output.prompt_token_ids,
                num_cached_tokens=output.metrics.num_cached_tokens,
            )
            for output in outputs
        ]

    def pairs(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        instruction: str | None = None,
        names: tuple[str, str] = ("data_1", "data_2"),
    ) -> Pairs:
        """Return the prompts for the scores of pairs. A single query goes with every document.

        `names` are the fields of queries and documents in errors. May read files and take long, so it must not run on
        an event loop. Raises `InvalidRequestError` for wrong numbers of texts, texts that are too long, an
        `instruction` for an embedding model, or a tokenizer without tokens for the answers.
        """
        if len(queries) not in (1, len(documents)):
            raise InvalidRequestError(
                f"{names[0]}: {len(queries)} texts for {len(documents)} in {names[1]}; must be one for all, or one each"
            )
        first, second = names
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise UnsupportedRequestError("skip_tokenizer_init=True: scores need a tokenizer; leave it at False")
        count = len(documents)
        if self.embeds:
            if instruction is not None:
                raise invalid_request(
                    "instruction", instruction, "an embedding model reads it as a part of the query; put it there"
                )
            prompts = [self._prompt(text, f"{first}[{i}]", special=True) for i, text in enumerate(queries)]
            prompts += [self._prompt(text, f"{second}[{i}]", special=True) for i, text in enumerate(documents)]
            firsts = [0] * count if len(queries) == 1 else [*range(count)]
            return Pairs(prompts, _EMBED, firsts, [len(queries) + i for i in range(count)])
        params = _EMBED.replace(allowed_token_ids=self._answers)
        texts = [
            self._question(query, document, INSTRUCTION if instruction is None else instruction)
            for query, document in zip([*queries] * (count if len(queries) == 1 else 1), documents, strict=True)
        ]
        prompts = [self._prompt(text, f"{second}[{i}]", special=False) for i, text in enumerate(texts)]
        each = [*range(count)]
        return Pairs(prompts, params, each, each, self._answers)

    @cached_property
    def _answers(self) -> tuple[int, int]:
        """Ids of "no" and "yes". Raises `UnsupportedRequestError` if one of them is not a single token."""
        assert self._tokenizer is not None
        ids = [self._tokenizer.encode(answer, add_special_tokens=False) for answer in _ANSWERS]
        for answer, found in zip(_ANSWERS, ids, strict=True):
            if len(found) != 1:
                raise UnsupportedRequestError(
                    f"model: its tokenizer writes {answer!r} as {len(found)} tokens, and a score needs one; {_REMEDY}"
                )
        return ids[0][0], ids[1][0]

    def _prompt(self, text: str, name: str, *, special: bool) -> Prompt:
        assert self._tokenizer is not None
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=special, max_tokens=self._max_model_len)
        except InvalidRequestError as fault:
            raise type(fault)(name + str(fault).removeprefix("prompt")) from fault
        check_length(name, ids, self._max_model_len)
        return Prompt(ids, text)

    def _question(self, query: str, document: str, instruction: str) -> str:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        user = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        if all(tokenizer.backend.token_to_id(token) is not None for token in _CHATML):
            return (
                f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
                "<|im_start|>assistant\n<think>\n\n</think>\n\n"
            )
        if tokenizer.chat_template is None:
            raise UnsupportedRequestError(f"model: it has no chat template to ask it for a score with; {_REMEDY}")
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": user}]
        return tokenizer.render_chat(messages, chat_template_kwargs={"enable_thinking": False})


def check_length(name: str, token_ids: Sequence[int], max_model_len: int) -> None:
    """Raise `InvalidRequestError` if the prompt of the field `name` is too long for the engine."""
    if len(token_ids) >= max_model_len:
        raise InvalidRequestError(
            f"{name}: {len(token_ids)} tokens in its prompt; must be at most {max_model_len - 1}, one less than "
            f"max_model_len={max_model_len}; send a shorter text"
        )


def embedding_of(hidden: NDArray[np.float32], params: PoolingParams) -> NDArray[np.float32]:
    """Return the embedding float32 `[dimensions]` of a final hidden state `[hidden]`: cut to `dimensions`, then scaled
    to length 1 if `use_activation` is set. A state of zeros stays as it is."""
    kept = hidden[: params.dimensions].astype(np.float64)
    length = math.sqrt(float(kept @ kept))
    if params.use_activation and length > 0:
        kept /= length
    return kept.astype(np.float32)


def pooled_of(output: RequestOutput) -> NDArray[np.float32]:
    """Return the result of a request with pooling that has ended. Raises the error that ended it, `EngineDeadError` if
    it was aborted."""
    if output.error is not None:
        raise output.error
    if output.pooled is None:
        raise EngineDeadError("the engine was shut down before the request had its result")
    return output.pooled


def read_pairs(data_1: object, data_2: object) -> tuple[list[str], list[str]]:
    """Return the texts of a scoring call as lists. Raises `InvalidRequestError` for anything but strings or lists of
    strings."""
    found = []
    for field, data in (("data_1", data_1), ("data_2", data_2)):
        texts = [data] if isinstance(data, str) else data
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
            raise invalid_request(field, data, "must be a string or a list of strings, not empty")
        found.append(list(texts))
    return found[0], found[1]


def _probability(no: float, yes: float) -> float:
    """Return the probability of the answer "yes": the softmax of the two logits, at `yes`."""
    return 1 / (1 + math.exp(min(no - yes, 700.0)))

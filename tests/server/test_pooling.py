"""The endpoints that embed and score texts, against `LLM.embed` and `LLM.score` of the same checkpoint."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooling_checkpoints import VOCAB, as_embedding, make_reranker
from specrs import LLM, PoolingParams

from .harness import Answer, Server, serving

TEXTS = ["the cat sat", "on the mat", "one two three four five six seven", "a"]
SETTINGS = ("--max-model-len", "512", "--max-num-seqs", "4", "--threads", "1", "--served-model-name", "served")
SIZE = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("pooling") / "reranker")


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[Server]:
    with serving(str(folder), *SETTINGS, "--max-num-queued-reqs", "40") as server:
        yield server


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[Server]:
    with serving(str(as_embedding(folder, folder.parent / "embedder")), *SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_model_len=512, threads=1)


def answered(server: Server, path: str, **body: Any) -> dict[str, Any]:
    """Return an answer that must not be an error."""
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def vectors(llm: LLM, prompts: Any, dimensions: int | None = None) -> list[list[float]]:
    outputs = llm.embed(prompts, pooling_params=PoolingParams(dimensions=dimensions), use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def test_embeddings(reranker: Server, llm: LLM) -> None:
    before = reranker.metrics()
    answer = answered(reranker, "/v1/embeddings", model="served", input=TEXTS, user="me", encoding_format="float")
    expected = vectors(llm, TEXTS)
    assert [item["embedding"] for item in answer["data"]] == expected
    assert [(item["object"], item["index"]) for item in answer["data"]] == [("embedding", i) for i in range(4)]
    assert (answer["object"], answer["model"]) == ("list", "served")
    assert answer["id"].startswith("embd-")
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
    assert answer["usage"]["completion_tokens"] == 0
    assert np.linalg.norm(expected, axis=1) == pytest.approx(np.ones(4), abs=1e-6)
    after = reranker.wait_until_idle()
    grown = {name: after[name] - before[name] for name in before}
    assert grown["vllm:prompt_tokens_total"] == tokens
    assert grown["vllm:generation_tokens_total"] == 0
    assert grown['vllm:request_success_total{finished_reason="stop"}'] == 4


def test_forms_of_input(reranker: Server, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = [tokenizer.encode(text) for text in TEXTS]
    expected = vectors(llm, TEXTS)
    for given, wanted in ((TEXTS[0], expected[:1]), (ids[0], expected[:1]), (ids, expected), ([ids[2]], expected[2:3])):
        answer = answered(reranker, "/v1/embeddings", input=given)
        assert [item["embedding"] for item in answer["data"]] == wanted


@pytest.mark.parametrize("dimensions", [None, 1, 7, SIZE])
def test_base64_has_the_same_numbers(reranker: Server, llm: LLM, dimensions: int | None) -> None:
    body = {"input": TEXTS, "dimensions": dimensions}
    floats = answered(reranker, "/v1/embeddings", **body)["data"]
    encoded = answered(reranker, "/v1/embeddings", **body, encoding_format="base64")["data"]
    expected = vectors(llm, TEXTS, dimensions)
    for one, other, wanted in zip(floats, encoded, expected, strict=True):
        decoded = np.frombuffer(base64.b64decode(other["embedding"], validate=True), "<f4")
        assert decoded.tolist() == one["embedding"] == wanted
        assert len(wanted) == (dimensions or SIZE)


LONG = "the cat " * 400

WRONG: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("/v1/embeddings", {}, "input: is missing", "input"),
    ("/v1/embeddings", {"input": None}, "input=None: must be a string, a list of strings, or token ids", "input"),
    ("/v1/embeddings", {"input": []}, "input=[]: must be a string, a list of strings, a list of token ids", "input"),
    ("/v1/embeddings", {"input": ["a", 1]}, "input=['a', 1]: must be a string, a list of strings", "input"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]: has no tokens; send a text that is not empty", "input"),
    ("/v1/embeddings", {"input": [1, VOCAB]}, f"input[1]={VOCAB}: must be an integer from 0 to", "input"),
    ("/v1/embeddings", {"input": [[1]] * 1025}, "input: 1025 prompts; must be at most 1024", "input"),
    (
        "/v1/embeddings",
        {"input": [[1]] * 41},
        "input: 41 texts, and this server takes at most 40 requests",
        "input",
    ),
    ("/v1/embeddings", {"input": [1] * 512}, "input: 512 tokens in its prompt; must be at most 511", "input"),
    ("/v1/embeddings", {"input": ["a", LONG]}, "input[1]: ", "input"),
    ("/v1/embeddings", {"input": "a", "dimensions": 97}, "dimensions=97: must be from 1 to 96", "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions=0: Input should be greater", "dimensions"),
    (
        "/v1/embeddings",
        {"input": "a", "encoding_format": "int8"},
        "encoding_format='int8': not impl",
        "encoding_format",
    ),
    (
        "/v1/embeddings",
        {"input": "a", "dimension": 4},
        "dimension: unknown field; did you mean dimensions",
        "dimension",
    ),
    ("/v1/embeddings", {"input": "a", "model": "b"}, "The model `b` does not exist; served: ", "model"),
    (
        "/v1/embeddings",
        {"input": "a", "truncate_prompt_tokens": 4},
        "truncate_prompt_tokens=4: not implemented; texts are not shortened here",
        "truncate_prompt_tokens",
    ),
    ("/v1/rerank", {"query": "a"}, "documents: is missing", "documents"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents=[]: List should have at least 1 item", "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["a", LONG]}, "documents[1]: ", "documents"),
    ("/v1/rerank", {"query": "a", "documents": [3]}, "documents.0=3: ", "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n=-1: Input should be greater", "top_n"),
    (
        "/v1/score",
        {"text_1": ["a", "b"], "text_2": "c"},
        "text_1: 2 texts for 1 in text_2; must be one for all",
        "text_1",
    ),
    ("/v1/score", {"text_1": "a", "text_2": LONG}, "text_2[0]: ", "text_2"),
    ("/v1/score", {"text_1": "a"}, "text_2: is missing", "text_2"),
]


@pytest.mark.parametrize(("path", "body", "message", "param"), WRONG)
def test_wrong_bodies(reranker: Server, path: str, body: dict[str, Any], message: str, param: str | None) -> None:
    answer = reranker.post(path, body)
    assert answer.status == (404 if param == "model" else 400)
    assert answer.error["message"].startswith(message), answer.error
    assert answer.error["param"] == param


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
@pytest.mark.parametrize("objects", [(4,), (0, 4), (0, 1, 2, 3, 4)])
def test_rerank(reranker: Server, llm: LLM, path: str, objects: tuple[int, ...]) -> None:
    """Check reranking. A document is a string or an object, in any order; `objects` are the indices of objects."""
    documents = [{"text": text} if i in objects else text for i, text in enumerate([*TEXTS, "on the mat"])]
    answer = answered(reranker, path, model="served", query="where?", documents=documents)
    outputs = llm.score("where?", [*TEXTS, "on the mat"], use_tqdm=False)
    scores = [output.outputs.score for output in outputs]
    order = sorted(range(5), key=lambda i: -scores[i])
    assert len(set(scores)) == 4
    assert order.index(1) + 1 == order.index(4), "equal documents stay in their order"
    assert answer["results"] == [
        {"index": i, "relevance_score": scores[i], "document": {"text": [*TEXTS, "on the mat"][i]}} for i in order
    ]
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
    assert answer["id"].startswith("rerank-")
    first = answered(reranker, path, query="where?", documents=documents, top_n=2, return_documents=False)
    assert first["results"] == [{"index": i, "relevance_score": scores[i]} for i in order[:2]]
    asked = answered(reranker, path, query="where?", documents=TEXTS[:1], instruction="Find songs", top_n=0)
    (other,) = llm.score("where?", TEXTS[0], instruction="Find songs", use_tqdm=False)
    assert asked["results"][0]["relevance_score"] == other.outputs.score != scores[0]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(("first", "second"), [("where?", TEXTS), (TEXTS[:2], TEXTS[2:]), ("where?", TEXTS[0])])
def test_score(reranker: Server, llm: LLM, path: str, first: Any, second: Any) -> None:
    answer = answered(reranker, path, text_1=first, text_2=second)
    expected = [output.outputs.score for output in llm.score(first, second, use_tqdm=False)]
    assert answer["data"] == [{"index": i, "object": "score", "score": one} for i, one in enumerate(expected)]
    assert (answer["object"], answer["model"]) == ("list", "served")
    assert answer["id"].startswith("score-")


def test_an_embedding_model_scores_by_cosines(embedder: Server, llm: LLM) -> None:
    one, *others = np.array(vectors(llm, ["where?", *TEXTS]))
    expected = [float(one @ other) for other in others]
    answer = answered(embedder, "/v1/score", text_1="where?", text_2=TEXTS)
    assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-6)
    ranked = answered(embedder, "/v1/rerank", query="where?", documents=TEXTS)
    assert [item["index"] for item in ranked["results"]] == sorted(range(4), key=lambda i: -expected[i])
    refused: Answer = embedder.post("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "x"})
    assert refused.status == 400
    assert refused.error["message"].startswith("instruction='x': an embedding model reads it as a part of the query")


def test_a_request_id_is_the_answers(reranker: Server) -> None:
    answer = reranker.post("/v1/embeddings", {"input": "a", "request_id": "mine"})
    assert answer.json["id"] == "embd-mine"
    assert answer.headers["x-request-id"] == "mine" or "x-request-id" in answer.headers


def test_the_document_lists_the_endpoints(reranker: Server) -> None:
    document = reranker.get("/openapi.json").json
    for path in ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"):
        assert "200" in document["paths"][path]["post"]["responses"]
    assert document["components"]["schemas"]["EmbeddingRequest"]["required"] == ["input"]

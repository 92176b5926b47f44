"""Engines whose draft model is in FP8 or drafts some ids alone, on the CUDA runner. Triton's interpreter runs the
kernels, and torch's `_scaled_mm` on a CPU the products of FP8 rows."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, perturb_checkpoint
from engine.test_draft_vocabulary import expected_counts
from specrs.backends.cuda import products
from specrs.backends.cuda.workspace import Workspace
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.sampling import SamplingParams
from specrs.speculative_config import SpeculativeConfig
from torch import Tensor

from backends.cuda_engines import CUDA, SMALL, K, generate, serve_by_cuda

VOCAB = 61
TOKENS = 12
SHAPE: dict[str, Any] = {"layers": 1, "hidden": 64, "intermediate": 64, "kv_heads": 1, "head_dim": 32}
SHAPE |= {"vocab": VOCAB, "initializer_range": 0.3}
LONG = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(70)]
PROMPTS = [LONG, [5, 9, 2, 33], [60]]
"""The first prompt is one chunk of more than 64 rows, in which a draft in FP8 rounds rows, too."""
GREEDY = SamplingParams(temperature=0.0)
SETTINGS = SMALL | {"max_model_len": 96, "max_num_batched_tokens": 80, "num_gpu_blocks_override": 60}


@dataclass(frozen=True)
class Pair:
    """A target, another model that drafts some of the same tokens, texts without drafts, and counts of ids."""

    target: Path
    draft: Path
    texts: list[list[int]]
    counts: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = make_checkpoint(folder / "target", with_tokenizer=False, seed=4, **SHAPE)
    draft = perturb_checkpoint(target, folder / "draft", noise=0.1, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        engine = make_engine(target, draft, patch)
    plain = texts(generate(engine, [GREEDY.replace(num_speculative_tokens=0)] * 3, TOKENS, PROMPTS))
    counts = folder / "counts.json"
    # Not all of the texts' ids: some tokens cannot be drafted.
    counts.write_text(json.dumps({str(token): 1 for text in plain for token in text if token % 5}))
    return Pair(target, draft, plain, counts)


def make_engine(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, **speculative: Any) -> Engine:
    """Make an engine of the CUDA backend, whose loader loads its models."""
    made = SpeculativeConfig(model=str(draft), num_speculative_tokens=K, **speculative)
    config = EngineConfig(model=str(target), dtype="float32", speculative_config=made, **SETTINGS)
    with monkeypatch.context() as patch:
        serve_by_cuda(patch)
        patch.setattr("specrs.engine.weights.backend_of", lambda _device: CUDA)
        patch.setattr("torch.cuda.mem_get_info", lambda _device: (1 << 40, 1 << 40))
        return build_engine(config, load_weights(config))


def texts(requests: list[Request]) -> list[list[int]]:
    assert all(request.error is None for request in requests)
    return [request.output_token_ids for request in requests]


def accepted(request: Request) -> int:
    """Return the number of accepted tokens."""
    return sum(n * count for n, count in enumerate(request.acceptance.histogram))


@pytest.mark.parametrize("vocabulary", [None, 30])
@pytest.mark.parametrize("which", ["the target", "another"])
def test_texts_and_acceptance_of_a_draft_in_fp8(
    which: str, vocabulary: int | None, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that texts are those without drafts, and that about as many drafts are accepted as from a draft that is not
    quantized. The first prompt's draft KV is computed from rows in FP8, other drafts from rows that are not."""
    draft = pair.target if which == "the target" else pair.draft
    own = {} if vocabulary is None else {"draft_vocab_size": vocabulary, "draft_vocab_counts": str(pair.counts)}
    wide: list[int] = []

    def scaled(ws: Workspace, x: Tensor, w: QuantizedWeight, out: Tensor) -> None:
        wide.append(len(x))
        multiply(ws, x, w, out)

    multiply = products._scaled_product
    monkeypatch.setattr(products, "_scaled_product", scaled)
    engine = make_engine(pair.target, draft, monkeypatch, quantization="fp8", **own)
    drafted = generate(engine, [GREEDY] * 3, TOKENS, PROMPTS)
    assert len(wide) == 4, "the four products of a layer, for the long prompt's chunk"
    assert min(wide) >= len(LONG)
    assert texts(drafted) == pair.texts
    exact = generate(make_engine(pair.target, draft, monkeypatch, **own), [GREEDY] * 3, TOKENS, PROMPTS)
    assert len(wide) == 4, "the target rounds nothing, and neither does a draft that is not quantized"
    assert texts(exact) == pair.texts
    assert sum(accepted(request) for request in exact) >= 8
    for ours, theirs in zip(drafted, exact, strict=True):
        assert abs(accepted(ours) - accepted(theirs)) <= 1


@pytest.mark.parametrize("chosen", ["first", "most frequent"])
def test_a_draft_of_some_ids_drafts_what_comes_next_if_it_may(
    chosen: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the target as its own draft model drafts exactly what comes next, up to the first token that is not
    one of its ids: the ids of its LM head's rows are those that the target has for them."""
    size = 30
    own = {"draft_vocab_counts": str(pair.counts)} if chosen == "most frequent" else {}
    engine = make_engine(pair.target, pair.target, monkeypatch, draft_vocab_size=size, **own)
    counts = json.loads(pair.counts.read_text())
    by_count = sorted(range(VOCAB), key=lambda token: (-counts.get(str(token), 0), token))
    ids = set(by_count[:size] if own else range(size))
    requests = generate(engine, [GREEDY] * 3, TOKENS, PROMPTS)
    assert texts(requests) == pair.texts
    expected = [expected_counts(text, K, ids) for text in pair.texts]
    assert [(sum(r.acceptance.histogram), accepted(r)) for r in requests] == expected
    assert 0 < sum(count for _, count in expected) < sum(K * drafts for drafts, _ in expected)

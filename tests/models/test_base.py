"""The model interface: an engine serves a model that is no decoder of specrs, on both runners, with such a draft
too."""

from typing import Any

import pytest
import torch
from backends.cuda_engines import serve_by_cuda
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.sampling import SamplingParams
from specrs.speculative_config import SpeculativeConfig

from models.table_model import TableModel

VOCAB, LENGTH, K = 23, 24, 3
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2, 3]]
TARGET = TableModel.random(VOCAB, seed=1)
DRAFTS = {"none": None, "near": TARGET.near(1.0, seed=2), "same": TARGET, "far": TableModel.random(VOCAB, seed=3)}


def make(draft: TableModel | None, rule: str = "rejection", **fields: Any) -> Engine:
    speculative = None
    if draft is not None:
        speculative = SpeculativeConfig(num_speculative_tokens=K, rejection_sample_method=rule)
    shape = {"max_num_seqs": 3, "block_size": 4, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 60}
    config = EngineConfig(speculative_config=speculative, device="cpu", **(shape | fields))
    return build_engine(config, Weights(TARGET, None if draft is None else LoadedDraftModel(draft)))


def generate(engine: Engine, params: SamplingParams) -> list[list[int]]:
    own = params.replace(max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    k = engine.num_speculative_tokens
    requests = [Request(i, ids, own, num_speculative_tokens=k, seed=40 + i) for i, ids in enumerate(PROMPTS)]
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    engine.scheduler.check_integrity()
    assert [request.error for request in requests] == [None] * len(PROMPTS)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_text(draft: str) -> None:
    engine = make(DRAFTS[draft])
    assert generate(engine, SamplingParams(temperature=0.0)) == [TARGET.greedy(ids, LENGTH) for ids in PROMPTS]
    stats = engine.stats()
    assert (sum(stats.acceptance_histogram) > 0) == (draft != "none")
    if draft == "same":  # every draft stands
        accepted = sum(m * count for m, count in enumerate(stats.acceptance_histogram))
        assert accepted == stats.draft_tokens


@pytest.mark.parametrize("draft", ["near", "same", "far"])
def test_coupled_text_is_that_without_drafts(draft: str) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95)
    texts = generate(make(DRAFTS[draft], "coupled"), params)
    assert texts == generate(make(None), params)
    assert texts != [TARGET.greedy(ids, LENGTH) for ids in PROMPTS]


def test_a_draft_that_is_the_target_is_never_rejected() -> None:
    engine = make(TARGET)
    generate(engine, SamplingParams(temperature=1.0))
    stats = engine.stats()
    assert sum(m * count for m, count in enumerate(stats.acceptance_histogram)) == stats.draft_tokens > 0


def test_on_the_cuda_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the same model on the CUDA runner with interpreted kernels."""
    serve_by_cuda(monkeypatch)
    engine = make(DRAFTS["near"], max_model_len=40)
    assert isinstance(engine.runner, CudaRunner)
    prompts = PROMPTS[:2]
    own = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    requests = [Request(i, ids, own, num_speculative_tokens=K, seed=0) for i, ids in enumerate(prompts)]
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    assert [request.output_token_ids for request in requests] == [TARGET.greedy(ids, 6) for ids in prompts]


def test_default_compute_argmax_uses_logits() -> None:
    """Check the `compute_argmax` that a model inherits: it computes logits and takes their largest."""
    hidden = torch.tensor([[0.0, 2.0, 2.0, 5.0], [torch.nan, 1.0, 0.0, 0.0]])
    ids, top = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    TARGET.compute_argmax(hidden, ids, top, 3)
    assert ids.tolist() == [1, 0]
    assert top[0] == 2.0
    assert top[1].isnan()

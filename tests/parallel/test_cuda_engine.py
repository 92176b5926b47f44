"""Engines on ranks with the CUDA runner, its kernels interpreted and its exchanges gloo's: the text of one rank."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import specrs.engine.build_cuda as build_cuda
import specrs.models.eagle3 as eagle3
import specrs.models.loader as loader
from runner.cuda_engines import Graphs, generate
from runner.test_cuda_drafters import GREEDY, PROMPTS, SAMPLED, Bench, bench  # noqa: F401 (a fixture)
from specrs.engine.blueprint import Blueprint
from specrs.engine.engine import Engine
from specrs.errors import RankLostError
from specrs.kernels.linear import DenseWeight
from specrs.models.dense_cuda import CudaDense
from specrs.runner.cuda.context import entries_of
from specrs.runner.cuda.graphs import tasks
from specrs.runner.cuda.runner import CudaRunner
from specrs.runner.ranks import LeadingRunner
from specrs.sampling import SamplingParams

from parallel.harness import engine_on_threads
from parallel.threads import one_kernel_at_a_time  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("one_kernel_at_a_time")


@contextlib.contextmanager
def on_two_ranks(
    bench: Bench,  # noqa: F811
    kind: str,
    rule: str,
    degree: int,
    monkeypatch: pytest.MonkeyPatch,
    **fields: Any,
) -> Iterator[Engine]:
    config = bench.config(kind, rule, gpu=True, tensor_parallel_size=2, distributed_timeout=20.0, **fields)
    assert config.speculative_config is not None
    speculative = replace(config.speculative_config, draft_tensor_parallel_size=degree)
    for module in (loader, eagle3):
        monkeypatch.setattr(module, "pack", DenseWeight)  # as on a GPU
    monkeypatch.setattr(Blueprint, "on_gpu", property(lambda _self: True))
    with engine_on_threads(replace(config, speculative_config=speculative)) as engine:
        yield engine


CASES = [
    ("head", "rejection", 1),
    ("head of all ids", "coupled", 2),
    ("parallel", "rejection", 2),
    ("parallel", "coupled", 1),
    ("list with a head", "rejection", 2),
]


@pytest.mark.parametrize(("kind", "rule", "degree"), CASES)
def test_text_is_that_of_one_rank(
    bench: Bench,  # noqa: F811
    kind: str,
    rule: str,
    degree: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [GREEDY, SAMPLED, SAMPLED]
    with on_two_ranks(bench, kind, rule, degree, monkeypatch) as engine:
        assert isinstance(engine.runner, LeadingRunner)
        assert isinstance(engine.runner.runner, CudaRunner)
        made = generate(engine, params, prompts=PROMPTS)
        split = engine.stats()
    alone = bench.engine(kind, rule, gpu=True, monkeypatch=monkeypatch)
    expected = generate(alone, params, prompts=PROMPTS)
    assert [one.output_token_ids for one in made] == [one.output_token_ids for one in expected]
    whole = alone.stats()
    assert split.acceptance_histogram == whole.acceptance_histogram
    assert split.target_passes == whole.target_passes > 0
    assert split.draft_passes == whole.draft_passes

"""Engines with the CUDA runner on several ranks, with interpreted kernels and exchanges by gloo: the text of one rank.

That is the CPU loop's here, a tenth of the work; that this runner writes it alone is shown by `test_cuda_drafters`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import specrs.backends.cuda.build as build_cuda
from backends.cuda_engines import Graphs, K, serve_by_cuda
from backends.test_cuda_drafters import GREEDY, PROMPTS, SAMPLED, Bench, bench  # noqa: F401 (a fixture)
from engine.faulty_drafter import BrokenError
from numpy.typing import NDArray
from specrs.backends.cuda.context import sequences_of
from specrs.backends.cuda.graphs import tasks
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.ranks import LeadingRunner
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.errors import RankLostError
from specrs.parallel.ranks import HostExchanges
from specrs.sampling import SamplingParams
from sweep import stride
from torch import Tensor

from parallel.harness import engine_on_threads
from parallel.test_engine import on_other_rank
from parallel.threads import one_kernel_at_a_time  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("one_kernel_at_a_time")


@contextlib.contextmanager
def on_two_ranks(
    bench: Bench,  # noqa: F811
    kind: str,
    rule: str,
    degree: int,
    monkeypatch: pytest.MonkeyPatch,
    exit_code: int = 0,
    timeout: float = 20.0,
) -> Iterator[Engine]:
    config = bench.config(kind, rule, gpu=True, tensor_parallel_size=2, distributed_timeout=timeout)
    # A whole draft has no native pass, which a CPU would compute it with.
    config = replace(config, enforce_eager=True)
    assert config.speculative_config is not None
    speculative = replace(config.speculative_config, draft_tensor_parallel_size=degree)
    serve_by_cuda(monkeypatch)
    with engine_on_threads(replace(config, speculative_config=speculative), exit_code=exit_code) as engine:
        assert isinstance(engine.runner, LeadingRunner)
        assert isinstance(engine.runner.runner, CudaRunner)
        yield engine


def generate(engine: Engine, params: Sequence[SamplingParams], grammar: Any = None) -> list[Request]:
    """Run `PROMPTS[1:]` to their ends, one with each of `params`, and the last one with `grammar`."""
    requests = [
        Request(
            i,
            prompt,
            own.replace(max_tokens=4, ignore_eos=True),
            num_speculative_tokens=K,
            seed=100 + i,
            grammar=grammar if i == len(params) - 1 else None,
        )
        for i, (prompt, own) in enumerate(zip(PROMPTS[1:], params, strict=True))
    ]
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    engine.scheduler.check_integrity()
    return requests


def texts(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


class Replaying(CudaRunner):
    """Runs steps as with CUDA graphs: a replay calls the function again, on every rank."""

    replayed: list[list[Any]] = []  # noqa: RUF012 (set by the test)

    def __init__(self, ctx: Any, sampling: Any, buckets: Any, graphs: None, *args: Any, **named: Any) -> None:
        work = Graphs(dict(tasks(ctx, buckets, sequences_of(ctx.record.views, "num_decode"))))
        super().__init__(ctx, sampling, buckets, work, *args, **named)  # type: ignore[arg-type]
        self.replayed.append(work.replayed)


CASES = [
    ("head", "rejection", 1, False),
    ("head of all ids", "coupled", 2, False),
    ("parallel", "rejection", 2, True),
    ("other vocabulary", "rejection", 1, False),
    ("list with a head", "rejection", 2, False),
]


@pytest.mark.parametrize(("kind", "rule", "degree", "replays"), CASES)
def test_text_is_that_of_one_rank(
    bench: Bench,  # noqa: F811
    kind: str,
    rule: str,
    degree: int,
    replays: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = bench.engine(kind, rule, gpu=False, monkeypatch=monkeypatch)
    if replays:
        monkeypatch.setattr(Replaying, "replayed", [])
        monkeypatch.setattr(build_cuda, "CudaRunner", Replaying)
    with on_two_ranks(bench, kind, rule, degree, monkeypatch) as engine:
        made, split = generate(engine, [GREEDY, SAMPLED]), engine.stats()
    assert texts(made) == texts(generate(alone, [GREEDY, SAMPLED]))
    assert split.target_passes > 0
    assert split.draft_passes > 0
    if degree == 2:  # a whole draft has a larger share of a part of the target, and so other chunks
        assert split.acceptance_histogram == alone.stats().acceptance_histogram
    if replays:
        one, other = Replaying.replayed
        assert one == other
        assert len(one) > 2


class Thirds:
    """A grammar that allows every third token, another third at each position, and its matcher."""

    error = None

    def __init__(self) -> None:
        self.num_accepted = 0

    def matcher(self, stop_ids: object) -> Any:
        return Thirds()

    def allows(self, token_id: int) -> bool:
        return token_id % 3 == self.num_accepted % 3

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        bits = [self.allows(token_id) for token_id in range(32 * len(out))]
        out[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        allowed = self.allows(token_id)
        self.num_accepted += allowed
        return allowed

    def rollback(self, num_tokens: int) -> None:
        self.num_accepted -= num_tokens


def test_penalties_log_probabilities_and_grammars(
    bench: Bench,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check penalties, log probabilities and grammars. Only rank 0 has matchers, and sends their masks to the other
    rank."""
    params = [SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2, logit_bias={7: 0.5}), SAMPLED]
    alone = bench.engine("parallel", "rejection", gpu=False, monkeypatch=monkeypatch)
    with on_two_ranks(bench, "parallel", "rejection", 1, monkeypatch) as engine:
        made = generate(engine, params, Thirds())
    expected = generate(alone, params, Thirds())
    assert texts(made) == texts(expected)
    assert [token % 3 for token in made[1].output_token_ids] == [0, 1, 2, 0]
    assert made[0].logprobs is not None
    assert expected[0].logprobs is not None
    for one, other in zip(made[0].logprobs, expected[0].logprobs, strict=True):
        assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, rel=1e-4)


@pytest.mark.parametrize("where", ["rank 1", "rank 0"][:: stride(2)])
def test_a_drafter_that_fails_ends_the_engine(
    bench: Bench,  # noqa: F811
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a failing drafter ends the engine with an error that names the rank, because the other rank has
    already enqueued its passes."""
    passes = CudaRunner._draft_passes

    def fail(runner: CudaRunner, *args: Any) -> None:
        passes(runner, *args)
        if on_other_rank() == (where == "rank 1"):
            raise BrokenError(1)

    with on_two_ranks(bench, "parallel", "rejection", 1, monkeypatch, exit_code=1, timeout=4.0) as engine:
        monkeypatch.setattr(CudaRunner, "_draft_passes", fail)
        with pytest.raises(RankLostError, match=f"{where} of 2 failed: .*BrokenError"):
            generate(engine, [GREEDY, GREEDY])


def test_a_rank_that_fails_ends_the_engine(
    bench: Bench,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a rank that fails in the middle of a pass, at an exchange, ends the engine."""
    gather, calls = HostExchanges.gather, []

    def fail(exchanges: HostExchanges, x: Tensor, found: Tensor) -> None:
        if on_other_rank():
            calls.append(x.shape)
            if len(calls) == 3:
                raise MemoryError("as on purpose")
        gather(exchanges, x, found)

    monkeypatch.setattr(HostExchanges, "gather", fail)
    with on_two_ranks(bench, "parallel", "rejection", 2, monkeypatch, exit_code=1, timeout=4.0) as engine:
        with pytest.raises(RankLostError, match="rank 1 of 2 failed: MemoryError"):
            generate(engine, [GREEDY, GREEDY])
        assert not engine.requests
        engine.scheduler.check_integrity()

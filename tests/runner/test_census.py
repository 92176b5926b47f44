"""What Triton would compile while an engine serves: specialisations of a mixed run that nothing at the start has
launched. Interpreted, with graphs that run what they would replay."""

from typing import Any

import pytest
import torch
from kernel_launches import Launch, recorded
from specrs.engine.engine import Engine
from specrs.kernels.cuda.embedding import embed_kernel
from specrs.kernels.cuda.paged_attention import paged_attention_kernel
from specrs.kernels.cuda.skinny_linear import skinny_linear_kernel
from specrs.runner.cuda.context import entries_of
from specrs.runner.cuda.graphs import Uncaptured, tasks
from specrs.runner.cuda.runner import CudaRunner
from specrs.runner.cuda.warm_up import warm_up
from specrs.sampling import SamplingParams

from .cuda_engines import generate, give_graphs
from .test_cuda_runner import GREEDY, PENALISED, Pair, pair  # noqa: F401 (a fixture)

Keys = dict[tuple[Any, ...], Launch]
PASSES = (embed_kernel, skinny_linear_kernel, paged_attention_kernel)
"""Of which the numbers alone depend, and nothing that is launched: all logits are 0, and half of the time is saved."""


def keys_of(launches: list[Launch]) -> Keys:
    return {launch.key(): launch for launch in launches}


@torch.inference_mode()
def start(engine: Engine, *, eager: bool) -> Keys:
    """Give the engine's runner its graphs unless `eager`; the keys of what the start launches. Nothing runs."""
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    launches: list[Launch] = []
    with recorded(launches):
        if eager:
            assert isinstance(runner.graphs, Uncaptured)
            runner.graphs.run_all()
        else:
            for _, function in tasks(runner.ctx, runner.buckets, entries_of(runner.ctx.record.views, "num_decode")):
                function()
        warm_up(runner.ctx, runner.buckets)
    if not eager:
        give_graphs(engine)
    return keys_of(launches)


def lacking(known: Keys, served: Keys) -> set[str]:
    """What of `served` is not `known`: kernels, and what tells each from the nearest that is."""
    found = set()
    for key, launch in served.items():
        if key in known:
            continue
        near = [k for k in known if k[0] == launch.name]
        differs = min(
            ([name for part in range(1, 5) for name in _different(key[part], other[part])] for other in near),
            key=len,
            default=["all of it"],
        )
        found.add(f"{launch.name}: {', '.join(differs)}")
    return found


def _different(one: Any, other: Any) -> list[str]:
    """Names of arguments in which two parts of keys differ."""
    return sorted({str(item[0]) if isinstance(item, tuple) else f"{item} aligned" for item in {*one} ^ {*other}})


@pytest.fixture(
    scope="module",
    params=[(12, False), (40, False), (12, True), (40, True)],
    ids=["short chunks", "whole prompts", "short chunks, eager", "whole prompts, eager"],
)
def census(
    request: pytest.FixtureRequest,
    pair: Pair,  # noqa: F811
) -> tuple[Keys, Keys]:
    """What the start launches, and what serving does."""
    most, eager = request.param
    plain = [GREEDY, SamplingParams(temperature=0.8, top_p=0.9), GREEDY.replace(num_speculative_tokens=1)]
    asking = [PENALISED, SamplingParams(temperature=0.8, logprobs=2), GREEDY.replace(prompt_logprobs=1)]
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        engine = pair.engine(gpu=True, monkeypatch=patch, max_num_batched_tokens=most)
        known = start(engine, eager=eager)
        with recorded(launches, run=True, left_out=PASSES):
            for params in (plain, asking):
                generate(engine, params, 6)
    return known, keys_of(launches)


def test_nothing_else_is_compiled_while_serving(census: tuple[Keys, Keys]) -> None:
    assert lacking(*census) == set()


def test_a_specialisation_that_the_start_lacks_is_seen(census: tuple[Keys, Keys]) -> None:
    known, served = census
    fewer = {key: launch for key, launch in known.items() if launch.name != "update_kernel"}
    assert lacking(fewer, served) == {"update_kernel: all of it"}


def test_an_odd_number_of_entries_is_no_other_kernel(census: tuple[Keys, Keys]) -> None:
    """Views that begin at an odd entry are not aligned as those at an even one are."""
    known, _ = census
    for name, argument in (("prepare_kernel", "entry_row_ptr"), ("update_kernel", "out_flags_ptr")):
        assert lacking(known, keys_of([moved(known, name, argument)])) == set()


def test_a_view_that_is_aligned_otherwise_is_seen(census: tuple[Keys, Keys]) -> None:
    known, _ = census
    launch = moved(known, "prepare_kernel", "n_ptr")
    assert lacking(known, keys_of([launch])) == {"prepare_kernel: n_ptr aligned"}


def moved(known: Keys, kernel: str, argument: str) -> Launch:
    """A launch of a kernel with one of its tensors from the second element on."""
    launch = next(launch for launch in known.values() if launch.name == kernel)
    arguments = {**launch.arguments, argument: launch.arguments[argument][1:]}
    return Launch(launch.fn, launch.grid, arguments, launch.settings)

"""What Triton would compile while an engine serves: specialisations of a mixed run that no graph and no measurement at
the start has launched. Interpreted, with graphs that run what they would replay."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from kernel_launches import Launch, recorded
from specrs.drafters.base import device_drafter
from specrs.engine.blueprint import Blueprint
from specrs.engine.build_cuda import _prefill_inputs
from specrs.engine.engine import Engine
from specrs.runner.cuda.graphs import tasks
from specrs.runner.cuda.runner import CudaRunner, entries_of
from specrs.sampling import SamplingParams

from .cuda_engines import generate
from .test_cuda_runner import GREEDY, make_pair

Keys = dict[tuple[Any, ...], Launch]
LACKING = {
    # Where prompts end there is an iteration of K = 0 of its own, over the entries behind those that decode.
    "prepare_kernel: HAS_EMITS, count_ptr aligned",
    "accept_kernel: BLOCK_K",
    "tile_rejection_kernel: BLOCK_K",
    "finish_rejection_kernel: BLOCK_K",
    # Chunks of prompts and of catching up have any number of rows, and attention a cut for each up to 17.
    "embed_kernel: input_ids aligned",
    "paged_attention_kernel: ROWS",
    "paged_attention_kernel: FUSED, ROWS",
    "paged_attention_kernel: positions aligned",
    "combine_kernel: ROWS, positions aligned",
    "combine_kernel: BLOCK_ROWS, ROWS, positions aligned",
    "combine_kernel: positions aligned",
}
"""Known: compiled when the first launch of its kind is served, about a second each on a GPU, then kept on disk."""


class Graphs:
    """Stands in for captured graphs: a replay runs the function."""

    def __init__(self, work: dict[Hashable, Callable[[], None]]) -> None:
        self._work = work

    def __contains__(self, key: Hashable) -> bool:
        return key in self._work

    def __len__(self) -> int:
        return len(self._work)

    def replay(self, key: Hashable) -> None:
        self._work[key]()


def keys_of(launches: list[Launch]) -> Keys:
    return {launch.key(): launch for launch in launches}


@torch.inference_mode()
def start(engine: Engine) -> Keys:
    """Give the engine's runner its graphs; the keys of what captures them and of the measured prefill. Nothing runs."""
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    ctx = runner.ctx
    work = dict(tasks(ctx, runner.buckets, entries_of(ctx.record.views, "num_decode")))
    launches: list[Launch] = []
    with recorded(launches):
        for function in work.values():
            function()
        blueprint = Blueprint(engine.config, engine.weights)
        inputs = _prefill_inputs(engine.config.max_num_batched_tokens, blueprint, torch.device("cpu"))
        ctx.target.forward(inputs, ctx.kv_cache)
        device_drafter(ctx.drafter).feed(inputs, None)
    runner.graphs = Graphs(work)  # type: ignore[assignment]
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


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> tuple[Keys, Keys]:
    """What the start launches, and what serving does."""
    pair = make_pair(tmp_path_factory.mktemp("pair"))
    params = [GREEDY, SamplingParams(temperature=0.8, top_p=0.9), GREEDY.replace(num_speculative_tokens=1)]
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        engine = pair.engine(gpu=True, monkeypatch=patch)
        known = start(engine)
        with recorded(launches, run=True):
            generate(engine, params, 5)
    return known, keys_of(launches)


def test_nothing_else_is_compiled_while_serving(census: tuple[Keys, Keys]) -> None:
    assert lacking(*census) - LACKING == set()


def test_a_specialisation_that_the_start_lacks_is_seen(census: tuple[Keys, Keys]) -> None:
    known, served = census
    fewer = {key: launch for key, launch in known.items() if launch.name != "update_kernel"}
    assert lacking(fewer, served) - LACKING == {"update_kernel: all of it"}


def test_an_odd_number_of_entries_is_seen(census: tuple[Keys, Keys]) -> None:
    """Views that begin at an odd entry are not aligned as those at an even one are."""
    known, _ = census
    key, launch = next(item for item in known.items() if item[1].name == "prepare_kernel")
    rows = launch.arguments["entry_row_ptr"]
    moved = Launch(launch.fn, launch.grid, {**launch.arguments, "entry_row_ptr": rows[1:]}, launch.settings)
    assert moved.key() != key
    assert lacking(known, keys_of([moved])) == {"prepare_kernel: entry_row_ptr aligned"}

"""Constraints that leave few tokens or none, on the CUDA runner: tokens, ends and errors equal those of the CPU without
drafts.

As in `test_cuda_runner`, kernels are run by Triton's interpreter.
"""

from pathlib import Path
from typing import Any

import pytest
import specrs.kernels.cuda.sampling_scratch as sampling_scratch
from engine.test_constraints import EDGES, watch_draft_faults
from specrs.engine.engine import Engine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backends.cuda_engines import K, generate
from backends.test_cuda_runner import PENALISED, Pair, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def made(engine: Engine, temperature: float, k: int) -> list[tuple[list[int], str, str | None]]:
    """Return output, finish reason and error of each request."""
    watch_draft_faults(engine)
    requests = [asked.request(i, temperature, k) for i, asked in enumerate(EDGES)]
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    engine.scheduler.check_integrity()
    return [
        (request.output_token_ids, str(request.finish_reason), request.error and str(request.error))
        for request in requests
    ]


@pytest.mark.parametrize(("rule", "temperature"), [("rejection", 0.0), ("coupled", 0.9)])
def test_text_and_end_are_those_of_no_drafts(
    pair: Pair, rule: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that text and end equal those without drafts. Logits are adjusted for two sequences at a time, so a step
    has several parts."""
    monkeypatch.setattr(sampling_scratch, "COUNTED_SEQUENCES", 2)
    expected = made(pair.engine(gpu=False, monkeypatch=monkeypatch, rule=rule), temperature, k=0)
    assert {reason for _, reason, _ in expected} >= {"stop", "error"}
    assert made(pair.engine(gpu=True, monkeypatch=monkeypatch, rule=rule), temperature, k=K) == expected


class NewTensors(TorchDispatchMode):
    """Notes the number of elements of each tensor that an op allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        held = {x.untyped_storage().data_ptr() for x in given}
        self.sizes += [
            x.numel() for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in held
        ]
        return out


def test_steps_allocate_nothing_as_wide_as_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that logits are adjusted where they are: a step of penalties, biases, masks and grammars allocates no
    tensor with a number for each id, which no measurement at the start would have counted."""
    vocab = 4001
    pair = make_pair(tmp_path, vocab=vocab)
    with NewTensors() as new:
        engine = pair.engine(gpu=True, monkeypatch=monkeypatch)
        assert max(new.sizes) >= vocab
        new.sizes.clear()
        assert all(request.error is None for request in generate(engine, [PENALISED] * 3))
        made(engine, 0.0, K)
    assert 0 < max(new.sizes) < vocab

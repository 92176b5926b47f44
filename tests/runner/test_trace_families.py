"""Passes of other families on fake CUDA tensors: whole iterations, as `test_trace` watches those of plain ones."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from specrs.runner.cuda import iteration
from specrs.runner.cuda.context import entries_of
from specrs.runner.cuda.shapes import Shape, Tail
from torch._subclasses.fake_tensor import FakeTensorMode

from .test_trace import BATCH, LAYERS, K, Watch, count_ours, make

SHAPE: dict[str, object] = {"vocab": 97, "layers": LAYERS, "hidden": 64, "kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(("family", "kernels"), [("gemma3_text", 7), ("qwen3_moe", 11)])
def test_an_iteration_stays_on_its_device(family: str, kernels: int, tmp_path: Path) -> None:
    """Of a layer two more where blocks' outputs are normed; with experts the choice, the pairs' order and sums, too."""
    target = make_checkpoint(tmp_path, family, **SHAPE)  # type: ignore[arg-type]
    with FakeTensorMode():
        ctx = make(target, target, "rejection", "draft")
        entries = entries_of(ctx.record.views, "num_decode")
        with torch.inference_mode(), Watch() as watch:
            iteration.run(ctx, Shape(BATCH, K, BATCH * (K + 1), Tail.GREEDY), entries)
    assert count_ours(watch) == 1 + (K + 1) * (kernels * LAYERS + 3) + 3


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("tail", [Tail.GREEDY, Tail.SAMPLED])
def test_groups_take_one_kernel_more_an_iteration(tail: Tail, rule: str, tmp_path: Path) -> None:
    """Slots and block tables of all groups behind the first."""
    target = make_checkpoint(tmp_path, "gemma3_text", sliding_window=8, **SHAPE)  # type: ignore[arg-type]
    counts = []
    for grouped in (False, True):
        with FakeTensorMode():
            ctx = make(target, target, rule, "draft", grouped=grouped)
            assert len(ctx.state.tables) == 1 + grouped
            entries = entries_of(ctx.record.views, "num_decode")
            with torch.inference_mode(), Watch() as watch:
                iteration.run(ctx, Shape(BATCH, K, BATCH * (K + 1), tail), entries)
        counts.append(count_ours(watch))
        assert (len(ctx.state.group_tables) > 0) == grouped
    assert counts[1] == counts[0] + 1

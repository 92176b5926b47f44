"""Kernels whose programs hand results to each other, under the worst order and memory that `adversary` finds: they have
the bits of the plain interpreter. Planted faults are found."""

import os
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from adversary import adversary
from module_files import load_file
from specrs.kernels.cuda import linear_product, paged_attention, skinny_linear
from specrs.kernels.cuda._heads import Heads
from specrs.kernels.cuda.attention_config import AttentionConfig
from specrs.kernels.cuda.configs import LinearConfig
from torch import Tensor

pytestmark = pytest.mark.skipif(os.environ.get("SPECRS_GPU", "0") != "0", reason="kernels run on a GPU, or as if")
SEEDS = range(3)
Run = Callable[[ModuleType], tuple[Tensor, Tensor]]


def multiply(module: ModuleType, *, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Run a product twice with the same scratch; two or three programs share each tile. Return outputs and counters."""
    generator = torch.Generator().manual_seed(1)
    rows, n, k, config = 3, 40, 160, LinearConfig(16, 32, 5, 4, 1)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n * (1 + gated), k, generator=generator)
    sizes = linear_product.scratch_sizes(config, rows, n=n, sides=1 + gated)
    scratch = torch.full((sizes[0],), torch.nan), torch.zeros(sizes[1], dtype=torch.int32)
    outs = []
    for _ in range(2):
        outs.append(torch.zeros(rows, n))
        module.skinny_linear(x, module.Product(weight, gated=gated), outs[-1], scratch, config.as_list(), False)
        x = x + 1
    return torch.cat(outs), scratch[1]


def multiply_heads(module: ModuleType) -> tuple[Tensor, Tensor]:
    """Run the product of attention heads twice with the same scratch and cache; two programs share each head."""
    generator = torch.Generator().manual_seed(3)
    rows, (heads, kv_heads, dim), k, config = 3, (2, 1, 16), 96, LinearConfig(8, 32, 7, 4, 1)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn((heads + 2 * kv_heads) * dim, k, generator=generator)
    angles = torch.rand(rows, dim // 2, generator=generator)
    norm, cache = torch.randn(heads + kv_heads, dim, generator=generator), torch.zeros(2, 2, kv_heads, 4, dim)
    sizes = linear_product.scratch_sizes(config, rows, n=weight.shape[0] // 2, sides=2)
    scratch = torch.full((sizes[0],), torch.nan), torch.zeros(sizes[1], dtype=torch.int32)
    outs = []
    for slot in (0, 4):
        made = Heads(norm, [angles.cos(), angles.sin()], torch.arange(rows) + slot, cache, heads, 1e-6, (1.0, 1.0))
        outs.append(torch.zeros(rows, weight.shape[0]))
        module.skinny_linear(x, module.Product(weight, heads=made), outs[-1], scratch, config.as_list(), False)
        x = x + 1
    return torch.cat([*outs, cache.view(-1, weight.shape[0])]), scratch[1]


def attend(module: ModuleType, splits: int = 3, blocks_per_split: int = 1, heads: int = 4) -> tuple[Tensor, Tensor]:
    """Run attention of two requests of one row twice; each context has several splits, which the last program
    combines."""
    generator = torch.Generator().manual_seed(2)
    config = AttentionConfig(1, 16, 16, splits, 4, 1, blocks_per_split)
    cache = torch.randn(12, 2, 2, 16, 16, generator=generator)
    table = torch.tensor([[3, 1, 4, 0], [5, 9, 2, 6]])
    rows = module.AttentionRows(torch.tensor([60, 35]), torch.tensor([0, 1, 2]), table, 1)
    sizes = config.scratch_sizes(batch=2, max_q_len=1, num_kv_heads=2, head_dim=16)
    scratch = [torch.full((sizes[0],), torch.nan), torch.full((sizes[1],), torch.nan)]
    counters = torch.zeros(sizes[2], dtype=torch.int32)
    outs = []
    for _ in range(2):
        q, out = torch.randn(2, 16 * heads, generator=generator), torch.full((2, 16 * heads), torch.nan)
        mask_params = module.MaskParams(0.25)
        module.paged_attention(q, cache, rows, out, [*scratch, counters], mask_params, list(astuple(config)), False)
        outs.append(out)
    assert config.fused_lines(heads // 2) > 0, "the last program is to combine"
    return torch.cat(outs), counters


RUNS: dict[str, tuple[ModuleType, Run]] = {
    "product": (skinny_linear, multiply),
    "gated product": (skinny_linear, lambda module: multiply(module, gated=True)),
    "heads": (skinny_linear, multiply_heads),
    "attention": (paged_attention, attend),
    "attention of groups of eight": (paged_attention, lambda module: attend(module, heads=16)),
    "attention of long contexts": (paged_attention, lambda module: attend(module, 2, 2)),
}


def survives(module: ModuleType, run: Run, expected: Tensor) -> bool:
    """Return whether the adversary, with each of `SEEDS`, gets the bits of `expected` and leaves counters at zero."""
    for seed in SEEDS:
        with adversary(seed):
            out, counters = run(module)
        if not out.equal(expected) or bool(counters.any()):
            return False
    return True


@pytest.mark.parametrize("name", RUNS)
def test_any_order_and_late_stores(name: str) -> None:
    module, run = RUNS[name]
    expected, _ = run(module)
    assert expected.isfinite().all()
    assert survives(module, run, expected)


def planted(module: ModuleType, folder: Path, changes: list[tuple[str, str]]) -> ModuleType:
    """Return a copy of a kernel's module with its text changed and its ops renamed."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    for old, new in changes:
        assert old in text, f"the kernel has no {old!r} any more"
        text = text.replace(old, new)
    name = f"planted_{folder.name.replace('-', '_')}"
    text = text.replace('"specrs::', f'"{name}::').replace("torch.ops.specrs.", f"torch.ops.{name}.")
    path = folder / f"{name}.py"
    path.write_text(text)
    return load_file(name, path)


STORE = "            tl.store(slot + local, acc)\n"
SECOND = "            if SIDES == 2:\n                tl.store(slot + SUMS + local, up)\n"
COUNT = 'complete = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == high - low'
FAULTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "a load without .cg": ("product", [('tl.load(slot + local, cache_modifier=".cg")', "tl.load(slot + local)")]),
    "a counter that stays": ("product", [("tl.store(counters + tile, 0)", "pass")]),
    "a store after the count": (
        "product",
        [(STORE, ""), (COUNT, f"{COUNT}\n{STORE}")],
    ),
    "no release": ("product", [('sem="acq_rel"', 'sem="relaxed"')]),
    "a release within the multiprocessor": ("product", [('scope="gpu"', 'scope="cta"')]),
    "no barrier ahead of the count": ("product", [("            tl.debug_barrier()\n", "")]),
    "programs taken to arrive in order": ("product", [(COUNT, f"{COUNT.partition(' == ')[0]} >= 0\n"
                                                              "            complete = pid == high")]),
    "a load without .cg of the second half of a head": (
        "heads", [('tl.load(slot + SUMS + local, cache_modifier=".cg")', "tl.load(slot + SUMS + local)")]),
    "a counter of heads that stays": ("heads", [("tl.store(counters + tile, 0)", "pass")]),
    "the second half of a head after the count": (
        "heads", [(SECOND, ""), (COUNT, f"{COUNT}\n{SECOND}")]),
    "no barrier ahead of the count of heads": ("heads", [("            tl.debug_barrier()\n", "")]),
    "a load without .cg in attention of groups of eight": (
        "attention of groups of eight", [(', cache_modifier=".cg"', "")]),
    "a counter of attention of groups of eight that stays": (
        "attention of groups of eight", [("tl.store(counters + tile, 0)", "pass")]),
    "a load without .cg in attention": ("attention", [(', cache_modifier=".cg"', "")]),
    "a counter of attention that stays": ("attention", [("tl.store(counters + tile, 0)", "pass")]),
    "a counter of attention of long contexts that stays": (
        "attention of long contexts", [("tl.store(counters + tile, 0)", "pass")]),
    "no barrier in attention": ("attention", [("                tl.debug_barrier()\n", "")]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted(fault: str, tmp_path: Path) -> None:
    name, changes = FAULTS[fault]
    module, run = RUNS[name]
    expected, _ = run(module)
    assert not survives(planted(module, tmp_path, changes), run, expected)


def test_the_plain_interpreter_sees_none_of_most(tmp_path: Path) -> None:
    """Check that the plain interpreter does not notice a load without `.cg` and a missing barrier, because it runs one
    program after the other."""
    changes: list[tuple[str, str]] = [change for fault in ("a load without .cg", "no barrier ahead of the count")
                                      for change in FAULTS[fault][1]]  # fmt: skip
    out: Any = multiply(planted(skinny_linear, tmp_path, changes))[0]
    assert out.equal(multiply(skinny_linear)[0])

"""Checks of compiled kernels: a product as Qwen3-32B launches it passes, and each planted fault is found.

All kernels of real passes are `make aot`'s (`scripts/lint_kernels.py`).
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from module_files import load_file

SCRIPTS = Path(__file__).parents[3] / "scripts"
COMPILE = """
import json, re, subprocess, sys, tempfile
sys.path[:0] = [sys.argv[1]]
import torch, triton
from aot_kernels import discover
from specrs.kernels.cuda.configs import LinearShape
from specrs.kernels.cuda.linear_variants import variant
from specrs.kernels.cuda.variants import SIZES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pathlib import Path
v = variant("o", LinearShape(5120, 8192, torch.bfloat16), SIZES[0], rows=6, operands=("next_norm",),
            constants={"ACCUMULATE": True, "DEPENDENT": True})
names = v.fn.arg_names
types = {a: "constexpr" if a in v.constexprs else v.signature[a] for a in names}
aligned = [a for a, t in types.items() if t.startswith("*") or a in v.aligned]
source = ASTSource(v.fn, types, {(names.index(a),): x for a, x in v.constexprs.items()},
                   {(names.index(a),): [["tt.divisibility", 16]] for a in aligned})
k = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                   options={"num_warps": v.num_warps, "num_stages": v.num_stages, "launch_pdl": True})
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(k.asm["cubin"]); file.flush()
    sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
print(json.dumps([k.asm["ttgir"], sass]))
"""
NAME = "skinny_linear_kernel"


@pytest.fixture(scope="module")
def lints() -> ModuleType:
    return load_file("kernel_lints", SCRIPTS / "kernel_lints.py")


@pytest.fixture(scope="module")
def compiled() -> tuple[str, str]:
    """TTGIR and SASS, compiled in a process of its own, because this one interprets kernels."""
    if version("triton").startswith("3.6."):
        pytest.skip("the lints read the TTGIR of Triton 3.9, where barriers and waits have other names")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    ttgir, sass = json.loads(done.stdout)
    return ttgir, sass


def faults(lints: ModuleType, ttgir: str, sass: str) -> list[str]:
    ir = lints.TTGIR(ttgir)
    found: list[str] = lints.early_accesses(NAME, ir) + lints.shared_results(ir) + lints.pipelines(ir)
    return found + list(lints.machine_order(NAME, sass, 0, True))


def without(text: str, part: str, at: int = 0) -> str:
    """Return the text without the `at`th line that contains `part`."""
    lines = text.splitlines()
    where = [i for i, line in enumerate(lines) if part in line]
    assert where, part
    return "\n".join(lines[: where[at]] + lines[where[at] + 1 :])


def moved(text: str, part: str, before: str) -> str:
    """Return the text with the first line that contains `part` moved before the first that contains `before`."""
    lines = text.splitlines()
    line = next(line for line in lines if part in line)
    lines.remove(line)
    return "\n".join([*lines[: (at := next(i for i, x in enumerate(lines) if before in x))], line, *lines[at:]])


def test_a_product_has_no_fault(lints: ModuleType, compiled: tuple[str, str]) -> None:
    assert faults(lints, *compiled) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda t: t.replace("cache_modifier = cg", "cache_modifier = ca"), "without .cg"),
        (lambda t: without(t, "tt.store %complete"), "counters is not set back"),
        (lambda t: without(t, "ttg.barrier"), "no barrier of all threads"),
        (lambda t: t.replace("add, acq_rel, gpu", "add, relaxed, gpu"), "orders nothing"),
        (lambda t: t.replace("add, acq_rel, gpu", "add, acq_rel, cta"), "scope is not the GPU"),
        (lambda t: moved(t, "tt.atomic_rmw", "tt.store"), "a store after the count"),
        (lambda t: moved(t, "tt.grid_dependency_wait", "tt.return"), "ahead of the dependent wait"),
        (lambda t: without(t, "tt.grid_dependency_wait"), "does not wait"),
        (lambda t: t.replace("num = 10", "num = 0"), "waits for all copies"),
        (lambda t: t.replace("ttg.async_copy_global_to_local", "tt.load "), "tt.load in a loop with a product"),
    ],
)
def test_planted_in_ttgir(lints: ModuleType, compiled: tuple[str, str], change, fault: str) -> None:  # type: ignore[no-untyped-def]
    ttgir, sass = compiled
    changed = change(ttgir)
    assert changed != ttgir
    assert any(fault in line for line in faults(lints, changed, sass))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda s: without(s, "MEMBAR.ALL.GPU"), "no MEMBAR.GPU"),
        (lambda s: s.replace("MEMBAR.ALL.GPU", "MEMBAR.ALL.CTA"), "no MEMBAR.GPU"),
        (lambda s: without(s, "CCTL.IVALL"), "no CCTL.IVALL"),
        (lambda s: without(s, "ACQBULK"), "no ACQBULK"),
        (lambda s: moved(s, "LDGSTS", "ACQBULK"), "LDGSTS.E.BYPASS.128 before ACQBULK"),
        (lambda s: moved(s, "STG", "ACQBULK"), "before ACQBULK"),
        (lambda s: moved(s, "LDG.E", "ACQBULK"), "loads before ACQBULK, 0 are known"),
        (lambda s: moved(s, "MEMBAR.ALL.GPU", "STG"), "a store between MEMBAR and the count"),
    ],
)
def test_planted_in_machine_code(lints: ModuleType, compiled: tuple[str, str], change, fault: str) -> None:  # type: ignore[no-untyped-def]
    ttgir, sass = compiled
    changed = change(sass)
    assert any(fault in line for line in faults(lints, ttgir, changed))


def test_a_product_lets_the_next_kernel_start_early_and_one_ahead_of_attention_may_not(
    lints: ModuleType, compiled: tuple[str, str]
) -> None:
    ttgir, start = compiled[0], "tt.grid_dependency_launch_dependents"
    (fault,) = lints.starts_next_early(lints.TTGIR(ttgir))
    assert fault.startswith("lets the kernel after it start before")
    assert lints.starts_next_early(lints.TTGIR(moved(ttgir, "tt.grid_dependency_wait", start))) == []
    assert lints.starts_next_early(lints.TTGIR(without(ttgir, "tt.grid_dependency_wait"))) == [fault]
    assert lints.starts_next_early(lints.TTGIR(without(ttgir, start))) == []


@pytest.mark.parametrize(
    ("programs", "threads", "registers", "shared", "fits"),
    [
        (132, 128, 96, 143_360, True),
        (264, 128, 96, 116_736, False),  # two of these need 2 KiB less
        (264, 128, 96, 115_712, True),
        (264, 256, 172, 90_000, False),  # 172 registers x 256 threads allow one
        (1320, 256, 172, 90_000, True),  # ten on each run in turns
        (132, 1024, 96, 1000, False),
    ],
)
def test_occupancy(lints: ModuleType, programs: int, threads: int, registers: int, shared: int, fits: bool) -> None:
    assert (lints.occupancy(programs, 132, threads, registers, shared) == []) == fits

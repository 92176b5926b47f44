"""The ahead-of-time check of kernels: what it compares, and that it compiles. `make aot` covers all variants."""

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton
from module_files import load_file

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/aot_kernels.py"
BASELINE = Path(__file__).with_name(f"aot_baseline_triton_{triton.__version__}.json")


@pytest.fixture(scope="module")
def aot() -> ModuleType:
    return load_file("aot_kernels", SCRIPT)


RESULTS: dict[str, dict[str, Any]] = {
    "a": {
        "80": {"shared": 1000, "registers": 64, "local": 0, "instructions": {"mma": 8}},
        "90": {"shared": 2000, "registers": 64, "local": 0, "instructions": {"wgmma": 8}},
    },
    "b": {"80": {"shared": 0, "registers": 20, "local": 0, "instructions": {}}},
}


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("a", "80", "shared"), 1001, "a sm_80: shared 1000 -> 1001"),
        (("a", "90", "local"), 8, "a sm_90: local 0 -> 8"),
        (("a", "90", "registers"), 73, "a sm_90: registers 64 -> 73"),
        (("a", "90", "instructions"), {"mma": 8}, "a sm_90: instructions {'wgmma': 8} -> {'mma': 8}"),
        (("a", "100"), {"shared": 0}, "a sm_100: not in the baseline"),
        (("c",), {"120": {}}, "c sm_120: not in the baseline"),
    ],
)
def test_every_difference_has_a_line(aot: ModuleType, path: tuple[str, ...], value: Any, line: str) -> None:
    changed: Any = deepcopy(RESULTS)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert aot.differences(RESULTS, changed) == [line]


def test_what_is_equal_within_the_tolerance_has_none(aot: ModuleType) -> None:
    changed = deepcopy(RESULTS)
    changed["a"]["80"]["registers"] = 72
    assert aot.differences(RESULTS, changed) == []
    del changed["b"]
    assert aot.differences(RESULTS, changed) == ["b sm_80: in the baseline alone"]


def test_what_does_not_compile_or_fit_is_a_fault(aot: ModuleType) -> None:
    results = {"a": {"120": {"shared": 99 * 1024 + 1}, "90": {"shared": 99 * 1024 + 1}, "80": {"error": "no"}}}
    assert aot.faults(results) == ["a sm_120: shared 101377: the device has 101376", "a sm_80: no"]


def test_neighbours_compile_fit_and_do_not_spill(aot: ModuleType) -> None:
    mma = {"shared": 1000, "local": 0, "instructions": {"mma": 8}}
    results = {"a": {"80": mma, "90": mma, "120": mma}, "b": {"80": mma | {"instructions": {}}}}
    assert aot.neighbours(results) == [("a", 89), ("a", 121)]
    assert aot.neighbour_faults(results, {"a": {"89": mma, "121": mma}}) == []
    faulty = {"a": {"89": mma | {"shared": 99 * 1024 + 1}, "121": mma | {"local": 72}}}
    assert aot.neighbour_faults(results, faulty) == [
        "a sm_89: shared 101377: the device has 101376",
        "a sm_121: local 72: on sm_120 it is 0",
    ]


def test_variants_of_every_module_are_complete(aot: ModuleType) -> None:
    variants = aot.discover()
    kernels = {variant.fn.__name__ for variant in variants.values()}
    assert {"skinny_linear_kernel", "paged_attention_kernel", "combine_kernel", "combine_tiles_kernel"} <= kernels
    for variant in variants.values():
        given = variant.signature.keys() | variant.constexprs.keys()
        assert given == set(variant.fn.arg_names), variant.name
        assert not variant.signature.keys() & variant.constexprs.keys(), variant.name
        assert set(variant.aligned) <= variant.signature.keys(), variant.name


@pytest.mark.skipif(not BASELINE.exists(), reason=f"no baseline for Triton {triton.__version__}")
def test_one_kernel_against_the_baseline() -> None:
    """Check one kernel against the baseline, in a process of its own, because this process interprets kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, "--only", "skinny_linear_normed_bf16_rows6_large", "--jobs", "1"]
    command += ["--capability", "90"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"Triton {triton.__version__}: 1 kernels compiled, 0 problems"


def test_a_baseline_of_one_capability_is_not_written(aot: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["aot_kernels.py", "--write", "--capability", "90"])
    with pytest.raises(SystemExit, match="2"):
        aot.main()

"""Compile every variant of every Triton kernel for every GPU generation, without a GPU, and compare with the baseline.

    python scripts/aot_kernels.py                 compare with the baseline of the installed Triton
    python scripts/aot_kernels.py --write         write it; with --only, the rest of it stays
    python scripts/aot_kernels.py --only argmax   only variants whose name has this in it
    python scripts/aot_kernels.py --capability 90 only for sm_90
    python scripts/aot_kernels.py --neighbours    for sm_89 and sm_121, too, where a kernel has matrix instructions

What is compared: shared memory, local memory (spills; cos and sin have a little of their own) and how many matrix,
asynchronous copy and dependent launch instructions there are, exactly; registers within a tolerance. Whatever the
baseline says, shared memory and tensor memory must fit the device. Neighbours (RTX 4090, DGX Spark) have no baseline:
they must compile, fit, and spill hardly more than sm_80 and sm_120. Exit code 1 names every difference. Measures no
time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BASELINES = Path(__file__).parents[1] / "tests/kernels/cuda"
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024, 121: 99 * 1024}
"""Maximum bytes of shared memory of a thread block (CUDA programming guide, table of compute capabilities)."""
TENSOR_LIMIT = 512
"""Maximum columns of tensor memory of a thread block on compute capability 10.x."""
INSTRUCTIONS = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "cp_async": r"\bcp\.async\.c[ag]",
    "dependent": r"\bgriddepcontrol\.wait",
}
NEIGHBOURS = {80: 89, 120: 121}
"""Capability -> another that kernels are compiled for with the same configurations."""
SPILL_TOLERANCE = 64
"""Number of bytes per thread by which a neighbouring capability may spill more: attention of 64 rows spills 56 on sm_80
and 88 on sm_89."""
REGISTER_TOLERANCE = 8
Result = dict[str, Any]


def discover() -> dict[str, Any]:
    """Return every variant of every module of specrs.kernels.cuda, by name."""
    import specrs.kernels.cuda as package

    variants: dict[str, Any] = {}
    for info in pkgutil.iter_modules(package.__path__):
        for variant in getattr(importlib.import_module(f"{package.__name__}.{info.name}"), "VARIANTS", ()):
            if variant.name in variants:
                raise SystemExit(f"two variants are called {variant.name}")
            variants[variant.name] = variant
    return variants


def compile_one(job: tuple[str, int]) -> tuple[str, int, Result]:
    """Compile one variant for one capability; a compiler's error is a result too."""
    name, capability = job
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = discover()[name]
    names = variant.fn.arg_names
    missing = set(names) - set(variant.signature) - set(variant.constexprs)
    if missing:
        return name, capability, {"error": f"neither type nor value of {sorted(missing)}"}
    types = {arg: "constexpr" if arg in variant.constexprs else variant.signature[arg] for arg in names}
    anywhere = {param.name for param in variant.fn.params if param.do_not_specialize_on_alignment}
    pointers = {arg for arg, kind in types.items() if kind.startswith("*")} - anywhere
    aligned = [arg for arg in names if arg in pointers or arg in variant.aligned]
    source = ASTSource(
        variant.fn,
        types,
        {(names.index(arg),): value for arg, value in variant.constexprs.items()},
        {(names.index(arg),): [["tt.divisibility", 16]] for arg in aligned},
    )
    settings = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    if variant.constexprs.get("DEPENDENT"):
        settings["launch_pdl"] = True
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=settings)
    except Exception as error:  # ptxas and MLIR raise what they like
        return name, capability, {"error": f"{type(error).__name__}: {str(error).strip()[-300:]}"}
    tensor = getattr(compiled.metadata, "tmem_size", None) or 0
    if tensor > TENSOR_LIMIT:
        return name, capability, {"error": f"tensor memory {tensor}: the device has {TENSOR_LIMIT}"}
    ptx = compiled.asm["ptx"]
    counts = {kind: len(re.findall(pattern, ptx)) for kind, pattern in INSTRUCTIONS.items()}
    return name, capability, {
        "shared": compiled.metadata.shared,
        **resources(compiled.asm["cubin"]),
        "instructions": {kind: count for kind, count in counts.items() if count},
    }  # fmt: skip


def resources(cubin: bytes) -> Result:
    """Registers and bytes of local memory of a thread, from the cuobjdump that Triton brings along."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {"registers": int(found[1]), "local": int(found[2])}


def compile_all(names: Iterable[str], jobs: int, only: int | None = None) -> dict[str, dict[str, Result]]:
    """Return `{variant: {capability: result}}`, compiled by `jobs` processes; with `only`, for that capability."""
    variants = discover()
    work = [(name, capability) for name in names for capability in variants[name].capabilities]
    return compile_jobs([job for job in work if only in (None, job[1])], jobs)


def compile_jobs(work: list[tuple[str, int]], jobs: int) -> dict[str, dict[str, Result]]:
    """Compile `(variant, capability)` pairs by `jobs` processes; return `{variant: {capability: result}}`."""
    results: dict[str, dict[str, Result]] = {}
    with contextlib.ExitStack() as stack:
        if jobs == 1:  # without a process that imports everything again
            compiled: Iterable[tuple[str, int, Result]] = map(compile_one, work)
        else:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs))
            compiled = pool.imap_unordered(compile_one, work, chunksize=4)
        for done, (name, capability, result) in enumerate(compiled, 1):
            results.setdefault(name, {})[str(capability)] = result
            if sys.stderr.isatty():
                print(f"\r{done}/{len(work)} {name:<60.60}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return results


def differences(expected: dict[str, dict[str, Result]], actual: dict[str, dict[str, Result]]) -> list[str]:
    """Return a line for each difference between `actual` and `expected`."""
    lines = []
    for name in sorted(expected.keys() | actual.keys()):
        before, now = expected.get(name, {}), actual.get(name, {})
        for capability in sorted(before.keys() | now.keys(), key=int):
            old, new, label = before.get(capability), now.get(capability), f"{name} sm_{capability}"
            if old is None or new is None:
                lines.append(f"{label}: {'not in the baseline' if old is None else 'in the baseline alone'}")
                continue
            for key in sorted(old.keys() | new.keys()):
                a, b = old.get(key), new.get(key)
                if key == "registers" and a is not None and b is not None and abs(a - b) <= REGISTER_TOLERANCE:
                    continue
                if a != b:
                    lines.append(f"{label}: {key} {a} -> {b}")
    return lines


def faults(actual: dict[str, dict[str, Result]]) -> list[str]:
    """Return a line for each variant that does not compile or does not fit, whatever the baseline says."""
    lines = []
    for name, capabilities in sorted(actual.items()):
        for capability, result in capabilities.items():
            limit = SHARED_LIMIT[int(capability)]
            if "error" in result:
                lines.append(f"{name} sm_{capability}: {result['error']}")
            elif result["shared"] > limit:
                lines.append(f"{name} sm_{capability}: shared {result['shared']}: the device has {limit}")
    return lines


def neighbours(results: dict[str, dict[str, Result]]) -> list[tuple[str, int]]:
    """Return `(variant, capability)` for capabilities next to those of variants with matrix instructions, whose code
    generations differ."""
    return [
        (name, NEIGHBOURS[int(capability)])
        for name, capabilities in results.items()
        for capability, result in capabilities.items()
        if int(capability) in NEIGHBOURS and result.get("instructions", {}).get("mma")
    ]


def neighbour_faults(results: dict[str, dict[str, Result]], beside: dict[str, dict[str, Result]]) -> list[str]:
    """Return a line for each of `beside` that does not compile or fit, or spills more than its neighbour in
    `results`."""
    lines = faults(beside)
    for name, capabilities in sorted(beside.items()):
        for old, new in NEIGHBOURS.items():
            result = capabilities.get(str(new), {})
            spilled, before = result.get("local", 0), results[name].get(str(old), {}).get("local", 0)
            if spilled > before + SPILL_TOLERANCE:
                lines.append(f"{name} sm_{new}: local {spilled}: on sm_{old} it is {before}")
    return lines


def dump(results: dict[str, dict[str, Result]]) -> str:
    """Return the results as JSON with one line per compiled kernel, so that a diff of the baseline is readable."""
    blocks = []
    for name, capabilities in sorted(results.items()):
        rows = [
            f"    {json.dumps(capability)}: {json.dumps(result)}"
            for capability, result in sorted(capabilities.items(), key=lambda item: int(item[0]))
        ]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> int:
    """Compile the kernels, compare them with the baseline, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the baseline instead of comparing with it")
    parser.add_argument("--only", default="", metavar="TEXT", help="only variants whose name has TEXT in it")
    parser.add_argument(
        "--capability",
        type=int,
        choices=sorted(SHARED_LIMIT.keys() - NEIGHBOURS.values()),
        help="only for this one; not with --write",
    )
    parser.add_argument("--neighbours", action="store_true", help="compile for sm_89 and sm_121, too")
    parser.add_argument("--jobs", type=int, default=2, help="processes; default: 2")
    arguments = parser.parse_args()
    if arguments.write and arguments.capability is not None:
        parser.error("argument --capability: not allowed with argument --write, which writes all of them")
    if os.environ.pop("TRITON_INTERPRET", "0") not in ("", "0"):
        print("TRITON_INTERPRET is set; kernels are compiled without it", file=sys.stderr)
    import triton

    path = BASELINES / f"aot_baseline_triton_{triton.__version__}.json"
    names = [name for name in discover() if arguments.only in name]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # what is cached elsewhere was not compiled here and now
        actual = compile_all(names, arguments.jobs, arguments.capability)
        beside = compile_jobs(neighbours(actual), arguments.jobs) if arguments.neighbours else {}
    problems = faults(actual)
    if arguments.write:
        if not problems:
            kept = json.loads(path.read_text(encoding="utf-8")) if arguments.only and path.exists() else {}
            kept = {name: results for name, results in kept.items() if arguments.only not in name}
            path.write_text(dump(kept | actual), encoding="utf-8")
    elif not path.exists():
        problems.append(f"{path.name}: no baseline for Triton {triton.__version__}; --write makes one")
    else:
        expected = json.loads(path.read_text(encoding="utf-8"))
        expected = {name: results for name, results in expected.items() if arguments.only in name}
        if arguments.capability is not None:
            only = str(arguments.capability)
            expected = {name: {only: results[only]} for name, results in expected.items() if only in results}
        problems += differences(expected, actual)
    problems += neighbour_faults(actual, beside)
    for problem in problems:
        print(problem)
    count = sum(map(len, actual.values())) + sum(map(len, beside.values()))
    print(f"Triton {triton.__version__}: {count} kernels compiled, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

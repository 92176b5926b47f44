"""Instruction sets that `make test-isa` runs numerical tests under, and how each library names the one it uses. Holds
no tests.

Imports nothing that reads the variables, because they must be set before such an import.
"""

import os
import platform
import re
import subprocess
import sys

VARIABLE = "SPECRS_ISA"

SETS: dict[str, dict[str, str]] = {
    "portable": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
}
"""Environment variables of libraries, by name of the set for native passes. OpenBLAS is numpy's, which Triton's
interpreter uses."""

SAYS: dict[str, dict[str, str]] = {
    "portable": {"ATen": "DEFAULT", "oneDNN": "Intel SSE4.1", "OpenBLAS": "Nehalem", "MKL": "Intel(R) SSE4.2"},
    "avx2": {"ATen": "AVX2", "oneDNN": "Intel AVX2", "OpenBLAS": "Haswell", "MKL": "Intel(R) AVX2"},
}
"""Names that the libraries report for each set."""

_CHILD = """
import ctypes, re, torch, numpy
print("ATen:", torch.backends.cpu.get_cpu_capability())
library = ctypes.CDLL(re.search(r"\\S*openblas\\S*", open("/proc/self/maps").read())[0])
name = library.scipy_openblas_get_corename64_
name.restype = ctypes.c_char_p
print("OpenBLAS:", name().decode())
x = torch.ones(64, 64)
torch.mm(x, x)
torch.ops.mkldnn._linear_pointwise(x, torch.ops.mkldnn._reorder_linear_weight(x, 16), None, "none", [], "")
"""


def chosen() -> dict[str, str]:
    """Return the variables of the set named in `SPECRS_ISA`; none if it is unset or empty. They must be set before
    torch is imported. Raises if torch or numpy is already imported, for an unknown name, and on a machine that is not
    x86-64."""
    name = os.environ.get(VARIABLE)
    if not name:
        return {}
    if name not in SETS:
        raise ValueError(f"{VARIABLE}={name!r}: must be one of {', '.join(SETS)}")
    if platform.machine() != "x86_64":
        raise RuntimeError(f"{VARIABLE}={name!r}: the sets are those of x86-64, this is {platform.machine()}")
    late = [module for module in ("torch", "numpy") if module in sys.modules]
    if late:
        raise RuntimeError(f"{VARIABLE}: {' and '.join(late)} were imported before it was read")
    return SETS[name]


def ask_libraries(environment: dict[str, str]) -> dict[str, str]:
    """Return the instruction set that each library reports in a new process with that environment: `ATen`, `oneDNN`,
    `OpenBLAS`, `MKL`."""
    env = environment | {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", _CHILD], env=env, capture_output=True, text=True, check=True)
    patterns = {
        "ATen": r"^ATen: (.*)$",
        "oneDNN": r"^onednn_verbose,.*,cpu,isa:(.*)$",
        "OpenBLAS": r"^OpenBLAS: (.*)$",
        "MKL": r"^MKL_VERBOSE .*MKL.* architecture (.*), Lnx .*$",
    }
    found = {name: re.search(pattern, done.stdout, re.MULTILINE) for name, pattern in patterns.items()}
    return {name: match[1] for name, match in found.items() if match is not None}

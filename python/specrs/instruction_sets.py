"""Instruction sets of native passes: the processor's, or those that the environment variable SPECRS_ISA leaves."""

from __future__ import annotations

import os

from specrs.core import CpuPool, cpu_instruction_sets
from specrs.errors import InvalidConfigError, invalid

VARIABLE = "SPECRS_ISA"


def usable_instruction_sets() -> list[str]:
    """Return the names of the instruction sets that native passes may use, the fastest first: the one that SPECRS_ISA
    names and slower ones, else all of the processor's. The tiles of `amx` are used with those of AVX-512 only.

    Raises InvalidConfigError if the processor has no set of that name.
    """
    found = cpu_instruction_sets()
    name = os.environ.get(VARIABLE)
    if not name:
        return found
    vectors = [each for each in found if each != "amx"]
    if name not in vectors:
        allowed = f"must be one of {', '.join(vectors)}; unset it for the fastest"
        raise invalid(InvalidConfigError, VARIABLE, name, allowed)
    tiles = found[:1] if found[0] == "amx" and name.startswith("avx512") else []
    return tiles + vectors[vectors.index(name) :]


def instruction_set() -> str:
    """Return the name of the instruction set of native passes: the first of `usable_instruction_sets` but `amx`.

    Raises InvalidConfigError as that does.
    """
    return next(name for name in usable_instruction_sets() if name != "amx")


def start_pool(threads: int) -> CpuPool:
    """Return a pool of `threads` threads, whose passes use `instruction_set`.

    Raises InvalidConfigError for SPECRS_ISA as `usable_instruction_sets` does, and if the system gives fewer threads.
    """
    return CpuPool(threads, instruction_set())

"""One thread for torch and native passes in every test, and interpreted Triton kernels: only tests/gpu needs a GPU.

With SPECRS_GPU=1 (`make gpu-test`) the kernels' tests run on a GPU, by `gpu_shuttle`. SPECRS_GPU=rehearsal (`make
gpu-rehearsal`) does the same without one.

With two threads, passes of these small models wait for each other on busy cores: next to other load, the same engine
test takes 68 s with two threads and 3.5 s with one.

SPECRS_ISA names another instruction set than the machine's own (`make test-isa`).
"""

import gc
import os
import signal
import sys

import instruction_sets

os.environ.update(instruction_sets.chosen())
# Read where kernels are defined, so before anything imports one.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.environ.get("SPECRS_GPU") == "1" else "1")
# Some virtual machines name AMX among their instructions and kill the process that uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("SPECRS_NUM_THREADS", "1")  # of native passes; tests that want more say so
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs a hub
# Images of containers often forbid bytecode files: each process that a test starts would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch
from hypothesis import settings
from specrs.pair import TARGET
from specrs.tokenizer import Tokenizer

torch.set_num_threads(1)

# This process keeps the test modules that it compiles, a third of what collecting them takes.
sys.dont_write_bytecode = False

# Triton's interpreter makes millions of short-lived objects; a collection every 700 of them is a tenth of its time.
gc.set_threshold(50_000, 20, 50)

# A shell's background job ignores interrupts, and so would every process that a test starts to interrupt it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing about it on a busy machine.
settings.register_profile("specrs", deadline=None)
settings.load_profile("specrs")

GPU = os.environ.get("SPECRS_GPU") == "1"
if GPU:
    import gpu_shuttle

    gpu_shuttle.install()
elif os.environ.get("SPECRS_GPU") == "rehearsal":
    import gpu_shuttle

    gpu_shuttle.install("cpu")

if not GPU:
    import quick_interpreter

    quick_interpreter.install()

    from specrs.engine import warm_up

    # Engines that choose K measure the costs of steps at their start: for 2 seconds if torch computes, too long for
    # tests of texts, which no cost changes.
    warm_up.SECONDS = warm_up.NATIVE_SECONDS

collect_ignore = [] if GPU else ["gpu"]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The bundled pair's tokenizer: byte-level BPE of 2,048 tokens, in which `<|endoftext|>` is id 0."""
    return Tokenizer(str(TARGET))

"""Compiles trial kernels ahead in another process, then asks for the same launches in this one, with real tensors.
Prints the outcome as JSON. Runs as a process of its own, in which Triton compiles. Holds no tests."""

import json

import torch
from specrs.kernels.cuda.compile_ahead import NamedDevice, compile_ahead
from specrs.kernels.cuda.configs import LinearConfig, LinearShape
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.tuning import Trial, compile_trial
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

GATE_UP = LinearShape(64, 256, torch.bfloat16, gated=True, experts=(16, 4))
DOWN = LinearShape(256, 64, torch.bfloat16, experts=(16, 4))


def main() -> None:
    """Compile and launch the trials. The second one has a step that is no power of two and fails; the others
    compile."""
    target, limits = GPUTarget("cuda", 90, 32), DeviceLimits("", 90, 132, 227 * 1024)
    dense = LinearShape(256, 256, torch.bfloat16)
    work = [
        Trial.of(dense, LinearConfig(32, 64, 4, 4, 3, 2), 6, limits),
        Trial.of(dense, LinearConfig(32, 48, 4, 4, 3, 2), 6, limits),
        Trial.of(LinearShape(64, 256, torch.bfloat16, gated=True), LinearConfig(32, 64, 4, 4, 3, 2), 6, limits),
        *(Trial.of(experts, LinearConfig(32, 64, 4, 4, 3, 2), 6, limits) for experts in (GATE_UP, DOWN)),
    ]
    errors = dict(compile_ahead(compile_trial, work, target, 1))
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    driver.set_active(NamedDevice(target))
    for trial in work:
        if errors[trial] is None:
            trial.launch(trial.operands(torch.device("cpu")), compile_only=True)
    listed = [errors[trial] for trial in work]
    print(json.dumps({"errors": listed, "hits": hits}))


if __name__ == "__main__":
    main()

"""Runs the kernels' tests, which are written for Triton's interpreter, on a GPU. Holds no tests.

`install` gives every op of `specrs.kernels.cuda` an implementation for CPU tensors that takes its arguments to the
GPU, strides and shared storage and all, runs the compiled kernel there and brings back what it has written. With
"cpu" for the device it is rehearsed without one: the arguments go to other memory of the host, and a kernel launched
past it is refused, as a GPU refuses tensors of the host.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import specrs.kernels.cuda
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from triton.runtime.interpreter import InterpretedFunction


def ops() -> dict[str, CustomOpDef]:
    """Return every op of `specrs.kernels.cuda` by name."""
    found: dict[str, CustomOpDef] = {}
    for module in pkgutil.iter_modules(specrs.kernels.cuda.__path__):
        content = vars(importlib.import_module(f"specrs.kernels.cuda.{module.name}"))
        found |= {value._qualname: value for value in content.values() if isinstance(value, CustomOpDef)}
    return found


_inside = False


def install(device: str = "cuda") -> None:
    """Let every op of `specrs.kernels.cuda` run on `device` if it is called with CPU tensors. Must be called before the
    first call of an op. With "cpu", launches past the shuttle raise from then on."""
    if device == "cpu":
        refuse_direct_launches()
    for op in ops().values():
        op.register_kernel("cpu")(shuttle(op._init_fn, torch.device(device)))


def refuse_direct_launches() -> None:
    """Make launches of interpreted kernels outside `shuttle` raise."""
    launch = InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _inside:
            raise AssertionError(f"{self.__name__} is launched on tensors of the host, past the shuttle")
        return launch(self, *args, **kwargs)

    InterpretedFunction.run = run


def shuttle(function: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """Return `function` for tensors of the host: it gets copies on `device`, and what it writes there is copied
    back."""

    def run(*args: Any) -> None:
        global _inside
        storages: dict[int, tuple[Tensor, Tensor]] = {}

        def move(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [move(part) for part in value]
            if not isinstance(value, Tensor):
                return value
            storage = value.untyped_storage()
            if storage.data_ptr() not in storages:
                host = torch.empty(0, dtype=torch.uint8).set_(storage)
                storages[storage.data_ptr()] = host, host.to(device, copy=True)
            there = storages[storage.data_ptr()][1].untyped_storage()
            empty = torch.empty(0, dtype=value.dtype, device=device)
            return empty.set_(there, value.storage_offset(), value.shape, value.stride())

        before, _inside = _inside, True
        try:
            function(*(move(value) for value in args))
        finally:
            _inside = before
        for host, there in storages.values():
            host.copy_(there)

    return run

"""Records the kernels that a pass or an iteration launches, with their constants and arguments, without a GPU. Holds no
tests.

Ops run on fake CUDA tensors of real shapes. An op of specrs runs down to its launches, which are recorded instead of
made. An op of torch that writes memory counts as one kernel (a product that cuBLAS splits has two).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from backends.test_trace import VIEWS, fake_decoder
from gpu_shuttle import ops
from module_files import load_file
from specrs.backends.blueprint import Blueprint
from specrs.backends.cuda.build import make_context
from specrs.backends.cuda.context import Context
from specrs.backends.cuda.sampling.sampling_state import SamplingState
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.kernels.cuda.device import DeviceLimits
from specrs.speculative_config import SpeculativeConfig
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

H200 = DeviceLimits("NVIDIA H200", 90, 132, 227 * 1024)
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
SETTINGS = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel."""

    fn: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    """Arguments by name. Tensors are the ones that were passed."""
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.fn.fn.__name__)

    @property
    def constexprs(self) -> dict[str, Any]:
        """Constants, and pointer arguments that are None."""
        names = constant_names(self.fn)
        return {k: v for k, v in self.arguments.items() if k in names or v is None}

    def specialisation(self) -> tuple[dict[str, str], list[str], dict[str, Any]]:
        """Return `(types, names of arguments divisible by 16, constants)`, by which Triton compiles. An integer 1 is a
        constant, unless the kernel excludes it from specialisation."""
        exempt, constants = unspecialised(self.fn), dict(self.constexprs)
        any_alignment = unspecialised(self.fn, "do_not_specialize_on_alignment")
        types, aligned = {}, []
        for name, value in self.arguments.items():
            if name in constants:
                continue
            if isinstance(value, Tensor):
                types[name] = f"*{TYPES[value.dtype]}"
                # What torch allocates is aligned to 256 bytes; of a view its offset tells.
                if name not in any_alignment and value.storage_offset() * value.element_size() % 16 == 0:
                    aligned.append(name)
            elif isinstance(value, float):
                types[name] = "fp32"
            elif value == 1 and name not in exempt:
                constants[name] = 1
            else:
                types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and name not in exempt:
                    aligned.append(name)
        return types, aligned, constants

    def key(self) -> tuple[Any, ...]:
        """Return what distinguishes compiled variants of the kernel."""
        types, aligned, constants = self.specialisation()
        return self.name, *(tuple(sorted(part.items(), key=str)) for part in (types, constants, self.settings)), tuple(
            sorted(aligned)
        )  # fmt: skip


def constant_names(fn: Any) -> set[str]:
    """Return the arguments of a kernel that are `tl.constexpr`."""
    annotations = inspect.get_annotations(fn.fn)
    return {name for name, kind in annotations.items() if "constexpr" in str(kind)}


def unspecialised(fn: Any, kind: str = "do_not_specialize") -> set[str]:
    """Return the arguments that Triton must not specialise on. The interpreter keeps the options of `triton.jit`."""
    if isinstance(fn, JITFunction):
        return {param.name for param in fn.params if getattr(param, kind)}
    return set(fn.kwargs.get(kind) or ())


@contextmanager
def recorded(launches: list[Launch], *, run: bool = False, left_out: Collection[Any] = ()) -> Iterator[None]:
    """Append launches of Triton kernels to `launches` instead of making them; with `run` make them, too, except of the
    kernels `left_out`."""

    def wrap(original: Any) -> Any:
        def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            settings = {name: kwargs[name] for name in SETTINGS if name in kwargs}
            named = {name: value for name, value in kwargs.items() if name in self.arg_names}
            arguments = dict(zip(self.arg_names, args, strict=False)) | named
            shape = grid(arguments) if callable(grid) else tuple(grid)
            launches.append(Launch(self, shape, {name: arguments[name] for name in self.arg_names}, settings))
            return original(self, *args, grid=grid, warmup=warmup, **kwargs) if run and self not in left_out else None

        return launch

    with pytest.MonkeyPatch.context() as patch:
        for kind in (JITFunction, InterpretedFunction):
            patch.setattr(kind, "run", wrap(kind.run))
        yield


class Recorder(TorchDispatchMode):
    """Records kernels in order: launches of specrs's, and names of torch's ops that write memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Launch | str] = []
        self._functions = {f"{name}.default": op._init_fn for name, op in ops().items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        namespace, _, op = name.partition("::")
        if namespace == "specrs":
            launches: list[Launch] = []
            with recorded(launches):
                self._functions[name if "." in name else f"{name}.default"](*args, **(kwargs or {}))
            self.kernels += launches
            return None
        if op.partition(".")[0] not in VIEWS and name != "prim::device":
            self.kernels.append(op)
        return func(*args, **(kwargs or {}))

    @property
    def launches(self) -> list[Launch]:
        """Launches of Triton kernels among the recorded kernels."""
        return [kernel for kernel in self.kernels if isinstance(kernel, Launch)]


@contextmanager
def fake_context(
    target: Path,
    draft: Path | None,
    k: int,
    *,
    limits: DeviceLimits = H200,
    max_num_seqs: int = 64,
    max_model_len: int = 2048,
    rule: str = "rejection",
    num_blocks: int = 1000,
    cache_dtype: torch.dtype | None = None,
    max_loras: int = 0,
) -> Iterator[Context]:
    """Return the context that an engine with these folders' configurations has on a device of `limits`, made of fake
    tensors. `cache_dtype`: dtype of both KV caches. `max_loras`: number of slots for LoRA adapters of
    rank 16."""
    speculative = None
    if draft is not None:
        speculative = SpeculativeConfig(model=str(draft), num_speculative_tokens=k, rejection_sample_method=rule)
    config = EngineConfig(
        model=str(target),
        speculative_config=speculative,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=max_model_len,
        enable_lora=max_loras > 0,
        max_loras=max(1, max_loras),
    )
    cuda = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), torch.inference_mode():
        patch.setattr("specrs.backends.cuda.workspace.limits_of", lambda _device: limits)
        folders, bf16 = (target, draft), torch.bfloat16
        models = [None if folder is None else fake_decoder(folder, bf16, cache_dtype) for folder in folders]
        assert models[0] is not None
        drafter = None if models[1] is None else LoadedDraftModel(models[1])
        blueprint = Blueprint(config, Weights(models[0], drafter), max_steps_in_flight=2).with_kv_groups()
        sampling = SamplingState(max_num_seqs, models[0].vocab_size, torch.float32, cuda)
        yield make_context(blueprint, blueprint.scheduler(num_blocks), sampling, num_blocks)


def compiled(launch: Launch, capability: int) -> Any:
    """Compile the launch's kernel for a compute capability. Fails if Triton interprets."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, aligned, constants = launch.specialisation()
    names = launch.fn.arg_names
    source = ASTSource(
        launch.fn,
        {name: "constexpr" if name in constants else types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.settings))


def reference_configs(folder: Path) -> tuple[Path, Path]:
    """Write the configurations of Qwen3-32B and Qwen3-1.7B, the reference target and draft, into `folder`."""
    path = Path(__file__).parents[1] / "benches/gpu/models.py"  # the package `gpu` is the tests' own
    module = load_file("reference_models", path)
    return module.write_config("qwen3-32b", folder), module.write_config("qwen3-1.7b", folder)

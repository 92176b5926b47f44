"""Speeds up Triton's interpreter by skipping repeated work, and makes products of tiles the same on every CPU. Holds no
tests.

The interpreter replaces the functions of `triton.language` at every launch and at every call from one kernel function
to another, and finds them each time by `inspect.getmembers`. Here they are found once, and replaced functions stay
replaced. The interpreter also computes in int64 whether integer operations overflow, only for assertions under `debug`;
this is switched off. Both together took half of the time of the engine tests on the CUDA runner.

A third of the rest was spent on types: every operation checks the shapes of its operands and of its result, element by
element. Here a shape is checked once, operands of equal types are used as they are, and a number becomes a tensor of
each type and shape only once. Operators that most kernels use have a quick way of their own (`quick_operators`), which
halves the rest.

The interpreter computes a product of tiles by numpy's matmul, which calls OpenBLAS. On some CPUs, OpenBLAS's order of
additions depends on an element's place in the tile, which on a GPU it does not. A row would then get other bits next to
other rows. Here all elements are added in one order.

The replaced functions have the same names and meaning in Triton 3.6 and 3.9.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from quick_operators import NUMBERS, quick
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """Install the changes for the rest of this process. Further calls do nothing."""
    _find_builtins_once()
    _check_shapes_once()
    _match_operands_once()
    _add_in_one_order()
    _pass_arguments_once()
    plain_dtype = interpreter._get_np_dtype
    scalar_dtype = cache(plain_dtype)
    interpreter._get_np_dtype = lambda kind: (plain_dtype if kind.scalar.is_ptr() else scalar_dtype)(kind.scalar)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


class _Replaced:
    """The functions of `triton.language` that the interpreter has replaced for a kernel, with their originals, to
    replace or restore all of them at once."""

    def __init__(self) -> None:
        self.changes = dict[tuple[int, str], tuple[Any, Any, Any]]()
        """Replaced attributes by the owner's id and the attribute's name: the owner, the original (None if there was
        none), and the replacement."""

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        _, was, _ = self.changes.get((id(owner), name), (owner, getattr(owner, name, None), None))
        self.changes[id(owner), name] = owner, was, value
        setattr(owner, name, value)

    def again(self) -> "_Replaced":
        """Replace the same functions as before, and return self."""
        for (_, name), (owner, _, value) in self.changes.items():
            setattr(owner, name, value)
        return self

    def restore(self) -> None:
        for (_, name), (owner, was, _) in self.changes.items():
            if was is None:
                delattr(owner, name)
            else:
                setattr(owner, name, was)


def _find_builtins_once() -> None:
    patch_language, mark = interpreter._patch_lang, tl.core.TRITON_BUILTIN
    interpreter._LangPatchScope = _Replaced
    known, nothing = dict[tuple[int, ...], _Replaced](), _Replaced()

    @cache
    def modules_of(fn: FunctionType) -> tuple[list[Any], tuple[int, ...]]:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return modules, tuple(map(id, modules))

    def patch_once(fn: FunctionType) -> Any:
        modules, key = modules_of(fn)
        # A function of the interpreter's does not carry the mark of Triton's own.
        if modules and not any(hasattr(module.load, mark) for module in modules):
            return nothing  # to restore: the launch that replaced them does
        if key in known:
            return known[key].again()
        known[key] = patch_language(fn)
        return known[key]

    @cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        members = ((name, getattr(package, name)) for name in dir(package))
        return [(name, member) for name, member in members if tl.core.is_builtin(member)]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)  # without the check that a semantic is given

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        scope.set_attr(owner, name, quick(owner, name, call))

    unwrap, plain = tl.core._unwrap_if_constexpr, {int, float, bool, str, type(None), tl.core.tensor}

    def unwrap_once(value: Any) -> Any:
        if value.__class__ in plain:
            return value
        return value.value if value.__class__ is tl.core.constexpr else unwrap(value)

    tl.core._unwrap_if_constexpr = unwrap_once
    interpreter._patch_lang = patch_once
    interpreter._patch_builtin = patch_builtins
    interpreter._patch_attr = patch_attr


def _pass_arguments_once() -> None:
    """Read the parameters of each kernel, and make the type of each kind of pointer, only once. Pass tensors in host
    memory as they are, where the interpreter would copy their storages."""
    executor, convert = interpreter.GridExecutor, interpreter._implicit_cvt
    to_host, from_host = executor._init_args_hst, executor._restore_args_dev
    parameters, pointers = cache(inspect.getfullargspec), dict[torch.dtype, Any]()

    def arguments(fn: Any, *args: Any, **named: Any) -> dict[str, Any]:
        known = parameters(fn)
        by_name = dict(zip(known.args, args, strict=False)) | named
        if known.varargs or known.varkw or len(args) + len(named) != len(by_name) or {*by_name} != {*known.args}:
            return inspect.getcallargs(fn, *args, **named)  # raises, or adds defaults
        return by_name

    def is_in_place(value: Any) -> bool:
        if value.__class__ is torch.Tensor:
            return bool(value.device.type == "cpu")
        return value is None or value.__class__ in (int, float, bool)

    def pass_in_place(self: Any, args: Any, named: dict[str, Any]) -> tuple[Any, Any]:
        if all(map(is_in_place, args)) and all(map(is_in_place, named.values())):
            return args, named
        return to_host(self, args, named)  # type: ignore[no-any-return]

    def return_in_place(self: Any, args: Any, host: Any, named: dict[str, Any], named_host: dict[str, Any]) -> None:
        if host is not args:
            from_host(self, args, host, named, named_host)

    def convert_once(arg: Any) -> Any:
        if arg.__class__ is not torch.Tensor:
            return convert(arg)
        if arg.dtype not in pointers:
            pointers[arg.dtype] = convert(arg).type
        kind = pointers[arg.dtype]
        return tl.core.tensor(interpreter.TensorHandle(np.array([arg.data_ptr()], dtype=np.uint64), kind), kind)

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getfullargspec": parameters, "getcallargs": arguments})
    interpreter._implicit_cvt = convert_once
    executor._init_args_hst, executor._restore_args_dev = pass_in_place, return_in_place


def _add_in_one_order() -> None:
    """Make `tl.dot` of floats add in one order, wherever an element is in its tile."""
    plain = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if min(x.dtype.primitive_bitwidth for x in (a, b)) < 16 or not np.issubdtype(d.data.dtype, np.floating):
            return plain(self, a, b, d, *precision)
        left, right = (x.data.astype(d.data.dtype, copy=False) for x in (a, b))
        # Along the last axis of both, where `einsum` has one loop for every element.
        right = np.ascontiguousarray(np.swapaxes(right, -1, -2))
        product = np.einsum("...mk,...nk->...mn", left, right)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


def _match_operands_once() -> None:
    """Skip casts and broadcasts of operands that change nothing. Keep the tensors into which numbers are converted."""
    tensor = tl.core.tensor
    match = TritonSemantic.binary_op_type_checking_impl
    tensors: dict[tuple[Any, ...], Any] = {}

    def with_number(self: Any, x: Any, number: Any, number_first: bool, *rules: Any, **more: Any) -> tuple[Any, Any]:
        """Return the tensor `x` and `number` as tensors of one type and shape. The number is the left operand if
        `number_first` is set."""
        kind = x.type
        # 0, 0.0 and -0.0 are equal keys, but not one number; so are 1 and 1.0.
        shape = kind.shape if kind.is_block() else None
        key = (shape, kind.scalar.name, number.__class__, number or str(number), number_first, *rules, *more.items())
        if key in tensors:
            return x, tensors[key]
        pair = match(self, number, x, *rules, **more) if number_first else match(self, x, number, *rules, **more)
        made, of_number = pair[::-1] if number_first else pair
        if made is x:
            of_number.handle.data.flags.writeable = False
            tensors[key] = of_number
        return made, of_number

    def match_once(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        rules = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if lhs.__class__ is tensor:
            if rhs.__class__ is tensor:
                left, right = lhs.type, rhs.type
                plain = not left.scalar.is_ptr() and not (div_or_mod and left.scalar.primitive_bitwidth < 32)
                if plain and (left is right or left == right):
                    return lhs, rhs
            elif rhs.__class__ in (int, float):
                return with_number(self, lhs, rhs, False, *rules)
        elif rhs.__class__ is tensor and lhs.__class__ in (int, float):
            return with_number(self, rhs, lhs, True, *rules)[::-1]
        return match(self, lhs, rhs, *rules)

    def check_size(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not dtype.is_ptr() and data.itemsize > max(dtype.primitive_bitwidth // 8, 1):
            raise ValueError(f"numpy data of {data.itemsize} bytes exceeds {dtype}")

    TritonSemantic.binary_op_type_checking_impl = match_once
    interpreter.TensorHandle.__init__ = check_size


@dataclass(slots=True)
class _Shape:
    """Facts about a shape, kept for all block types and tensors of it. Never mutated, except that `of_tensor` is set
    once."""

    of_type: Any
    numel: int
    text: str
    of_tensor: tuple[Any, Any] | None = None
    """Shape and number of elements as a kernel reads them, as constants; None before the first tensor."""


def _check_shapes_once() -> None:
    block, tensor = tl.core.block_type, tl.core.tensor
    check, make, same = block.__init__, tensor.__init__, block.__eq__
    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast
    shapes, scalar = dict[tuple[int, ...], _Shape](), _Shape((), 1, "")

    def check_once(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        is_known = shape.__class__ is tuple and shape[:1] and shape[0].__class__ is int
        sizes = shape if is_known else tuple([getattr(size, "value", size) for size in shape])
        known = shapes.get(sizes)
        if known is None:
            check(self, element_ty, shape)  # raises where there is no such shape
            known = shapes[sizes] = _Shape(self.shape, self.numel, str(self.shape))
        self.element_ty, self.shape, self.numel = element_ty, known.of_type, known.numel
        self.name = f"<{known.text}, {element_ty}>"
        self.known = known

    def make_of_known(self: Any, handle: Any, type: Any) -> None:
        known = type.known if type.is_block() else scalar
        if known.of_tensor is None:
            make(self, handle, type)
            known.of_tensor = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known.of_tensor

    def same_shape(self: Any, other: Any) -> bool:
        if isinstance(other, block) and self.shape is other.shape:
            return bool(self.element_ty == other.element_ty)
        return bool(same(self, other))

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        made: tuple[Any, Any] = broadcast(self, lhs, rhs)
        return made

    def cast_others(self: Any, input: Any, dst_ty: Any, *rounding: Any, **fields: Any) -> Any:
        source, to = input.dtype, dst_ty.scalar
        if source is to:
            return input
        if rounding or fields or source.name not in NUMBERS or to.name not in NUMBERS:
            return cast(self, input, dst_ty, *rounding, **fields)
        data = input.handle.data.astype(NUMBERS[to.name])
        made = input.type.with_element_ty(to) if input.type.is_block() else to
        return tensor(interpreter.TensorHandle(data, to), made)

    types = dict[tuple[Any, str], Any]()

    def with_element_ty_once(self: Any, element_ty: Any) -> Any:
        key = self.shape, element_ty.name
        if key not in types:
            types[key] = block(element_ty, self.shape)
        return types[key]

    block.__init__, block.__eq__, tensor.__init__ = check_once, same_shape, make_of_known
    block.with_element_ty = with_element_ty_once
    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_others, cast_others

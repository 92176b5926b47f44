"""Triton's interpreter without work whose outcome it drops or has found before, and with products of tiles that are the
same on every CPU. Holds no tests.

The interpreter replaces the functions of `triton.language` by its own at every launch and again at every call of one
kernel function by another, and finds them anew each time, by `inspect.getmembers`. Here they are found once, and what
is replaced already stays. It also works out in int64 whether integer operations overflow, for assertions that it makes
under `debug` alone. Both together were half of the time of the engine tests on the CUDA runner. Of what was left a
third went into types: every operation checks the shapes of its operands and of its result, element by element, as
objects. Here a shape is checked once, and operands of one shape need no broadcast.

A product of tiles is numpy's matmul there, so OpenBLAS's. On some CPUs that adds in another order for another place in
the tile, and a GPU does not: a row would get other bits beside other rows.

What is replaced has the same names and meaning in Triton 3.6 and 3.9.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """For this process, until its end; once."""
    _find_builtins_once()
    _check_shapes_once()
    _add_in_one_order()
    plain_dtype = interpreter._get_np_dtype
    scalar_dtype = cache(plain_dtype)
    interpreter._get_np_dtype = lambda kind: (plain_dtype if kind.scalar.is_ptr() else scalar_dtype)(kind.scalar)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _find_builtins_once() -> None:
    patch_language = interpreter._patch_lang

    def patch_once(fn: FunctionType) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        # A function of the interpreter's does not carry the mark of Triton's own.
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()  # nothing to restore: the launch that replaced them does
        return patch_language(fn)

    @cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        members = ((name, getattr(package, name)) for name in dir(package))
        return [(name, member) for name, member in members if tl.core.is_builtin(member)]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_lang = patch_once
    interpreter._patch_builtin = patch_builtins


def _add_in_one_order() -> None:
    """In `tl.dot` of floats, whatever the place of an element in its tile."""
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


@dataclass(slots=True)
class _Shape:
    """What types and tensors of one shape share. Nothing mutates any of it."""

    of_type: Any
    numel: int
    text: str
    of_tensor: tuple[Any, Any] | None = None
    """Shape and number of elements as constants of a kernel."""


def _check_shapes_once() -> None:
    block, tensor = tl.core.block_type, tl.core.tensor
    check, make, same = block.__init__, tensor.__init__, block.__eq__
    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast
    shapes, scalar = dict[tuple[int, ...], _Shape](), _Shape((), 1, "")

    def check_once(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
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
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, *rounding, **fields)

    block.__init__, block.__eq__, tensor.__init__ = check_once, same_shape, make_of_known
    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_others, cast_others

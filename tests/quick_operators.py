"""Quick operators for kernels in Triton's interpreter, each as one call of numpy. Holds no tests.

The interpreter computes `x + y` in fifteen calls of Python: it looks for a common type and shape, and broadcasts both
operands. Most operands have equal element types already, and numpy broadcasts by the same rules. Such operands are
computed here. All others are left to the interpreter: bfloat16, which it stores as uint16, different types that are not
both signed integers, and numbers that do not fit the other operand's type.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_TENSOR, _BLOCK, _CONSTEXPR, _HANDLE = tl.core.tensor, tl.core.block_type, tl.core.constexpr, interpreter.TensorHandle
_BOOL, _builder = tl.int1, interpreter.interpreter_builder
_INTEGERS = {f"int{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)}
_UNSIGNED = {f"uint{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)}
_FLOATS = {"fp32": np.dtype("float32"), "fp64": np.dtype("float64")}
NUMBERS = _INTEGERS | _UNSIGNED | _FLOATS
"""Types by Triton's name that numpy has, too, and casts to each other as Triton does."""
_WIDER = {
    (one, other): getattr(tl, one if _INTEGERS[one].itemsize > _INTEGERS[other].itemsize else other)
    for one in _INTEGERS
    for other in _INTEGERS
}
"""Common type of each pair of signed integer types: the wider one, as in numpy."""
Call = Callable[..., Any]

_types: dict[str, dict[tuple[int, ...], tuple[Any, Any, Any]]] = {}


def _type_of(kind: Any, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Return the type, the shape and the number of elements of all blocks of `shape` with elements of type `kind`.
    Keeps them in `_types`."""
    of_kind = _types.setdefault(kind.name, {})
    block = _BLOCK(kind, list(shape))
    one = _TENSOR(_HANDLE(np.zeros(shape, dtype=interpreter._get_np_dtype(kind)), kind), block)
    found = of_kind[shape] = block, one.shape, one.numel
    return found


_ONE = _TENSOR(_HANDLE(np.zeros(1, dtype=np.int32), tl.int32), tl.int32)


def _tensor(data: Any, kind: Any, is_block: bool) -> Any:
    """Return the array `data` as Triton's tensor with elements of type `kind`. Without `is_block` it is a scalar, and
    `data` has one element."""
    handle = _HANDLE.__new__(_HANDLE)
    handle.data, handle.dtype, handle.attr = data, kind, {}
    made = _TENSOR.__new__(_TENSOR)
    made.handle, made.dtype = handle, kind
    if is_block:
        try:
            made.type, made.shape, made.numel = _types[kind.name][data.shape]
        except KeyError:
            made.type, made.shape, made.numel = _type_of(kind, data.shape)
    else:
        made.type, made.shape, made.numel = kind, _ONE.shape, _ONE.numel
    return made


def _constant(number: Any, kind: Any) -> Any:
    """Return a number as a read-only array of one element of type `kind`. None if `kind` is not a signed integer's
    type, fp32 or fp64, if it is an integer's type that `number` does not fit, if `number` is an int beyond 64 bits, or
    if it is no Python int or float."""
    name = kind.name
    if name in _FLOATS:
        is_such = number.__class__ is float or number.__class__ is int
    else:
        is_such = number.__class__ is int and name in _INTEGERS
    if not is_such:
        return None
    # 0.0 and -0.0 are equal, and a NaN equals nothing.
    key = name, number.__class__, number if number and number == number else str(number)
    found = _constants.get(key)
    if found is None:
        if name in _INTEGERS and not -(2 ** (kind.int_bitwidth - 1)) <= number < 2 ** (kind.int_bitwidth - 1):
            return None
        if number.__class__ is int and not -(2**63) <= number < 2**64:
            return None  # an error of Triton's
        found = _constants[key] = np.array([number], dtype=NUMBERS[name])
        found.flags.writeable = False
    return found


_constants: dict[tuple[Any, ...], Any] = {}


def _binary(plain: Call, compute: Call, kinds: set[str], result: Any = None) -> Call:
    """Return an operator that calls `compute` if the first operand's type is in `kinds`, and the second one has the
    same type or is a number of it, or both are signed integers. In all other cases it calls `plain`. Elements of its
    results have the type `result`, or that of the operands."""

    def call(self: Any, other: Any, **more: Any) -> Any:
        if other.__class__ is _CONSTEXPR:
            other = other.value
        kind = self.dtype
        if kind.name in kinds:
            if other.__class__ is _TENSOR:
                its = other.dtype
                common = kind if its is kind else _WIDER.get((kind.name, its.name))
                if common is not None:
                    data = compute(self.handle.data, other.handle.data)
                    return _tensor(data, result or common, self.type is not kind or other.type is not its)
            else:
                number = _constant(other, kind)
                if number is not None:
                    return _tensor(compute(self.handle.data, number), result or kind, self.type is not kind)
        return plain(self, other, **more)

    return call


def _reflected(plain: Call, compute: Call, kinds: set[str]) -> Call:
    """Return an operator such as `__radd__`, whose tensor is the right operand. It calls `compute` if the tensor's type
    is in `kinds` and the left operand is a number of that type, else `plain`."""

    def call(self: Any, other: Any, **more: Any) -> Any:
        if other.__class__ is _CONSTEXPR:
            other = other.value
        kind = self.dtype
        number = _constant(other, kind) if kind.name in kinds else None
        if number is None:
            return plain(self, other, **more)
        return _tensor(compute(number, self.handle.data), kind, self.type is not kind)

    return call


def _with_offset(plain: Call) -> Call:
    """Return the addition `plain` with a quick way for a tensor of pointers plus a tensor of signed integers, which are
    offsets in elements."""

    def call(self: Any, other: Any, **more: Any) -> Any:
        kind = self.dtype
        if other.__class__ is _TENSOR and kind.is_ptr() and other.dtype.name in _INTEGERS:
            bytes_each = max(1, kind.element_ty.primitive_bitwidth // 8)
            data = self.handle.data + bytes_each * other.handle.data.astype(np.uint64)
            return _tensor(data, kind, self.type.is_block() or other.type.is_block())
        return plain(self, other, **more)

    return call


def _where(plain: Call) -> Call:
    """Return `tl.where` as numpy's `where`, for a bool condition and two operands of one type or an operand and a
    number of its type. Otherwise it calls `plain`."""

    def call(condition: Any, x: Any, y: Any, **more: Any) -> Any:
        if condition.__class__ is _TENSOR and condition.dtype is _BOOL:
            left, right, kind = x, y, None
            if x.__class__ is _TENSOR:
                kind, left = x.dtype, x.handle.data
                if y.__class__ is _TENSOR:
                    right = y.handle.data if y.dtype is kind and kind.name in _SELECTED else None
                else:
                    right = _constant(y.value if y.__class__ is _CONSTEXPR else y, kind)
            elif y.__class__ is _TENSOR:
                kind, right = y.dtype, y.handle.data
                left = _constant(x.value if x.__class__ is _CONSTEXPR else x, kind)
            if kind is not None and left is not None and right is not None:
                data = np.where(condition.handle.data, left, right)
                return _tensor(data, kind, any(t.__class__ is _TENSOR and t.type.is_block() for t in (condition, x, y)))
        return plain(condition, x, y, **more)

    return call


def _to(plain: Call) -> Call:
    """Return the cast `tensor.to` as numpy's `astype`, between types that numpy has. Otherwise it calls `plain`."""

    def call(self: Any, dtype: Any, **more: Any) -> Any:
        kind = self.dtype
        if not more and dtype is kind:
            return self
        if not more and dtype.__class__ is type(kind) and kind.name in _CAST and dtype.name in _CAST:
            return _tensor(self.handle.data.astype(_CAST[dtype.name]), dtype, self.type is not kind)
        return plain(self, dtype, **more)

    return call


_CAST = NUMBERS | {"fp16": np.dtype("float16")}
_SELECTED = {*NUMBERS, "int1", "fp16", "bf16"}


def _largest(plain: Call, compute: Call) -> Call:
    """Return `tl.maximum` or `tl.minimum`. It calls `compute` for signed integers, else `plain`."""
    quick = _binary(plain, compute, {*_INTEGERS})

    def call(x: Any, y: Any, *rules: Any, **more: Any) -> Any:
        if not rules and x.__class__ is _TENSOR:
            return quick(x, y, **more)
        return plain(x, y, *rules, **more)

    return call


def _getitem(plain: Call) -> Call:
    """Return the indexing of tensors, with a quick way for blocks indexed by `None` and full slices, which only add
    axes."""

    def call(self: Any, slices: Any, **more: Any) -> Any:
        whole = slices.__class__ is tuple and all(part is None or part == slice(None) for part in slices)
        if whole and self.type.is_block():
            return _tensor(self.handle.data[slices], self.dtype, True)
        return plain(self, slices, **more)

    return call


def _filled(number: Any, kind: Any, shape: tuple[int, ...]) -> Any:
    """Return the interpreter's handle of a read-only array of `shape` full of `number`, with elements of type `kind`.
    None if `_constant` has no such element."""
    key = kind.name, shape, number.__class__, number if number and number == number else str(number)
    found = _full.get(key)
    if found is None:
        constant = _constant(number, kind)
        if constant is None:
            return None
        found = _full[key] = _HANDLE(np.full(shape, constant), kind)
        found.data.flags.writeable = False
    return found


def _mask(mask: Any, shape: tuple[int, ...], is_block: bool) -> Any:
    """Return the interpreter's handle of a bool array of `shape`, for the `mask` of a load or store by pointers of
    `shape`. All its elements are true without a mask. None if there is no quick way for this mask."""
    if mask is None:
        if shape not in _ones:
            _ones[shape] = _HANDLE(np.ones(shape, dtype=bool), _BOOL)
            _ones[shape].data.flags.writeable = False
        return _ones[shape]
    if mask.__class__ is not _TENSOR or mask.dtype is not _BOOL or mask.type.is_block() > is_block:
        return None
    if mask.handle.data.shape == shape:
        return mask.handle
    data = np.logical_and(mask.handle.data, _mask(None, shape, is_block).data)
    return _HANDLE(data, _BOOL) if data.shape == shape else None


_full: dict[tuple[Any, ...], Any] = {}
_ones: dict[tuple[int, ...], Any] = {}


def _matches(value: Any, pointer: Any) -> bool:
    """Return whether the tensor `value` has the type and the shape of what lies at `pointer`. A block of one element
    and a scalar have arrays of the same shape, and Triton refuses one with pointers of the other."""
    same = value.type.is_block() == pointer.type.is_block() and value.handle.data.shape == pointer.handle.data.shape
    return same and value.dtype is pointer.dtype.element_ty


def _load(plain: Call) -> Call:
    """Return `tl.load` without its checks of types, for pointers to types in `_LOADED`. It calls `plain` if mask or
    `other` need a cast, or for further arguments."""

    def call(pointer: Any, mask: Any = None, other: Any = None, **more: Any) -> Any:
        if not more and pointer.__class__ is _TENSOR and pointer.dtype.is_ptr():
            kind, is_block, shape = pointer.dtype.element_ty, pointer.type.is_block(), pointer.handle.data.shape
            if kind.name in _LOADED:
                where, rest = _mask(mask, shape, is_block), None
                if other.__class__ is _TENSOR:
                    rest = other.handle if _matches(other, pointer) else None
                elif other is not None:
                    rest = _filled(other, kind, shape)
                if where is not None and (other is None or (rest is not None and mask is not None)):
                    handle = _builder.create_masked_load(pointer.handle, where, rest, None, False)
                    return _tensor(handle.data, kind, is_block)
        return plain(pointer, mask, other, **more)

    return call


def _store(plain: Call) -> Call:
    """Return `tl.store` without its checks of types, for a tensor of the pointers' own type and shape. Otherwise it
    calls `plain`."""

    def call(pointer: Any, value: Any, mask: Any = None, **more: Any) -> Any:
        if not more and pointer.__class__ is _TENSOR and pointer.dtype.is_ptr() and value.__class__ is _TENSOR:
            kind, shape = pointer.dtype.element_ty, pointer.handle.data.shape
            where = _mask(mask, shape, pointer.type.is_block())
            if where is not None and kind.name in _LOADED and _matches(value, pointer):
                _builder.create_masked_store(pointer.handle, value.handle, where, None)
                return None
        return plain(pointer, value, mask, **more)

    return call


_LOADED = {*NUMBERS, "fp16", "bf16"}


_INT, _ALL = {*_INTEGERS, *_UNSIGNED}, {*NUMBERS}
_BINARY: dict[str, tuple[Call, set[str], Any]] = {
    "__add__": (np.add, _ALL, None),
    "__sub__": (np.subtract, _ALL, None),
    "__mul__": (np.multiply, _ALL, None),
    "__truediv__": (np.divide, {*_FLOATS}, None),
    "__and__": (np.bitwise_and, _INT | {"int1"}, None),
    "__or__": (np.bitwise_or, _INT | {"int1"}, None),
    "__xor__": (np.bitwise_xor, _INT | {"int1"}, None),
    "__lt__": (np.less, _ALL, _BOOL),
    "__le__": (np.less_equal, _ALL, _BOOL),
    "__gt__": (np.greater, _ALL, _BOOL),
    "__ge__": (np.greater_equal, _ALL, _BOOL),
    "__eq__": (np.equal, _ALL, _BOOL),
    "__ne__": (np.not_equal, _ALL, _BOOL),
}
_REFLECTED: dict[str, Call] = {"__radd__": np.add, "__rsub__": np.subtract, "__rmul__": np.multiply}


def quick(owner: Any, name: str, plain: Call) -> Call:
    """Return the builtin `name` of `owner` with its quick way, or `plain` if it has none. `owner` is `triton.language`,
    a module in it, or its class of tensors. `plain` is the interpreter's function, which the quick way calls for
    operands that it does not serve."""
    if owner is _TENSOR:
        if name in _BINARY:
            call = _binary(plain, *_BINARY[name])
            return _with_offset(call) if name == "__add__" else call
        if name in _REFLECTED:
            return _reflected(plain, _REFLECTED[name], _ALL)
        if name == "__getitem__":
            return _getitem(plain)
        if name == "to":
            return _to(plain)
    elif name == "where":
        return _where(plain)
    elif name == "load":
        return _load(plain)
    elif name == "store":
        return _store(plain)
    elif name in ("maximum", "minimum"):
        return _largest(plain, np.maximum if name == "maximum" else np.minimum)
    return plain

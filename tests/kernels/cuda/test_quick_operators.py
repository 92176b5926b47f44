"""The quick operators of interpreted kernels against the interpreter's own: the same bits, types and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import quick_operators
import triton.language as tl
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from quick_operators import quick
from specrs.kernels.cuda.delta_rule import delta_rule_kernel
from sweep import sweep
from triton.runtime import interpreter

KINDS = {
    **{name: np.dtype(name) for name in ("int8", "int32", "int64", "uint8", "uint32", "uint64", "float32", "float64")},
    "int1": np.dtype(bool),
    "float16": np.dtype("float16"),
    "bfloat16": np.dtype("uint16"),
}
SHAPES: list[tuple[int, ...] | None] = [None, (1,), (4,), (4, 1), (1, 8), (4, 8), (2, 4, 1)]
"""Shapes of operands; None is no block."""
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module", autouse=True)
def _replaced() -> Iterator[None]:
    """Replace the functions of `triton.language` as a launch does."""
    scope = interpreter._patch_lang(delta_rule_kernel.fn)
    yield
    scope.restore()


@st.composite
def tensors(draw: st.DrawFn, kinds: list[str], shapes: list[tuple[int, ...] | None] = SHAPES) -> Any:
    kind, shape = draw(st.sampled_from(kinds)), draw(st.sampled_from(shapes))
    data = draw(arrays.arrays(KINDS[kind], shape or (1,)))
    element = getattr(tl, kind)
    return tl.core.tensor(
        interpreter.TensorHandle(data, element), tl.core.block_type(element, list(shape)) if shape else element
    )


def broadcasts(shape: tuple[int, ...] | None, to: tuple[int, ...] | None) -> bool:
    """Return whether a block of one shape can be broadcast to another shape; None is no block."""
    try:
        return np.broadcast_shapes(shape or (), to or ()) == (to or ())
    except ValueError:
        return False


NUMBERS = st.one_of(st.integers(-(2**40), 2**70), st.integers(-2, 2), st.floats(), st.booleans())


def outcome(call: Any, *args: Any) -> Any:
    """Return bytes, types and shape of what `call` returns, or None if it raises, whatever it raises."""
    try:
        found = call(*args)
    except Exception:
        return None
    if not isinstance(found, tl.core.tensor):
        return found
    data = np.ascontiguousarray(found.handle.data)
    return (
        data.tobytes(),
        data.dtype,
        data.shape,
        str(found.type),
        str(found.dtype),
        str(found.shape),
        found.numel.value,
    )


def has_nan(x: Any) -> bool:
    """Return whether an operand is NaN, or has an element that is."""
    return bool(np.isnan(x.handle.data if isinstance(x, tl.core.tensor) else float(x)).any())


def check(owner: Any, name: str, *args: Any, defined: Any = lambda found: found) -> None:
    """Compare the quick operator with the interpreter's own, in those elements that `defined` leaves."""
    own = PLAIN[name]
    reached.clear()
    fast = quick(owner, name, lambda *given, **more: reached.append(given) or own(*given, **more))
    assert outcome(lambda: defined(fast(*args))) == outcome(lambda: defined(own(*args)))


reached: list[Any] = []
"""Arguments of calls of the interpreter's own operators."""


def plain(owner: Any, name: str) -> Any:
    member = getattr(owner, name).__wrapped__
    return lambda *args, **more: member(*args, **more, _semantic=interpreter.interpreter_semantic)


OPERATORS = [*quick_operators._BINARY, *quick_operators._REFLECTED]
# Read before a launch replaces them.
PLAIN = {name: plain(tl.core.tensor, name) for name in (*OPERATORS, "__getitem__", "to")} | {
    name: plain(tl.core, name) for name in ("where", "maximum", "minimum", "load", "store")
}


@pytest.mark.parametrize("name", OPERATORS)
@sweep(300)
@given(tensors([*KINDS]), st.data())
def test_operators(name: str, x: Any, data: st.DataObject) -> None:
    same = [kind for kind in KINDS if getattr(tl, kind) is x.dtype]
    number_only = name in quick_operators._REFLECTED
    y = data.draw(NUMBERS if number_only else st.one_of(NUMBERS, tensors(same), tensors([*KINDS])))
    # Of two NaN, numpy's instruction chooses whose bits the result has, by the lengths of the arrays.
    assume(not (has_nan(x) and has_nan(y)))
    check(tl.core.tensor, name, x, y)


def test_the_quick_way_is_taken() -> None:
    """Check that operands of equal types, numbers and broadcast shapes do not reach the interpreter's own operators."""
    ints, floats = (
        tl.core.tensor(
            interpreter.TensorHandle(np.ones((4, 1), KINDS[kind]), element), tl.core.block_type(element, [4, 1])
        )
        for kind, element in (("int32", tl.int32), ("float32", tl.float32))
    )
    for name in OPERATORS:
        for x in (ints, floats):
            others: list[Any] = [2] if name in quick_operators._REFLECTED else [2, x]
            for other in others:
                check(tl.core.tensor, name, x, other)
                is_float_only, is_int_only = name == "__truediv__", name in ("__and__", "__or__", "__xor__")
                assert bool(reached) == (is_float_only if x is ints else is_int_only)


CONDITIONS = tensors(["int1"])


@pytest.mark.parametrize("name", ["where", "maximum", "minimum"])
@sweep(300)
@given(tensors([*KINDS]), CONDITIONS, st.booleans(), st.data())
def test_functions(name: str, x: Any, condition: Any, swapped: bool, data: st.DataObject) -> None:
    same = [kind for kind in KINDS if getattr(tl, kind) is x.dtype]
    pair = [x, data.draw(st.one_of(NUMBERS, tensors(same), tensors([*KINDS])))]
    args = pair[::-1] if swapped else pair
    check(tl.core, name, *((condition,) if name == "where" else ()), *args)


@sweep(300)
@given(tensors([*KINDS]), st.sampled_from([*KINDS]), st.data())
def test_casts_and_new_axes(x: Any, kind: str, data: st.DataObject) -> None:
    check(tl.core.tensor, "to", x, getattr(tl, kind))
    part = st.one_of(st.none(), st.just(slice(None)))
    check(tl.core.tensor, "__getitem__", x, tuple(data.draw(st.lists(part, min_size=1, max_size=3))))


@sweep(300)
@given(st.sampled_from(sorted({*KINDS} - {"int1"})), st.sampled_from(SHAPES), st.data())
def test_memory(kind: str, shape: tuple[int, ...] | None, data: st.DataObject) -> None:
    """Check offsets of pointers, loads and stores: masks and other values of the same and of smaller shapes."""
    memory = data.draw(arrays.arrays(KINDS[kind], 32))
    element = tl.pointer_type(getattr(tl, kind))
    base = tl.core.tensor(interpreter.TensorHandle(np.array([memory.ctypes.data], np.uint64), element), element)
    offsets = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(32)[: int(np.prod(shape or (1,)))]
    at = interpreter.TensorHandle(offsets.reshape(shape or (1,)).astype(np.int32), tl.int32)
    index = tl.core.tensor(at, tl.core.block_type(tl.int32, list(shape)) if shape else tl.int32)
    check(tl.core.tensor, "__add__", base, index)
    pointers = PLAIN["__add__"](base, index)
    # The interpreter reads and writes past the end of pointers with masks and values that are larger.
    smaller = [one for one in SHAPES if broadcasts(one, shape)]
    mask = data.draw(st.one_of(st.none(), tensors(["int1"], smaller)))
    other = data.draw(st.one_of(st.none(), NUMBERS, tensors([kind], smaller)))

    def defined(loaded: Any) -> Any:
        """Zero the elements that a load leaves as they happen to be: those masked off without another value."""
        if mask is not None and other is None:
            loaded.handle.data = np.where(mask.handle.data, loaded.handle.data, loaded.handle.data.dtype.type(0))
        return loaded

    check(tl.core, "load", pointers, mask, other, defined=defined)
    value = data.draw(tensors([kind], smaller))
    was, after = memory.copy(), []
    for call in (quick(tl.core, "store", PLAIN["store"]), PLAIN["store"]):
        memory[:] = was
        outcome(lambda call=call: call(pointers, value, mask) and None)
        after.append(memory.tobytes())
    assert after[0] == after[1]

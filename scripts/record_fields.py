"""Prints python/specrs/record_fields.py: what the core writes into a record, by name. See `make generate`."""

from __future__ import annotations

from collections.abc import Iterator

from specrs import core

HEAD = '''"""Fields of a record by name. Generated from the core's names: run `make generate` after a change in Rust."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)  # not frozen: that takes three times as long to make, twice a step
class HeaderFields:
    """Counts of one step, the first elements of its record, in the order of `specrs.core.HEADER_FIELDS`."""
'''
FLAGS = '''

@dataclass(frozen=True, slots=True)
class StepFlags:
    """Steps of sampling that some row of a batch needs, by the names of `specrs.core.SAMPLING_STEPS`."""
'''
COLUMNS = '''

class ParamColumns(Generic[T]):
    """Sampling parameters of rows, a `T` for each column, in the order of `specrs.core.PARAM_COLUMNS`."""

    __slots__ = ()

    def column(self, index: int) -> T:
        """Return column `index`."""
        raise NotImplementedError
'''


def module() -> str:
    """Return the text of the module."""
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    """Yield the lines of the module."""
    yield HEAD
    yield from fields(core.HEADER_FIELDS, core.HEADER_DOCS, ": int")
    yield FLAGS
    yield from fields(core.SAMPLING_STEPS, core.SAMPLING_STEP_DOCS, ": bool = False")
    yield COLUMNS.rstrip("\n")
    for index, (name, doc) in enumerate(zip(core.PARAM_COLUMNS, core.PARAM_COLUMN_DOCS, strict=True)):
        yield f'\n    @property\n    def {name}(self) -> T:\n        """{doc.strip()}"""'
        yield f"        return self.column({index})"


def fields(names: tuple[str, ...], docs: tuple[str, ...], kind: str) -> Iterator[str]:
    """Yield the lines of a dataclass's fields."""
    for name, doc in zip(names, docs, strict=True):
        yield f'    {name}{kind}\n    """{doc.strip()}"""'


if __name__ == "__main__":
    print(module(), end="")

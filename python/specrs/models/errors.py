"""How a model that cannot be served says so. Defines no exception: those are `specrs.errors`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrs.errors import CheckpointError, UnsupportedModelError, short


def unsupported(field: str, value: object, allowed: str) -> UnsupportedModelError:
    """The exception for a field of config.json whose value is not implemented. Returned, not raised."""
    return UnsupportedModelError(f"config.json: {field}={short(value)}: not implemented; allowed: {allowed}")


def malformed(field: str, value: object, allowed: str, *, file: str = "config.json") -> CheckpointError:
    """The exception for a value that no model can have. Returned, not raised."""
    return CheckpointError(f"{file}: {field}={short(value)}: must be {allowed}")


@contextmanager
def of_folder(folder: Path) -> Iterator[None]:
    """What is wrong with a config.json inside is raised with its folder: an engine reads several."""
    try:
        yield
    except CheckpointError as fault:
        if not str(fault).startswith(("config.json: ", "generation_config.json: ")):
            raise
        raise type(fault)(f"{folder}/{fault}") from fault


@contextmanager
def about(model: str, revision: str, *others: str) -> Iterator[None]:
    """Name the fields that the user set in `CheckpointError`s from inside, which call them `model` and `revision`.

    `others` are further names of `model` inside.
    """
    try:
        yield
    except CheckpointError as fault:
        for name, field in (("model", model), ("revision", revision), *((other, model) for other in others)):
            if name != field and str(fault).startswith(f"{name}="):
                raise type(fault)(field + str(fault).removeprefix(name)) from fault
        raise


OF_TARGET = ("model", "revision")
OF_DRAFT = ("speculative_config.model", "speculative_config.revision", "tokenizer")
"""Arguments of `about` for the target, and for the draft's model and tokenizer."""

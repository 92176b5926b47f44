"""Errors for models that cannot be served. The exception classes are in `specrs.errors`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specrs.errors import CheckpointError, UnsupportedModelError, short


def unsupported(field: str, value: object, allowed: str) -> UnsupportedModelError:
    """Return the exception for a field of config.json whose value is not implemented."""
    return UnsupportedModelError(f"config.json: {field}={short(value)}: not implemented; allowed: {allowed}")


def malformed(field: str, value: object, allowed: str, *, file: str = "config.json") -> CheckpointError:
    """Return the exception for a field whose value no model can have."""
    return CheckpointError(f"{file}: {field}={short(value)}: must be {allowed}")


def without_states(config: Any, where: str) -> None:
    """Raise UnsupportedModelError if the layers of a model have states. Code that cannot run such models calls this.
    `config` is the ModelConfig. `where` is a phrase for the message, such as "on a GPU" or "as a draft model"."""
    if config.states is not None:
        raise unsupported("architectures", [config.architecture], f"{where}, a model whose layers have no states")


def without_interleaved_rope(config: Any, where: str) -> None:
    """Raise UnsupportedModelError if RoPE rotates neighbouring features of a head. Code that cannot run such models
    calls this. `config` is the ModelConfig. `where` is a phrase for the message, such as "on a GPU"."""
    if config.interleaved_rope:
        raise unsupported(
            "architectures", [config.architecture], f"{where}, a model whose RoPE rotates halves of a head"
        )


def with_equal_layers(config: Any, where: str) -> None:
    """Raise UnsupportedModelError if the layers of a model have different sizes. Code that cannot run such models calls
    this. `config` is the ModelConfig. `where` is a phrase for the message, such as "for custom_generate"."""
    if config.varied:
        raise unsupported("architectures", [config.architecture], f"{where}, a model whose layers have equal sizes")


@contextmanager
def of_folder(folder: Path) -> Iterator[None]:
    """Add the folder's path to errors about config.json that are raised inside. An engine reads several folders."""
    try:
        yield
    except CheckpointError as fault:
        if not str(fault).startswith(("config.json: ", "generation_config.json: ")):
            raise
        raise type(fault)(f"{folder}/{fault}") from fault


@contextmanager
def about(model: str, revision: str, *others: str) -> Iterator[None]:
    """Replace the names `model` and `revision` in `CheckpointError`s raised inside this context by the fields that the
    user set.

    `others` are further names that the code inside uses for `model`.
    """
    try:
        yield
    except CheckpointError as fault:
        for name, field in (("model", model), ("revision", revision), *((other, model) for other in others)):
            if name != field and str(fault).startswith(f"{name}="):
                raise type(fault)(field + str(fault).removeprefix(name)) from fault
        raise


OF_TARGET = ("model", "revision")
"""Arguments of `about` for the target."""
OF_DRAFT = ("speculative_config.model", "speculative_config.revision", "tokenizer")
"""Arguments of `about` for the draft's model and tokenizer."""

"""Reader of the table of products, the file `configs.json` that `specrs tune` writes. Checks tile shapes of products of
up to 64 rows; `providers` checks the entries of more rows."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from specrs.errors import InvalidConfigError, invalid_config
from specrs.kernels.cuda.configs import LinearConfig

_NUMBER, _DTYPE = r"[1-9]\d*", "(?:bfloat16|float16|float32)"
WEIGHT_KEY = re.compile(f"n{_NUMBER}-k{_NUMBER}-{_DTYPE}")
"""Key of a dense weight, `providers.key_of`."""
_SHAPE_KEY = re.compile(
    rf"{WEIGHT_KEY.pattern}(?:-gated)?(?:-heads{_NUMBER})?"
    rf"(?:-(?:fp8|int8|int4|mxfp4)-{_NUMBER}(?:-(?:pairs|blocks))?)?(?:-{_NUMBER}of{_NUMBER})?"
)
"""Key of a product, `LinearShape.key`."""
_FIELDS = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(LinearConfig)}
"""Fields of a tile shape, and whether each must be given."""
_POWERS = {"block_n", "block_k", "num_warps"}


def read_table(path: Path) -> dict[str, Any]:
    """Return the file's object, with its tile shapes checked.

    Raises InvalidConfigError, which names the entry, for a file that cannot be read or is no JSON, for a key that no
    product has, and for a tile shape that no kernel can have.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid_config("products", str(path), f"cannot be read: {error}; run specrs tune again") from error
    whole = object_of(path.name, whole)
    where = f"{path.name}: products"
    for gpu, of_gpu in object_of(where, whole.get("products", {})).items():
        for key, entry in object_of(f"{where}.{gpu}", of_gpu).items():
            _check_tiles(f"{where}.{gpu}.{key}", key, entry)
    return whole


def object_of(where: str, value: Any) -> dict[str, Any]:
    """Return `value`, which must be an object of JSON. Raises InvalidConfigError for anything else."""
    if not isinstance(value, dict):
        raise wrong_entry(where, value, "must be an object")
    return value


def wrong_entry(where: str, value: object, allowed: str) -> InvalidConfigError:
    """Return (not raise) the error for the entry `where` of a table at `value`."""
    return invalid_config(where, value, f"{allowed}; run specrs tune again, or remove the entry")


def _check_tiles(where: str, key: str, entry: Any) -> None:
    if not _SHAPE_KEY.fullmatch(key):
        raise wrong_entry(where, key, "must be a product such as n4096-k2048-bfloat16 or n64-k64-float16-gated-fp8-64")
    fields, needed = object_of(where, entry), [name for name, is_needed in _FIELDS.items() if is_needed]
    if not fields.keys() <= _FIELDS.keys() or not set(needed) <= fields.keys():
        raise wrong_entry(where, entry, f"must have {', '.join(needed)}, and at most prefetch more")
    for name, value in fields.items():
        least = 0 if name == "prefetch" else 1
        if type(value) is not int or value < least:
            raise wrong_entry(f"{where}.{name}", value, f"must be an integer of at least {least}")
        if name in _POWERS and value & (value - 1):
            raise wrong_entry(f"{where}.{name}", value, "must be a power of two")

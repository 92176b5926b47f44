"""Table of the library or kernel that computes each product of 65 to 2,048 rows, by (GPU, shape, rows). Times and
launches nothing.

`specrs tune` measures the table. Without an entry a product is cuBLAS's, as torch calls it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specrs.backends.cuda.product_table import WEIGHT_KEY, object_of, read_table, wrong_entry
from specrs.kernels.cuda.configs import TABLE, LinearShape
from specrs.kernels.cuda.linear_product import DRAFT_ROWS, MAX_ROWS

CUBLAS, CUBLASLT, OWN = "cublas", "cublaslt", "own"
PROVIDERS = (CUBLAS, CUBLASLT, OWN)
BUCKETS = (96, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of rows for which products are measured. A product takes the entry of the next larger one."""
OWN_BUCKETS = tuple(rows for rows in BUCKETS if rows <= DRAFT_ROWS)
"""Buckets in which our kernel can compute a product."""
ALGORITHM_BYTES = 96
"""Bytes of an algorithm, a `cublasLtMatmulHeuristicResult_t`. By cublasLt.h: 64 of `cublasLtMatmulAlgo_t`, a size, a
status, a float, and four reserved integers."""
_FIELDS = {"provider", "algorithm", "version"}


@dataclass(frozen=True, slots=True)
class Choice:
    """Who computes a product."""

    provider: str = CUBLAS
    """`cublas` (by torch), `cublaslt` (by nvmath-python) or `own` (`skinny_linear`)."""
    algorithm: bytes = b""
    """Algorithm that cuBLASLt uses, a `cublasLtMatmulHeuristicResult_t`. Empty for other providers."""
    version: int = 0
    """Version of cuBLASLt that `algorithm` is of, as it reports it. Other versions may read other fields."""

    def as_json(self) -> dict[str, Any]:
        """Return the entry that the table has."""
        entry: dict[str, Any] = {"provider": self.provider}
        return entry | ({"algorithm": self.algorithm.hex(), "version": self.version} if self.algorithm else {})


DEFAULT = Choice()
Entries = Mapping[str, Mapping[int, Choice]]
"""Choices of one GPU by the key of a product's weight, then by bucket."""


def key_of(rows_of_weight: int, size: int, dtype: torch.dtype) -> str:
    """Return the key of products with a weight `[rows_of_weight, size]`: `n10240-k5120-bfloat16`. Gates and heads do
    not count, because passes of many rows have kernels of their own for them."""
    return f"n{rows_of_weight}-k{size}-{str(dtype).removeprefix('torch.')}"


def key_of_shape(shape: LinearShape) -> str:
    """Return `key_of` the weight of `shape`."""
    return key_of(shape.n * shape.sides, shape.k, shape.dtype)


def bucket(rows: int) -> int | None:
    """Return the bucket of products of `rows` rows; None for up to 64 and for more than 2,048."""
    return BUCKETS[bisect_left(BUCKETS, rows)] if MAX_ROWS < rows <= BUCKETS[-1] else None


@dataclass(frozen=True, slots=True)
class Providers:
    """Choices of the products of one GPU."""

    entries: Entries = field(default_factory=dict)

    @classmethod
    def of(cls, gpu: str, path: Path = TABLE) -> Providers:
        """Return the choices that the table at `path` has for the GPU that torch calls `gpu`. Raises InvalidConfigError
        for a table that cannot be read."""
        return cls(load_providers(path).get(gpu, {}))

    @property
    def need_cublaslt(self) -> bool:
        """True if cuBLASLt computes a product."""
        return any(choice.provider == CUBLASLT for of in self.entries.values() for choice in of.values())

    def choice_of(self, n: int, k: int, dtype: torch.dtype, rows: int) -> Choice:
        """Return who computes the product of `rows` rows with a weight `[n, k]`."""
        of_weight = self.entries.get(key_of(n, k, dtype)) if self.entries else None
        return DEFAULT if of_weight is None else of_weight.get(bucket(rows) or 0, DEFAULT)

    def are_own(self, shapes: Iterable[LinearShape]) -> bool:
        """Return True if our kernel computes every product of `shapes`, of which there must be one, with 65 to 128
        rows."""
        found = [self.entries.get(key_of_shape(shape), {}) for shape in shapes]
        chosen = [of.get(rows, DEFAULT).provider for of in found for rows in OWN_BUCKETS]
        return bool(chosen) and set(chosen) == {OWN}


@cache
def load_providers(path: Path = TABLE) -> Mapping[str, Entries]:
    """Load the table: `{GPU name: {key: {bucket: choice}}}`. Empty if the file has none.

    Raises InvalidConfigError, which names the entry, as `read_table` does. And for a weight, bucket, provider or field
    that does not exist, for our kernel with more than 128 rows, and for an algorithm that is missing or is no
    cuBLASLt's.
    """
    return checked_providers(path)


def checked_providers(path: Path) -> dict[str, Entries]:
    """`load_providers` that reads the file each time."""
    where = f"{path.name}: many_rows"
    made: dict[str, Entries] = {}
    for gpu, of_gpu in object_of(where, read_table(path).get("many_rows", {})).items():
        made[gpu] = {
            key: _of_weight(f"{where}.{gpu}.{key}", key, of_key)
            for key, of_key in object_of(f"{where}.{gpu}", of_gpu).items()
        }
    return made


def _of_weight(where: str, key: str, entries: Any) -> dict[int, Choice]:
    """Return the choices of one weight by bucket."""
    if not WEIGHT_KEY.fullmatch(key):
        raise wrong_entry(where, key, "must be a dense weight such as n4096-k2048-bfloat16")
    made = dict(_read(where, *each) for each in object_of(where, entries).items())
    if key.endswith("float32") and any(choice.provider == CUBLASLT for choice in made.values()):
        raise wrong_entry(where, CUBLASLT, "must be bfloat16 or float16")
    return made


def _read(where: str, rows: str, entry: Any) -> tuple[int, Choice]:
    """Return the bucket and the choice of one entry of the table."""
    where = f"{where}.{rows}"
    if rows not in {str(size) for size in BUCKETS}:
        raise wrong_entry(where, rows, f"must be one of {', '.join(map(str, BUCKETS))}")
    if not isinstance(entry, dict) or not entry.keys() <= _FIELDS or "provider" not in entry:
        raise wrong_entry(where, entry, f"must have provider and at most {', '.join(sorted(_FIELDS))}")
    provider, version = entry["provider"], entry.get("version", 0)
    if provider not in PROVIDERS:
        raise wrong_entry(f"{where}.provider", provider, f"must be one of {', '.join(PROVIDERS)}")
    if provider == OWN and int(rows) not in OWN_BUCKETS:
        allowed = f"must be {CUBLAS} or {CUBLASLT} for more than {DRAFT_ROWS} rows"
        raise wrong_entry(f"{where}.provider", provider, allowed)
    if (entry.keys() == _FIELDS) != (provider == CUBLASLT) or (provider != CUBLASLT and len(entry) > 1):
        raise wrong_entry(where, entry, f"must have algorithm and version for {CUBLASLT}, and for it alone")
    if type(version) is not int or version < (provider == CUBLASLT):
        raise wrong_entry(f"{where}.version", version, "must be the integer that cuBLASLt reports as its version")
    try:
        algorithm = bytes.fromhex(entry.get("algorithm", ""))
    except (TypeError, ValueError):
        raise wrong_entry(f"{where}.algorithm", entry["algorithm"], "must be hexadecimal digits") from None
    if provider == CUBLASLT and len(algorithm) != ALGORITHM_BYTES:
        allowed = f"must be {ALGORITHM_BYTES} bytes, not {len(algorithm)}"
        raise wrong_entry(f"{where}.algorithm", entry["algorithm"], allowed)
    return int(rows), Choice(provider, algorithm, version)


def write_providers(path: Path, gpu: str, chosen: Mapping[LinearShape, Mapping[int, Choice]]) -> None:
    """Add `chosen`, by product and bucket, to the table at `path`, which is created if it is missing. Everything else
    in the file stays."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"products": {}}
    entries = table.setdefault("many_rows", {}).setdefault(gpu, {})
    for shape, choices in chosen.items():
        of_key = entries.setdefault(key_of_shape(shape), {})
        of_key.update({str(rows): choice.as_json() for rows, choice in choices.items()})
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")

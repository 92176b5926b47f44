"""The table of who computes products of many rows: its choice, its file, and its errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from specrs.backends.cuda import providers
from specrs.backends.cuda.product_table import read_table
from specrs.backends.cuda.providers import (
    BUCKETS,
    CUBLAS,
    CUBLASLT,
    OWN,
    Choice,
    Providers,
    bucket,
    load_providers,
    write_providers,
)
from specrs.errors import InvalidConfigError
from specrs.kernels.coding import Coding
from specrs.kernels.cuda.configs import LinearConfig, LinearShape, load_table
from specrs.kernels.cuda.tuning import write_table

GATED = LinearShape(25600, 5120, torch.bfloat16, gated=True)
DOWN = LinearShape(5120, 25600, torch.bfloat16)
TILES = {"block_n": 64, "block_k": 128, "programs": 132, "num_warps": 4, "num_stages": 4}
LT = Choice(CUBLASLT, bytes(range(96)), 130401)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(64, None), (65, 96), (96, 96), (97, 128), (128, 128), (129, 160), (2048, 2048), (2049, None)],
)
def test_rows_take_the_next_larger_bucket(rows: int, expected: int | None) -> None:
    assert bucket(rows) == expected


def test_choices_are_by_weight_dtype_and_rows() -> None:
    chosen = Providers({"n51200-k5120-bfloat16": {96: Choice(OWN), 256: LT}})

    def of(rows: int, n: int = 51200, dtype: torch.dtype = torch.bfloat16) -> str:
        return chosen.choice_of(n, 5120, dtype, rows).provider

    assert [of(rows) for rows in (64, 65, 96, 97, 192, 193, 256, 257)] == [
        *(CUBLAS, OWN, OWN, CUBLAS),
        *(CUBLAS, CUBLASLT, CUBLASLT, CUBLAS),
    ]
    assert of(96, n=25600) == of(96, dtype=torch.float16) == CUBLAS
    assert chosen.need_cublaslt
    assert not Providers().need_cublaslt
    assert Providers().choice_of(51200, 5120, torch.bfloat16, 96) == Choice(CUBLAS)


def test_all_products_must_be_own_in_both_buckets() -> None:
    own = {96: Choice(OWN), 128: Choice(OWN), 160: LT}
    both = Providers({providers.key_of_shape(shape): own for shape in (GATED, DOWN)})
    assert both.are_own([GATED, DOWN])
    assert not both.are_own([])
    assert not both.are_own([GATED, DOWN, LinearShape(64, 64, torch.bfloat16)])
    assert not Providers(both.entries | {providers.key_of_shape(DOWN): {96: Choice(OWN)}}).are_own([GATED, DOWN])


def test_the_file_keeps_everything_else(tmp_path: Path) -> None:
    path = tmp_path / "configs.json"
    write_providers(path, "some GPU", {DOWN: {96: Choice(OWN)}})
    write_table(path, "some GPU", {DOWN: LinearConfig(64, 128, 132, 4, 4)})
    write_providers(path, "other GPU", {DOWN: {96: Choice(CUBLAS)}})
    write_providers(path, "some GPU", {GATED: {2048: LT}, DOWN: {384: LT}})
    write_providers(path, "some GPU", {DOWN: {384: Choice(CUBLAS)}})
    assert load_providers(path) == {
        "some GPU": {
            "n5120-k25600-bfloat16": {96: Choice(OWN), 384: Choice(CUBLAS)},
            "n51200-k5120-bfloat16": {2048: LT},
        },
        "other GPU": {"n5120-k25600-bfloat16": {96: Choice(CUBLAS)}},
    }
    assert load_table(path)["some GPU"][DOWN.key] == LinearConfig(64, 128, 132, 4, 4)
    written = json.loads(path.read_text())["many_rows"]["some GPU"]["n51200-k5120-bfloat16"]
    assert written == {"2048": {"provider": "cublaslt", "algorithm": bytes(range(96)).hex(), "version": 130401}}


def lt(**fields: Any) -> dict[str, Any]:
    return LT.as_json() | fields


@pytest.mark.parametrize(
    ("rows", "entry", "message"),
    [
        ("100", {"provider": "own"}, "n1-k2-bfloat16.100='100': must be one of 96, 128, 160"),
        ("96", "own", "n1-k2-bfloat16.96='own': must have provider"),
        ("96", {}, "n1-k2-bfloat16.96={}: must have provider"),
        ("96", {"provider": "own", "tile": 3}, "must have provider and at most algorithm, provider, version"),
        ("96", {"provider": "magma"}, "n1-k2-bfloat16.96.provider='magma': must be one of cublas, cublaslt, own"),
        ("160", {"provider": "own"}, "160.provider='own': must be cublas or cublaslt for more than 128 rows"),
        ("96", {"provider": "cublaslt"}, "must have algorithm and version for cublaslt, and for it alone"),
        ("96", {"provider": "cublaslt", "algorithm": "01"}, "must have algorithm and version"),
        ("96", {"provider": "cublas", "algorithm": "01", "version": 13}, "must have algorithm and version"),
        ("96", {"provider": "own", "version": 13}, "must have algorithm and version"),
        ("96", lt(version="13"), "version='13': must be the integer that cuBLASLt reports as its version"),
        ("96", lt(version=0), "version=0: must be the integer"),
        ("96", lt(version=True), "version=True: must be the integer"),
        ("96", lt(algorithm="0g"), "algorithm='0g': must be hexadecimal digits"),
        ("96", lt(algorithm=12), "algorithm=12: must be hexadecimal digits"),
        ("96", lt(algorithm="01ff"), "96.algorithm='01ff': must be 96 bytes, not 2"),
        ("96", lt(algorithm=""), "algorithm='': must be 96 bytes, not 0"),
    ],
)
def test_malformed_entries_are_named(tmp_path: Path, rows: str, entry: Any, message: str) -> None:
    path = tmp_path / "configs.json"
    path.write_text(json.dumps({"products": {}, "many_rows": {"GPU": {"n1-k2-bfloat16": {rows: entry}}}}))
    with pytest.raises(InvalidConfigError, match=re.escape(message)) as error:
        load_providers(path)
    assert str(error.value).startswith("configs.json: many_rows.GPU.")
    assert str(error.value).endswith("; run specrs tune again, or remove the entry")


@pytest.mark.parametrize(
    ("section", "key", "entry", "message"),
    [
        ("many_rows", "n1-k2-bfloat16-gated", {}, "must be a dense weight such as n4096-k2048-bfloat16"),
        ("many_rows", "n1-k0-bfloat16", {}, "must be a dense weight"),
        ("many_rows", "n1-k2-float64", {}, "must be a dense weight"),
        ("many_rows", "n1-k2-float32", {"96": LT.as_json()}, "n1-k2-float32='cublaslt': must be bfloat16 or float16"),
        ("products", "n1-k2-bf16", TILES, "n1-k2-bf16='n1-k2-bf16': must be a product such as n4096-k2048-bfloat16"),
        ("products", "n1-k2-bfloat16-fp4-32", TILES, "must be a product such as"),
        ("products", "n1-k2-bfloat16", [], "n1-k2-bfloat16=[]: must be an object"),
        ("products", "n1-k2-bfloat16", {"block_n": 64}, "must have block_n, block_k, programs, num_warps, num_stages"),
        ("products", "n1-k2-bfloat16", TILES | {"block_m": 16}, "and at most prefetch more"),
        ("products", "n1-k2-bfloat16", TILES | {"block_k": 96}, "block_k=96: must be a power of two"),
        ("products", "n1-k2-bfloat16", TILES | {"num_stages": 0}, "num_stages=0: must be an integer of at least 1"),
        ("products", "n1-k2-bfloat16", TILES | {"programs": "132"}, "programs='132': must be an integer of at least 1"),
        ("products", "n1-k2-bfloat16", TILES | {"prefetch": -1}, "prefetch=-1: must be an integer of at least 0"),
    ],
)
def test_entries_that_can_never_apply_are_named(
    tmp_path: Path, section: str, key: str, entry: Any, message: str
) -> None:
    path = tmp_path / "configs.json"
    path.write_text(json.dumps({section: {"GPU": {key: entry}}}))
    with pytest.raises(InvalidConfigError, match=re.escape(message)) as error:
        load_providers(path)
    assert str(error.value).startswith(f"configs.json: {section}.GPU.{key}")
    assert str(error.value).endswith("; run specrs tune again, or remove the entry")


@pytest.mark.parametrize(
    "shape",
    [
        GATED,
        LinearShape(64, 32, torch.float32, head_dim=64),
        LinearShape(64, 32, torch.float16, gated=True, coding=Coding("int4", 32, minima="blocks"), experts=(128, 8)),
    ],
)
def test_every_key_that_is_written_can_be_read(tmp_path: Path, shape: LinearShape) -> None:
    path = tmp_path / "configs.json"
    write_table(path, "GPU", {shape: LinearConfig(64, 128, 132, 4, 4)})
    write_providers(path, "GPU", {LinearShape(64, 32, shape.dtype): {96: Choice(OWN)}})
    assert read_table(path)["products"]["GPU"].keys() == {shape.key}
    assert len(load_providers(path)["GPU"]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "configs.json': cannot be read: Expecting property name"),
        ("[]", "configs.json=[]: must be an object"),
        ('{"products": []}', "configs.json: products=[]: must be an object"),
        ('{"products": {"GPU": 3}}', "configs.json: products.GPU=3: must be an object"),
        ('{"many_rows": null}', "many_rows=None: must be an object"),
        ('{"many_rows": {"GPU": []}}', "many_rows.GPU=[]: must be an object"),
        ('{"many_rows": {"GPU": {"n1-k2-bfloat16": "own"}}}', "many_rows.GPU.n1-k2-bfloat16='own': must be an object"),
    ],
)
def test_other_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "configs.json"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match=re.escape(message)) as error:
        load_providers(path)
    assert "; run specrs tune again" in str(error.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"none.json': cannot be read: .*No such file"):
        load_providers(tmp_path / "none.json")


def test_the_committed_table_can_be_read() -> None:
    for gpu, entries in load_providers().items():
        assert gpu
        assert all(set(choices) <= set(BUCKETS) for choices in entries.values())
    assert Providers.of("no such GPU") == Providers()

"""Variants of products of few rows that are compiled ahead of time. Launches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from specrs.kernels.coding import Coding
from specrs.kernels.cuda._codes import coding_constants
from specrs.kernels.cuda._heads import head_arguments
from specrs.kernels.cuda.configs import LinearShape, linear_config
from specrs.kernels.cuda.linear_product import DRAFT_ROWS, MAX_ROWS, block_m
from specrs.kernels.cuda.skinny_linear import skinny_linear_kernel
from specrs.kernels.cuda.variants import BLACKWELL, DTYPES, SIZES, Size, Variant


def variant(
    name: str,
    shape: LinearShape,
    size: Size,
    *,
    rows: int,
    operands: tuple[str, ...] = (),
    constants: Mapping[str, Any] | None = None,
    argmax: bool = False,
) -> Variant:
    """Return the variant of the kernel that `launch` uses for `shape` on devices of `size`.

    `operands` may be `bias`, `squares`, `added` and `next_norm`. `constants` are those that differ from a plain
    product. `argmax`: the variant of `lm_head`.
    """
    dtype = next(key for key, value in DTYPES.items() if value == shape.dtype)
    config = linear_config(shape, block_m(rows), size.limits)
    present = {"x": f"*{dtype}", "weight": f"*{dtype}", "out": f"*{dtype}"}
    if shape.coding is not None:
        present |= {"weight": "*i16", "scales": "*i32" if shape.coding.minima else "*fp32"}
    normed = "squares" in operands
    present |= dict.fromkeys(operands, f"*{dtype}")
    present |= {"added": "*fp32", "added_slots": "*i32"} if "added" in operands else {}
    present |= {"next_x": f"*{dtype}", "next_squares": "*fp32"} if "next_norm" in operands else {}
    present |= {"squares": "*fp32"} if normed else {}
    present |= {"out": "*fp32", "tile_top": "*fp32", "tile_id": "*i32"} if argmax else {}
    own = dict(constants or {})
    if shape.head_dim:
        present |= {"qk_norm": f"*{dtype}", "cos": "*fp32", "sin": "*fp32", "slots": "*i64", "cache": f"*{dtype}"}
        present |= {"cache": "*u8", "k_scale": "fp32", "v_scale": "fp32"} if own.get("FRACTION") else {}
        present |= {"head_eps": "fp32"}
        present = {arg: kind for arg, kind in present.items() if arg not in own}
    types = present | {"partials": "*fp32", "counters": "*i32", "eps": "fp32"}
    types |= dict.fromkeys(("rows", "x_stride", "out_stride"), "i32")
    plain = {
        "N": shape.n,
        "K": shape.k,
        "PROGRAMS": config.programs,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BLOCK_M": block_m(rows),
        "SQUARES": triton.cdiv(shape.k, config.block_n) if normed else 0,
        "SQUARES_BLOCK": triton.next_power_of_2(triton.cdiv(shape.k, config.block_n)) if normed else 0,
        "MAX_ROWS": DRAFT_ROWS if rows > MAX_ROWS and (normed or "next_norm" in operands) else MAX_ROWS,
        "GATED": shape.gated,
        "GELU": False,
        "ACCUMULATE": False,
        "MULTIPLIER": 1.0,
        **head_arguments(None)[2],
        "PREFETCH": config.prefetch,
        **coding_constants(shape.coding, shape.k),
        "DEPENDENT": False,
    }
    optional = [
        "scales",
        "bias",
        "squares",
        "added",
        "added_slots",
        "next_norm",
        "next_x",
        "next_squares",
        "tile_top",
        "tile_id",
    ]
    optional += ["qk_norm", "cos", "sin", "slots", "cache", "head_eps", "k_scale", "v_scale"]
    absent = {arg: None for arg in optional if arg not in present}
    return Variant(
        name,
        skinny_linear_kernel,
        types,
        plain | absent | own,
        config.num_warps,
        config.num_stages,
        ("x_stride", "out_stride"),
        size.capabilities,
    )


CODINGS = {
    "fp8_block": Coding("fp8", 128, outputs=128),
    "fp8_channel": Coding("fp8", 0),
    "int8": Coding("int8", 0),
    "int4": Coding("int4", 128, zeros=True),
}
"""Formats of quantized weights for which kernels are compiled ahead of time, by name. Group 0 stands for all inputs."""


def _variants() -> tuple[Variant, ...]:
    variants, normed, following, added = [], ("squares",), ("next_norm",), {"ACCUMULATE": True}
    for size in SIZES:
        for dtype, rows in (("bf16", 6), ("bf16", 64), ("fp16", 6), ("fp32", 6)):
            torch_dtype = DTYPES[dtype]

            def add(kind: str, shape: LinearShape, **flags: Any) -> None:
                name = f"skinny_linear_{kind}_{dtype}_rows{rows}_{size.name}"  # noqa: B023
                variants.append(variant(name, shape, size, rows=rows, **flags))  # noqa: B023

            add("gated", LinearShape(6144, 2048, torch_dtype, gated=True), operands=() if dtype == "fp16" else normed)
            if dtype == "bf16":
                add("residual", LinearShape(2048, 6144, torch_dtype), constants=added, operands=following)
            if dtype == "bf16":
                add("gated_added", LinearShape(6144, 2048, torch_dtype, gated=True), operands=("added", *normed))
            if dtype == "bf16" and rows == 6:
                add("normed", LinearShape(4096, 2048, torch_dtype), operands=normed)
                add("normed_added", LinearShape(4096, 2048, torch_dtype), operands=("added", *normed))
                add("normed_bias", LinearShape(4608, 3584, torch_dtype), operands=("bias", *normed))
                add("gelu", LinearShape(6144, 2048, torch_dtype, gated=True), constants={"GELU": True})
                add(
                    "scaled",
                    LinearShape(2048, 6144, torch_dtype),
                    constants=added | {"MULTIPLIER": 0.22},
                    operands=following,
                )
    for size in SIZES:
        for name, coding in CODINGS.items():
            for dtype, rows in (("bf16", 6), ("bf16", 64), ("fp16", 6)):
                if name != "fp8_block" and (dtype, rows) != ("bf16", 6):
                    continue
                own = coding._replace(group=5120) if coding.group == 0 else coding
                shape = LinearShape(25600, 5120, DTYPES[dtype], gated=True, coding=own)
                label = f"skinny_linear_quantized_{name}_{dtype}_rows{rows}_{size.name}"
                variants.append(variant(label, shape, size, rows=rows, operands=normed))
    for size in (Size("large", (90,), SIZES[0].limits), SIZES[1], BLACKWELL):
        # Blocks of GGUF files.
        for name, coding in (
            ("q4_0", Coding("int4", 32)),
            ("q8_0", Coding("int8", 32)),
            ("q4_1", Coding("int4", 32, minima="pairs")),
            ("q4_k", Coding("int4", 32, minima="blocks")),
            ("q5_k", Coding("int8", 32, minima="blocks")),
            ("q4_k_and_q6_k", Coding("int8", 16, minima="blocks")),
        ):
            shape = LinearShape(25600, 5120, torch.bfloat16, gated=True, coding=coding)
            if name == "q4_k_and_q6_k":  # of q, k and v alone
                shape = LinearShape(10240, 5120, torch.bfloat16, coding=coding)
            label = f"skinny_linear_quantized_{name}_bf16_rows64_{size.name}"
            variants.append(variant(label, shape, size, rows=64, operands=normed))
    for size in SIZES:
        small = LinearShape(1536, 2048, torch.float16, head_dim=64)
        large, e4m3 = LinearShape(5120, 5120, torch.bfloat16, head_dim=128), {"FRACTION": 3}
        for name, shape, heads, rows, more in (
            ("heads_bf16_rows6", large, (64, 8), 6, {}),
            ("heads_bf16_rows64", large, (64, 8), 64, {}),
            ("heads_added_bf16_rows64", large, (64, 8), 64, {}),
            ("heads_bf16_rows6_e4m3", large, (64, 8), 6, e4m3),
            ("heads_bf16_rows6_draft", LinearShape(2048, 2048, torch.bfloat16, head_dim=128), (16, 8), 6, {}),
            ("heads_fp16_rows6_d64", small, (32, 8), 6, {"qk_norm": None}),
        ):
            given: dict[str, Any] = {"HEADS": heads[0], "KV_HEADS": heads[1], "BLOCK_SIZE": 16}
            label = f"skinny_linear_{name}_{size.name}"
            used: tuple[str, ...] = normed if shape.dtype == torch.bfloat16 else ()
            used = ("added", *used) if "added" in name else used
            variants.append(variant(label, shape, size, rows=rows, operands=used, constants=given | dict(more)))
    roomy = SIZES[0]  # other devices have too little shared memory
    for kind, shape, operands, constants in (
        ("qkv", LinearShape(4096, 2048, torch.bfloat16), normed, {}),
        ("residual", LinearShape(2048, 2048, torch.bfloat16), following, added),
        ("gated", LinearShape(6144, 2048, torch.bfloat16, gated=True), normed, {}),
        ("down", LinearShape(2048, 6144, torch.bfloat16), following, added),
    ):
        label = f"skinny_linear_draft_{kind}_rows{DRAFT_ROWS}_{roomy.name}"
        variants.append(variant(label, shape, roomy, rows=DRAFT_ROWS, operands=operands, constants=constants))
    # Products of targets that the table of providers gives to our kernel.
    for kind, shape, operands, constants in (
        ("qkv", LinearShape(10240, 5120, torch.bfloat16), normed, {}),
        ("residual", LinearShape(5120, 8192, torch.bfloat16), following, added),
        ("gated", LinearShape(25600, 5120, torch.bfloat16, gated=True), normed, {}),
        ("down", LinearShape(5120, 25600, torch.bfloat16), following, added),
    ):
        label = f"skinny_linear_target_{kind}_rows{DRAFT_ROWS}_{roomy.name}"
        variants.append(variant(label, shape, roomy, rows=DRAFT_ROWS, operands=operands, constants=constants))
    for size in SIZES:
        for kind, torch_dtype, has_bias in (("bf16", torch.bfloat16, False), ("bias_fp16", torch.float16, True)):
            label = f"skinny_linear_own_{kind}_rows{DRAFT_ROWS}_{size.name}"
            shape, used = LinearShape(51200, 5120, torch_dtype), ("bias",) if has_bias else ()
            variants.append(variant(label, shape, size, rows=DRAFT_ROWS, operands=used))
    dependent = variant(
        "skinny_linear_residual_bf16_dependent",
        LinearShape(2048, 6144, torch.bfloat16),
        SIZES[0],
        rows=6,
        operands=following,
        constants=added | {"DEPENDENT": True},
    )
    return (*variants, dependent)


VARIANTS = _variants()

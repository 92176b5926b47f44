"""Variants of the attention kernels that are compiled ahead of time. Launches nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from specrs.kernels.cuda.attention_config import MAX_VERIFY_ROWS, AttentionConfig
from specrs.kernels.cuda.paged_attention import combine_kernel, paged_attention_kernel, shape_constants
from specrs.kernels.cuda.variants import DTYPES, SIZES, Variant
from specrs.kernels.kv_codes import FRACTIONS

_CASES = (
    # dtype, head size, heads, KV heads, rows, codes of the cache
    ("bf16", 128, 16, 8, 1, None),
    ("bf16", 128, 64, 8, 6, None),
    ("bf16", 128, 64, 8, 2048, None),
    ("bf16", 64, 32, 8, 6, None),
    ("bf16", 96, 32, 8, 6, None),
    ("bf16", 256, 16, 8, 17, None),
    ("bf16", 512, 32, 4, 1, None),
    ("bf16", 512, 32, 4, 6, None),
    ("bf16", 512, 32, 4, 2048, None),
    ("fp16", 128, 64, 8, 6, None),
    ("fp32", 128, 64, 8, 6, None),
    ("bf16", 128, 16, 8, 1, "e4m3"),
    ("bf16", 128, 64, 8, 6, "e4m3"),
    ("bf16", 128, 64, 8, 2048, "e4m3"),
    ("bf16", 96, 32, 8, 6, "e4m3"),
    ("bf16", 256, 16, 8, 17, "e4m3"),
    ("bf16", 512, 32, 4, 6, "e4m3"),
    ("bf16", 128, 64, 8, 6, "e5m2"),
    ("fp16", 128, 64, 8, 6, "e4m3"),
    ("fp32", 128, 64, 8, 6, "e4m3"),
)
_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _variants() -> tuple[Variant, ...]:
    variants = []
    for size in SIZES:
        for dtype, dim, heads, kv_heads, rows, codes in _CASES:
            choose = partial(
                AttentionConfig.choose,
                max_q_len=rows,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                dtypes=(DTYPES[dtype], DTYPES[dtype] if codes is None else _CODES[codes]),
                limits=size.limits,
                span=1 << 15,
            )
            config, many = choose(batch=1), choose(batch=16)
            types = {
                **dict.fromkeys(("q", "cache", "out"), f"*{dtype}"),
                **dict.fromkeys(("positions", "q_start", "block_table"), "*i64"),
                **dict.fromkeys(("partial_out", "partial_stat"), "*fp32"),
                **dict.fromkeys(("q_stride", "out_stride", "table_stride", "table_width"), "i32"),
                "counters": "*i32",
                "scale_log2": "fp32",
            }
            constants: dict[str, Any] = shape_constants(config, heads, kv_heads, dim) | {
                "BLOCK_SIZE": 16,
                "WINDOW": 0,
                "CHUNKED": False,
            }
            constants["PER_SPLIT"] = config.blocks_per_split
            if codes is None:
                constants |= {"FRACTION": 0, "v_scale": None}
            else:
                constants["FRACTION"] = FRACTIONS[_CODES[codes]]
                types |= {"cache": "*u8", "v_scale": "fp32"}
            name = f"{dtype}_d{dim}_rows{rows}_{size.name}{'' if codes is None else f'_{codes}'}"
            fused = config.fused_lines(heads // kv_heads)
            variants.append(
                Variant(
                    f"paged_attention_{name}",
                    paged_attention_kernel,
                    types,
                    constants | {"FUSED": fused, "DEPENDENT": False, "k_start": None, "sinks": None},
                    config.num_warps,
                    config.num_stages,
                    ("q_stride", "out_stride"),
                    size.capabilities,
                )
            )
            kinds: dict[str, tuple[dict[str, str], dict[str, Any]]] = {}
            if dtype == "bf16" and dim == 128 and rows <= MAX_VERIFY_ROWS and codes is None:
                kinds["k_start"] = {"k_start": "*i64"}, {"sinks": None}
            if (dtype, dim, heads, rows, codes) == ("bf16", 128, 64, 6, None):
                kinds["chunks"] = {}, {"k_start": None, "sinks": None, "WINDOW": 8192, "CHUNKED": True}
                kinds["window"] = {}, {"k_start": None, "sinks": None, "WINDOW": 1024}
                long = {"SPLITS": many.splits, "SPLIT_BLOCK": triton.next_power_of_2(many.splits)}
                long |= {"PER_SPLIT": many.blocks_per_split, "FUSED": many.fused_lines(heads // kv_heads)}
                kinds["long"] = {}, {"k_start": None, "sinks": None} | long
                kinds["window_sinks"] = {"sinks": "*bf16"}, {"k_start": None, "WINDOW": 128}
            if (dtype, dim, heads, rows, codes) == ("bf16", 128, 64, 2048, None):
                sizes = {"batch": 1, "max_q_len": 32, "num_kv_heads": kv_heads, "span": 1 << 15}
                chunk = choose(batch=1, max_q_len=32).of_chunks(32, limits=size.limits, **sizes)
                parts = {"SPLITS": chunk.splits, "SPLIT_BLOCK": triton.next_power_of_2(chunk.splits)}
                parts |= {"PER_SPLIT": chunk.blocks_per_split, "FUSED": chunk.fused_lines(heads // kv_heads)}
                kinds["chunk"] = {}, {"k_start": None, "sinks": None} | parts
            for kind, (more, own) in kinds.items():
                variants.append(
                    Variant(
                        f"paged_attention_{kind}_{name}",
                        paged_attention_kernel,
                        types | more,
                        constants | {"FUSED": fused, "DEPENDENT": False} | own,
                        config.num_warps,
                        config.num_stages,
                        ("q_stride", "out_stride"),
                        size.capabilities,
                    )
                )
            if config.splits > 1 and not fused and dtype == "bf16" and dim == 128 and codes is None:
                variants.append(
                    Variant(
                        f"combine_{name}",
                        combine_kernel,
                        {key: types[key] for key in combine_kernel.arg_names if key in types},
                        {key: value for key, value in constants.items() if key in combine_kernel.arg_names}
                        | {"BLOCK_ROWS": triton.next_power_of_2(config.rows), "DEPENDENT": False},
                        aligned=("out_stride",),
                        capabilities=size.capabilities,
                    )
                )
    return tuple(variants)


VARIANTS = _variants()

"""Embeddings of single layers (PLE): sums of each layer's embedding of a row's token, and the gates of a layer.
Projects nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.activation import activation
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BLOCK_LAYERS = 4
_BLOCK = 1024


@triton.jit
def layer_embeddings_kernel(  # type: ignore[no-untyped-def]
    input_ids,
    table,
    norm,
    out,
    projected_factor,
    table_factor,
    eps,
    VOCAB: tl.constexpr,
    LAYERS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(input_ids + row)
    token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)
    layer = tl.program_id(1) * BLOCK_LAYERS + tl.arange(0, BLOCK_LAYERS)
    i = tl.arange(0, BLOCK_SIZE)
    inside = (layer < LAYERS)[:, None] & (i < SIZE)[None, :]
    place = layer[:, None] * SIZE + i[None, :]
    target = out + row * (LAYERS * SIZE) + place
    x = tl.load(target, mask=inside, other=0).to(tl.float32) * projected_factor
    x *= tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    x *= tl.load(norm + i, mask=i < SIZE, other=0).to(tl.float32)[None, :]
    e = tl.load(table + token * (LAYERS * SIZE) + place, mask=inside, other=0).to(tl.float32)
    tl.store(target, ((x + e * table_factor) * 0.7071067811865476).to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("specrs::layer_embeddings", mutates_args=("out",))
def layer_embeddings(
    input_ids: Tensor, table: Tensor, norm: Tensor, out: Tensor, floats: list[float], dependent: bool
) -> None:
    """Replace the projection p of each row's embedding, in `out`, by the embeddings of all L layers: `(norm(a p) +
    b table[id]) / sqrt(2)`, where the norm is an RMSNorm of each layer's part.

    Args:
        input_ids: `[N]` int64. Ids outside the table are clamped.
        table: `[vocab, L * size]` contiguous.
        norm: `[size]`, the norm's weights.
        out: `[N, L * size]` contiguous, of the table's dtype.
        floats: a, b and the norm's eps.
        dependent: launch dependently (see `_dependent_launch`).

    Everything is computed in fp32 and rounded once.
    """
    _check_embeddings(input_ids, table, norm, out)
    size, layers = norm.shape[0], table.shape[1] // norm.shape[0]
    layer_embeddings_kernel[(len(input_ids), triton.cdiv(layers, _BLOCK_LAYERS))](
        input_ids,
        table,
        norm,
        out,
        *floats,
        VOCAB=table.shape[0],
        LAYERS=layers,
        SIZE=size,
        BLOCK_LAYERS=_BLOCK_LAYERS,
        BLOCK_SIZE=triton.next_power_of_2(size),
        **options(dependent),
    )


@layer_embeddings.register_fake
def _(input_ids: Tensor, table: Tensor, norm: Tensor, out: Tensor, floats: list[float], dependent: bool) -> None:
    _check_embeddings(input_ids, table, norm, out)


def _check_embeddings(input_ids: Tensor, table: Tensor, norm: Tensor, out: Tensor) -> None:
    assert out.shape == (len(input_ids), table.shape[1])
    assert table.shape[1] % norm.shape[0] == 0
    assert table.dtype == norm.dtype == out.dtype
    assert all(tensor.is_contiguous() for tensor in (input_ids, table, norm, out))


@triton.jit
def gate_embedding_kernel(  # type: ignore[no-untyped-def]
    gate,
    embedding,
    gate_stride,
    embedding_stride,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    target = gate + row * gate_stride + column
    x = tl.load(target, mask=inside, other=0)
    e = tl.load(embedding + row * embedding_stride + column, mask=inside, other=0).to(tl.float32)
    activated = activation(x.to(tl.float32), GELU).to(x.dtype).to(tl.float32)
    tl.store(target, (activated * e).to(x.dtype), mask=inside)


@torch.library.custom_op("specrs::gate_embedding", mutates_args=("gate",))
def gate_embedding(gate: Tensor, embedding: Tensor, gelu: bool, dependent: bool) -> None:
    """Replace the gates of a layer, `gate` `[N, size]`, by `f(gate) * embedding`.

    `embedding` `[N, size]` is the layer's part of what `layer_embeddings` writes. f is SiLU, or with `gelu` GELU by its
    approximation with tanh. Rows have any stride, and one dtype. Computed in fp32; f(gate) is rounded to the dtype, as
    in `activation_and_mul`.
    """
    _check_gate(gate, embedding)
    rows, size = gate.shape
    gate_embedding_kernel[(rows, triton.cdiv(size, _BLOCK))](
        gate,
        embedding,
        gate.stride(0),
        embedding.stride(0),
        SIZE=size,
        GELU=gelu,
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
        **options(dependent),
    )


@gate_embedding.register_fake
def _(gate: Tensor, embedding: Tensor, gelu: bool, dependent: bool) -> None:
    _check_gate(gate, embedding)


def _check_gate(gate: Tensor, embedding: Tensor) -> None:
    assert gate.shape == embedding.shape
    assert gate.dtype == embedding.dtype
    assert gate.stride(1) == embedding.stride(1) == 1


def layer_embeddings_reference(
    input_ids: Tensor, table: Tensor, norm: Tensor, out: Tensor, floats: tuple[float, float, float]
) -> None:
    """Do what `layer_embeddings` does, in plain torch in float64, rounded once."""
    of_projection, of_table, eps = floats
    p = out.double().view(len(out), -1, len(norm)) * of_projection
    normed = p / (p.square().mean(2, keepdim=True) + eps).sqrt() * norm.double()
    looked_up = table[input_ids.clamp(0, len(table) - 1)].double() * of_table
    out.copy_((normed.flatten(1) + looked_up) / 2**0.5)


def gate_embedding_reference(gate: Tensor, embedding: Tensor, gelu: bool) -> None:
    """Do what `gate_embedding` does, in plain torch in float64, rounded once."""
    x = gate.double()
    f = torch.nn.functional.gelu(x, approximate="tanh") if gelu else torch.nn.functional.silu(x)
    gate.copy_(f * embedding.double())


VARIANTS = (
    Variant(
        "layer_embeddings_bf16",
        layer_embeddings_kernel,
        {"input_ids": "*i64", **dict.fromkeys(("table", "norm", "out"), "*bf16")}
        | dict.fromkeys(("projected_factor", "table_factor", "eps"), "fp32"),
        {"VOCAB": 262144, "LAYERS": 35, "SIZE": 256, "BLOCK_LAYERS": _BLOCK_LAYERS, "BLOCK_SIZE": 256}
        | {"DEPENDENT": False},
    ),
    Variant(
        "gate_embedding_bf16",
        gate_embedding_kernel,
        {**dict.fromkeys(("gate", "embedding"), "*bf16"), **dict.fromkeys(("gate_stride", "embedding_stride"), "i32")},
        {"SIZE": 256, "GELU": True, "BLOCK": 256, "DEPENDENT": False},
        aligned=("gate_stride", "embedding_stride"),
    ),
)

"""Embeddings of single layers, their gates, and softcapped logits, interpreted."""

import pytest
import torch
from specrs.kernels.cuda.layer_embedding import (
    gate_embedding,
    gate_embedding_reference,
    layer_embeddings,
    layer_embeddings_reference,
)
from specrs.kernels.cuda.softcap import softcap, softcap_reference

from .tolerance import assert_near

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layers", "size"), [(1, 16), (6, 8), (5, 20)])
def test_layer_embeddings(layers: int, size: int, dtype: torch.dtype) -> None:
    """Check ids outside the table, too, and rows whose projection is 0."""
    generator = torch.Generator().manual_seed(layers)
    table = torch.randn(7, layers * size, generator=generator).to(dtype)
    norm = torch.randn(size, generator=generator).to(dtype)
    out = torch.randn(4, layers * size, generator=generator).to(dtype)
    out[2] = 0
    ids, floats = torch.tensor([3, 9, 0, -2]), (0.125, 4.0, 1e-5)
    exact, p = out.double(), out.view(4, layers, size) * floats[0]
    own = torch.nn.functional.rms_norm(p, (size,), norm, floats[2]) + table[[3, 6, 0, 0]].view_as(p) * floats[1]
    layer_embeddings_reference(ids, table, norm, exact, floats)
    layer_embeddings(ids, table, norm, out, list(floats), False)
    assert_near(out, exact, (own * 2**-0.5).flatten(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.parametrize("size", [5, 1030])
def test_gates(size: int, gelu: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    gate, embedding = (torch.randn(3, size + 4, generator=generator).to(dtype)[:, :size] for _ in range(2))
    gate[0, 0], gate[1, 0] = 1e3, -1e3
    exact = gate.double()
    gate_embedding_reference(exact, embedding, gelu)
    f = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    own = f * embedding
    gate_embedding(gate, embedding, gelu, False)
    assert_near(gate, exact, own)


def test_softcap() -> None:
    """Check logits of all sizes to a few units in the last place, in rows of any stride."""
    sizes = torch.logspace(-12, 3, 1500)
    logits = torch.stack((sizes, -sizes, sizes * 0, torch.full_like(sizes, torch.inf)))
    padded = torch.cat((logits, torch.full((4, 3), torch.nan)), 1)
    exact = logits.double()
    softcap_reference(exact, 30.0)
    softcap(padded[:, :1500], 30.0, False)
    torch.testing.assert_close(padded[:, :1500].double(), exact, rtol=1e-6, atol=0)
    assert padded[:, 1500:].isnan().all()
    assert padded[3, 0] == 30
    faulty = torch.tensor([[torch.nan, 1.0]])
    softcap(faulty, 5.0, False)
    assert faulty.isnan().tolist() == [[True, False]]

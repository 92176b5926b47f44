"""The CUDA forward pass with interpreted kernels, against the CPU's in fp32 and float64 on the same tokens."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.cuda.tolerance import assert_argmax, assert_same_product
from models.cuda_models import FAMILIES, LENGTH, compare, load, on_device, span
from models.harness import Feeder
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.providers import Providers
from specrs.backends.cuda.stream import FusedStream, stream_of
from specrs.backends.cuda.workspace import Workspace, max_fused_rows
from specrs.kernels.coding import Coding
from specrs.kernels.cuda.configs import LinearShape
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.linear import DenseWeight
from specrs.models.decoder_weights import LayerWeights
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.torch_weights import TorchWeights
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


# tests/backends/test_cuda_runner.py has few rows of the other families.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("granite", "smollm3", "mixtral")])
def test_decode_and_verification_rows(folder: Path, name: str) -> None:
    """Check short prompts, then verification with mixed K and masked rows, a draft's first pass, and single rows."""

    def run(feeder: Feeder) -> list[Tensor]:
        first = feeder.feed({0: span(0, 5), 1: span(0, 1), 2: span(0, 9)})
        masked = feeder.feed({0: [*span(5, 8), (0, -1)], 1: [(0, -1)], 2: span(9, 15)})
        second = feeder.feed({1: span(0, 2), 2: span(14, 16)}, no_slot=frozenset({(1, 0), (2, 14)}))
        third = feeder.feed({0: span(8, 9), 1: span(2, 3), 2: span(16, 17)})
        assert masked.isfinite().all()
        return [first, masked[[0, 1, 2, 5, 6, 7, 8, 9, 10]], second, third]

    compare(folder, name, run)


@pytest.mark.parametrize("name", ["qwen3", "llama", "windows"])
def test_prefill_chunks(folder: Path, name: str) -> None:
    """Check more than 64 rows at once next to another request's chunk, then rows that attend to all of it."""

    def run(feeder: Feeder) -> list[Tensor]:
        first = feeder.feed({0: span(0, 71), 1: span(0, 12)})
        return [first, feeder.feed({0: span(71, LENGTH), 1: span(12, 13)}), feeder.feed({0: span(LENGTH, LENGTH + 2)})]

    compare(folder, name, run)


@pytest.mark.parametrize("name", ["qwen3", "llama", "windows"])
def test_a_draft_fuses_more_rows(folder: Path, name: str) -> None:
    """More than 64 rows of a draft, in the kernels of few rows: norms, heads, gates and the LM head."""

    def run(feeder: Feeder) -> list[Tensor]:
        first = feeder.feed({0: span(0, 71), 1: span(0, 12)})
        return [first, feeder.feed({0: span(71, 73), 1: span(12, 13)})]

    compare(folder, name, run, is_draft=True)


def test_which_passes_are_fused(folder: Path) -> None:
    cpu = load(folder, "qwen3", torch.float32)
    for is_draft in (False, True):
        ws = on_device(cpu, is_draft=is_draft).workspace
        assert ws.squares.shape[1] == (128 if is_draft else 64)
        for rows in (64, 65, 90):
            made = stream_of(ws.hidden[:rows], torch.zeros(rows, dtype=torch.int64), ws, cpu.config)
            assert isinstance(made, FusedStream) == (rows <= 64 or is_draft)
    for name in ("gemma3", "mixtral"):
        assert not on_device(load(folder, name, torch.float32), is_draft=True).workspace.fuses_more


def test_which_drafts_fuse_more_rows(folder: Path) -> None:
    config = load(folder, "qwen3", torch.float32).config

    def fuses(capability: int = 90, hidden: int = 2048, **fields: Any) -> bool:
        shape = LinearShape(**({"n": 64, "k": hidden, "dtype": torch.bfloat16} | fields))
        limits = DeviceLimits("", capability, 132, 227 * 1024)
        draft = dataclasses.replace(config, hidden_size=hidden)
        return max_fused_rows(draft, {"o": [shape]}, limits, Providers(), is_draft=True) == 128

    assert fuses()
    assert fuses(100)
    assert not any(fuses(capability) for capability in (80, 89, 120, 121)), "too little shared memory"
    assert not fuses(hidden=2560)
    assert not fuses(dtype=torch.float32)
    assert not fuses(coding=Coding("int8", 2048))


@pytest.mark.parametrize("name", ["gemma3", "granite", "mixtral", "gpt_oss"])
def test_a_chunk_of_many_rows(folder: Path, name: str) -> None:
    """A chunk longer than a tile in other families: norms around blocks and GELU, multipliers, experts and their
    biases."""
    compare(folder, name, lambda feeder: [feeder.feed({0: span(0, 66)})])


def test_a_model_of_experts_alone_has_no_buffers_of_an_mlp(folder: Path) -> None:
    """Check that a model whose every MLP is replaced by experts allocates no MLP buffers."""
    sparse, mixed = (on_device(load(folder, name, torch.float32)).workspace for name in ("mixtral", "qwen3_moe"))
    assert sparse.gate_up.numel() == sparse.activated.numel() == 0
    assert mixed.gate_up.shape == (LENGTH + 3, 2 * 56)
    assert mixed.experts is not None
    assert mixed.num_bytes >= sum(tensor.nbytes for tensor in mixed.experts.tensors)


def test_argmax_agrees_with_logits(folder: Path) -> None:
    """Check `argmax`: bit for bit against the logits of its own step, and within rounding against another step's or
    number of rows, whose products may be summed in another order."""
    model = on_device(load(folder, "qwen3", torch.float32))
    lm_head = model.weights.lm_head
    assert isinstance(lm_head, DenseWeight)
    for rows in (3, 70):
        hidden = torch.randn(2 * rows, 40, generator=torch.Generator().manual_seed(rows))[1::2]
        logits = model.compute_logits(hidden)
        for count, kept in ((None, None), (61, None), (None, torch.full_like(logits, torch.nan))):
            model.poison()
            ids, top = torch.full((rows,), -1), torch.full((rows,), torch.nan)
            model.compute_argmax(hidden, ids, top, count, kept)
            weight = lm_head.weight[:count]
            assert_argmax(ids, top, logits[:, :count], hidden, weight)
            if kept is not None:
                assert torch.equal(ids, kept.argmax(dim=1))
                assert torch.equal(top, kept.amax(dim=1))
                assert_same_product(kept, logits, hidden, weight)


def test_entries_of_layers(folder: Path) -> None:
    """Check the residual stream at the entries of layers against the CPU's, with few rows and with many."""
    cpu = load(folder, "qwen3", torch.float32)
    layers = (1, 0)
    for count in (7, 71):
        feeders = [
            Feeder(model, block_size=8, max_len=LENGTH, hidden_layers=layers) for model in (on_device(cpu, 2), cpu)
        ]
        for feeder in feeders:
            feeder.feed({0: span(0, count)})
        mine, reference = (feeder.entries for feeder in feeders)
        assert mine is not None
        assert reference is not None
        assert mine.shape == (count, 2, 40)
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match=r"hidden_layers=\(0, 0, 1\): the workspace has room for 2"):
        Feeder(on_device(cpu, 2), max_len=LENGTH, hidden_layers=(0, 0, 1)).feed({0: span(0, 1)})


def test_a_request_does_not_depend_on_its_neighbours(folder: Path) -> None:
    """Check that NaN in one request's K and V does not change the bits of other requests."""
    model = on_device(load(folder, "qwen3", torch.float32))

    def run(spoiled: bool) -> Tensor:
        feeder = Feeder(model, num_requests=3, block_size=8, max_len=16)
        feeder.feed({0: span(0, 3), 1: span(0, 4), 2: span(0, 2)})
        if spoiled:
            feeder.cache.layers[0][feeder.table[1, 0], :, :, 2] = torch.nan
        return feeder.feed({0: span(3, 5), 1: span(4, 6), 2: span(2, 3)})

    clean, spoiled = run(False), run(True)
    assert spoiled[2:4].isnan().all()
    assert torch.equal(spoiled[[0, 1, 4]], clean[[0, 1, 4]])


def test_the_workspace_says_when_it_is_too_small(folder: Path) -> None:
    model = on_device(load(folder, "qwen3", torch.float32))
    with pytest.raises(AssertionError, match=f"rows=91: the workspace has room for {LENGTH}"):
        Feeder(model, num_requests=1, max_len=100).feed({0: span(0, 91)})


@pytest.mark.parametrize("rows", [6, 70])
def test_traces_with_fake_cuda_tensors(folder: Path, rows: int) -> None:
    """Trace the decoder on fake CUDA tensors, which have shapes only: no value is read, and nothing but the workspace
    is written."""
    config = load(folder, "qwen3", torch.float32).config
    dtype, h, d = torch.bfloat16, config.hidden_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d

    with FakeTensorMode():

        def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        def linear(n: int, k: int) -> DenseWeight:
            return DenseWeight(tensor(n, k))

        layer = LayerWeights(
            input_norm=tensor(h),
            qkv=linear(q + 2 * kv, h),
            qk_norm=tensor(config.num_heads + config.num_kv_heads, d),
            o=linear(h, q),
            post_attention_norm=tensor(h),
            gate_up=linear(2 * config.intermediate_size, h),
            down=linear(h, config.intermediate_size),
        )
        weights = TorchWeights(
            config=config,
            dtype=dtype,
            device=torch.device("cuda"),
            embedding=tensor(config.vocab_size, h),
            layers=(layer,) * config.num_layers,
            final_norm=tensor(h),
            lm_head=linear(config.vocab_size, h),
            rotary=tensor(d, dtype=torch.float32),
        )
        made = Workspace.allocate(config, max_rows=96, max_seqs=16, dtype=dtype, device="cuda", num_hidden_layers=2)
        cache = KVCache.allocate(config, 4, 16, dtype, "cuda")
        i64 = functools.partial(tensor, dtype=torch.int64)
        inputs = PassInputs(i64(rows), i64(rows), i64(rows), i64(3), i64(2, 4), rows, 64)
        model = CudaDecoder(weights, made)
        hidden, entries = model.forward(inputs, cache, (1, 0))
        assert entries is not None
        assert entries.shape == (rows, 2, h)
        assert hidden.shape == (rows, h)
        assert hidden.untyped_storage()._cdata == made.normed.untyped_storage()._cdata
        logits = tensor(rows, config.vocab_size, dtype=torch.float32)
        model.compute_logits(hidden, logits)
        model.compute_argmax(hidden, i64(rows), tensor(rows, dtype=torch.float32))
        assert made.num_bytes > 0

"""Passes at the sizes that are benchmarked, on compiled kernels: bf16 and fp16 against float64 on the same device."""

import itertools

import pytest
import torch
from kernels.cuda.tolerance import assert_argmax
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.kernels.linear import DenseWeight, Weight
from specrs.kernels.rotary import inverse_frequencies, signed_frequencies
from specrs.models.config import ModelConfig, parse_config
from specrs.models.decoder_weights import LayerWeights
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.torch_weights import TorchLayer, TorchWeights
from torch import Tensor

BLOCK = 16


def config(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """Return the configuration of a Qwen3 of two layers with these sizes and a real vocabulary."""
    return parse_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151_936,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
        }
    )


def decoder(c: ModelConfig, dtype: torch.dtype, device: torch.device) -> TorchWeights:
    generator = torch.Generator(device).manual_seed(7)

    def random(*shape: int) -> Tensor:
        return (0.02 * torch.randn(shape, generator=generator, device=device)).to(dtype)

    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def layer() -> TorchLayer:
        return LayerWeights(
            input_norm=1 + random(c.hidden_size),
            qkv=DenseWeight(random(q + 2 * kv, c.hidden_size)),
            qk_norm=1 + random(c.num_heads + c.num_kv_heads, c.head_dim),
            o=DenseWeight(random(c.hidden_size, q)),
            post_attention_norm=1 + random(c.hidden_size),
            gate_up=DenseWeight(random(2 * c.intermediate_size, c.hidden_size)),
            down=DenseWeight(random(c.hidden_size, c.intermediate_size)),
        )

    return TorchWeights(
        config=c,
        dtype=dtype,
        device=device,
        embedding=50 * random(c.vocab_size, c.hidden_size),
        layers=(layer(), layer()),
        final_norm=1 + random(c.hidden_size),
        lm_head=DenseWeight(random(c.vocab_size, c.hidden_size)),
        rotary=signed_frequencies(inverse_frequencies(c.head_dim, c.rope_theta)).to(device),
    )


def exact(model: TorchWeights, ids: Tensor) -> Tensor:
    """Return logits of every position of one sequence, computed in plain float64."""
    c = model.config

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.rms_norm_eps) * w.double()

    def product(x: Tensor, w: Weight) -> Tensor:
        return x @ w.dequantized().t()

    length, dim = len(ids), c.head_dim
    angles = torch.arange(length, device=ids.device)[:, None].float() * model.rotary[dim // 2 :]
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    h = model.embedding[ids].double()
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    for w in model.layers:
        assert w.qk_norm is not None
        qkv = product(norm(h, w.input_norm), w.qkv).view(length, -1, dim)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        q, k = rotate(norm(q, w.qk_norm[: c.num_heads])), rotate(norm(k, w.qk_norm[c.num_heads :]))
        group = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        scores = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        h = h + product(torch.einsum("hqk,khd->qhd", scores, v).reshape(length, -1), w.o)
        gate, up = product(norm(h, w.post_attention_norm), w.gate_up).chunk(2, dim=-1)
        h = h + product(gate * torch.sigmoid(gate) * up, w.down)
    return product(norm(h, model.final_norm), model.lm_head)


def inputs(ids: Tensor, first: int, count: int) -> PassInputs:
    """Return the inputs of positions [first, first + count) of one sequence, whose blocks lie backwards in the pool."""
    device = ids.device
    positions = torch.arange(first, first + count, device=device)
    blocks = torch.arange(len(ids) // BLOCK, -1, -1, device=device)[None]
    return PassInputs(
        input_ids=ids[first : first + count].contiguous(),
        positions=positions,
        slots=blocks[0, positions // BLOCK] * BLOCK + positions % BLOCK,
        q_start=torch.tensor([0, count], device=device),
        block_table=blocks,
        max_q_len=count,
        max_context=len(ids),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(2048, 6144, 16, 8, 128), (1024, 3072, 16, 8, 128), (2048, 8192, 32, 8, 64), (1536, 4096, 16, 16, 96),
     (2304, 4608, 8, 4, 256)],
    ids=["qwen3-1.7b", "qwen3-0.6b", "llama-1b", "head-96", "head-256"],
)  # fmt: skip
@torch.inference_mode()
def test_prefill_then_verification(
    device: torch.device, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    c = config(*shape)
    weights = decoder(c, dtype, device)
    model = CudaDecoder.allocate(weights, max_rows=600, max_seqs=4)
    ids = torch.randint(0, c.vocab_size, (531,), device=device, generator=torch.Generator(device).manual_seed(1))
    cache = KVCache.allocate(c, len(ids) // BLOCK + 1, BLOCK, dtype, device)
    for layer in cache.layers:
        layer.fill_(torch.nan)
    expected = exact(weights, ids)
    cuts, worst = [0, 300, 512, 518, 519, 520, 531], 0.0
    for first, end in itertools.pairwise(cuts):
        hidden = model.forward(inputs(ids, first, end - first), cache).final
        logits = torch.full((end - first, c.vocab_size), torch.nan, device=device)
        model.compute_logits(hidden, logits)
        difference = (logits.double() - expected[first:end]).norm(dim=-1) / expected[first:end].norm(dim=-1)
        worst = max(worst, float(difference.max()))
        top, top_ids = (
            torch.empty(end - first, device=device),
            torch.empty(end - first, dtype=torch.int64, device=device),
        )
        model.compute_argmax(hidden, top_ids, top)
        # Another launch, and above 64 rows products of other shapes: the order of a sum is the library's.
        assert isinstance(weights.lm_head, DenseWeight)
        assert_argmax(top_ids, top, logits, hidden, weights.lm_head.weight)
    # Two layers of rounding: a few roundings of the dtype in a norm over the vocabulary.
    assert worst < {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype], worst

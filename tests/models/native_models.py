"""Small models of the native pass without files: random ones, and one whose next token is a table. Holds no tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from specrs.kernels.linear import StackedWeight
from specrs.kernels.rotary import inverse_frequencies, signed_frequencies
from specrs.models.config import ModelConfig
from specrs.models.dense_native import NativeDense
from specrs.models.dense_weights import DenseWeights, LayerWeights
from specrs.models.eagle3_config import Eagle3Config
from specrs.models.eagle3_head import Eagle3Weights
from specrs.models.eagle3_native import NativeEagle3Head
from torch import Tensor


def config(vocab_size: int, hidden_size: int = 16, windows: Sequence[int | None] = (None,)) -> ModelConfig:
    """A layer of two query heads and one KV head for each of `windows`, the last positions that it sees."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=24,
        num_layers=len(windows),
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_scaling=None,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        checkpoint_dtype="float32",
        eos_token_ids=(),
        mask_token_id=None,
        windows=() if set(windows) == {None} else tuple(windows),
    )


def weights(c: ModelConfig, embedding: Tensor, lm_head: Tensor, scale: float, seed: int) -> DenseWeights:
    """These at both ends, and layers of random numbers of this scale."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> StackedWeight:
        return StackedWeight((scale * torch.randn(shape, generator=generator),))

    heads = c.num_heads + 2 * c.num_kv_heads
    layers = tuple(
        LayerWeights(
            input_norm=torch.ones(c.hidden_size),
            qkv=random(heads * c.head_dim, c.hidden_size),
            qk_norm=torch.ones(c.num_heads + c.num_kv_heads, c.head_dim),
            o=random(c.hidden_size, c.num_heads * c.head_dim),
            post_attention_norm=torch.ones(c.hidden_size),
            gate_up=random(2 * c.intermediate_size, c.hidden_size),
            down=random(c.hidden_size, c.intermediate_size),
        )
        for _ in range(c.num_layers)
    )
    return DenseWeights(
        config=c,
        dtype=torch.float32,
        device=torch.device("cpu"),
        embedding=embedding,
        layers=layers,
        final_norm=torch.ones(c.hidden_size),
        lm_head=StackedWeight((lm_head,)),
        rotary=signed_frequencies(inverse_frequencies(c.head_dim, c.rope_theta)),
    )


def random_model(vocab_size: int, seed: int, windows: Sequence[int | None] = (None,)) -> NativeDense:
    """Logits of a few units, so that drafts of another such model are sometimes right."""
    generator = torch.Generator().manual_seed(seed)
    c = config(vocab_size, windows=windows)
    ends = [torch.randn(vocab_size, c.hidden_size, generator=generator) for _ in range(2)]
    return NativeDense(weights(c, *ends, 0.3, seed))


def random_head(
    target: NativeDense, vocab_size: int, seed: int, *, fc_norm: bool, norm_output: bool
) -> NativeEagle3Head:
    """A head of `target` over a random choice of its ids; it reads what enters its layers and what leaves them."""
    generator = torch.Generator().manual_seed(seed)
    layer_ids = tuple(range(target.num_layers + 1))
    c = replace(target.config, num_layers=1, windows=())
    drawn = weights(c, target.weights.embedding, torch.zeros(vocab_size, c.hidden_size), 0.3, seed).layers[0]

    def random(*shape: int) -> StackedWeight:
        return StackedWeight((0.3 * torch.randn(shape, generator=generator),))

    heads = c.num_heads + 2 * c.num_kv_heads
    return NativeEagle3Head(
        Eagle3Weights(
            config=Eagle3Config(
                layer=c,
                layer_prefix="midlayer.",
                target_hidden_size=c.hidden_size,
                draft_vocab_size=vocab_size,
                aux_layer_ids=layer_ids,
                norm_before_residual=not norm_output,
                norm_before_fc=False,
                fc_norm=fc_norm,
                norm_output=norm_output,
            ),
            dtype=torch.float32,
            device=torch.device("cpu"),
            embedding=target.weights.embedding,
            fc=random(c.hidden_size, len(layer_ids) * c.hidden_size),
            fc_norm=1 + 0.1 * torch.randn(len(layer_ids), c.hidden_size, generator=generator) if fc_norm else None,
            hidden_norm=torch.ones(c.hidden_size),
            layer=replace(drawn, qkv=random(heads * c.head_dim, 2 * c.hidden_size)),
            final_norm=torch.ones(c.hidden_size),
            lm_head=StackedWeight((torch.randn(vocab_size, c.hidden_size, generator=generator),)),
            rotary=target.weights.rotary,
            target_ids=torch.randperm(c.vocab_size, generator=generator)[:vocab_size].sort().values,
            max_position_embeddings=c.max_position_embeddings,
        )
    )


def table_model(following: Mapping[int, int], vocab_size: int, *, not_finite: int | None = None) -> NativeDense:
    """After token t comes `following[t]`, else 0, whatever stood before; after `not_finite` nothing is finite."""
    c = config(vocab_size, hidden_size=vocab_size)
    embedding, lm_head = torch.eye(vocab_size), torch.zeros(vocab_size, vocab_size)
    for token in range(vocab_size):
        lm_head[following.get(token, 0), token] = 1.0
    if not_finite is not None:
        embedding[not_finite] = torch.nan
    return NativeDense(weights(c, embedding, lm_head, 0.0, 0))

"""Small native models without files: random ones, and one whose next token is a table. Holds no tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from specrs.arrays import FLOAT32, Array
from specrs.drafters.eagle3.config import Eagle3Config
from specrs.drafters.eagle3.native import NativeEagle3Head
from specrs.drafters.eagle3.weights import HeadWeights
from specrs.kernels.frequencies import inverse_frequencies, signed_frequencies
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderWeights, LayerWeights, NativeWeights
from specrs.models.native_decoder import NativeDecoder
from specrs.models.stored import StackedWeight


def config(vocab_size: int, hidden_size: int = 16, windows: Sequence[int | None] = (None,)) -> ModelConfig:
    """Return a configuration with one layer of two query heads and one KV head for each of `windows`."""
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


def normal(generator: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    """Return random float32 numbers with standard deviation `scale`."""
    return generator.standard_normal(shape, FLOAT32) * np.float32(scale)


def weights(c: ModelConfig, embedding: Array, lm_head: Array, scale: float, seed: int) -> NativeWeights:
    """Return weights with this embedding and LM head, and layers of random numbers of standard deviation `scale`."""
    generator = np.random.default_rng(seed)

    def random(*shape: int) -> StackedWeight:
        return StackedWeight((normal(generator, *shape, scale=scale),))

    heads = c.num_heads + 2 * c.num_kv_heads
    layers = tuple(
        LayerWeights(
            input_norm=np.ones(c.hidden_size, FLOAT32),
            qkv=random(heads * c.head_dim, c.hidden_size),
            qk_norm=np.ones((c.num_heads + c.num_kv_heads, c.head_dim), FLOAT32),
            o=random(c.hidden_size, c.num_heads * c.head_dim),
            post_attention_norm=np.ones(c.hidden_size, FLOAT32),
            gate_up=random(2 * c.intermediate_size, c.hidden_size),
            down=random(c.hidden_size, c.intermediate_size),
        )
        for _ in range(c.num_layers)
    )
    return DecoderWeights(
        config=c,
        dtype=FLOAT32,
        embedding=embedding,
        layers=layers,
        final_norm=np.ones(c.hidden_size, FLOAT32),
        lm_head=StackedWeight((lm_head,)),
        rotary=signed_frequencies(inverse_frequencies(c.head_dim, c.rope_theta)),
    )


def random_model(vocab_size: int, seed: int, windows: Sequence[int | None] = (None,)) -> NativeDecoder:
    """Return a random model. Its logits are a few units large, so that drafts of another such model are sometimes
    right."""
    generator = np.random.default_rng(seed)
    c = config(vocab_size, windows=windows)
    ends = [normal(generator, vocab_size, c.hidden_size) for _ in range(2)]
    return NativeDecoder(weights(c, *ends, 0.3, seed))


def random_head(
    target: NativeDecoder, vocab_size: int, seed: int, *, fc_norm: bool, norm_output: bool
) -> NativeEagle3Head:
    """Return a head for `target` over a random choice of its ids. It reads states before and after the target's
    layers."""
    generator = np.random.default_rng(seed)
    layer_ids = tuple(range(target.num_layers + 1))
    c = replace(target.config, num_layers=1, windows=())
    drawn = weights(c, target.weights.embedding, np.zeros((vocab_size, c.hidden_size), FLOAT32), 0.3, seed).layers[0]

    def random(*shape: int) -> StackedWeight:
        return StackedWeight((normal(generator, *shape, scale=0.3),))

    heads = c.num_heads + 2 * c.num_kv_heads
    return NativeEagle3Head(
        HeadWeights(
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
            dtype=FLOAT32,
            embedding=target.weights.embedding,
            fc=random(c.hidden_size, len(layer_ids) * c.hidden_size),
            fc_norm=1 + normal(generator, len(layer_ids), c.hidden_size, scale=0.1) if fc_norm else None,
            hidden_norm=np.ones(c.hidden_size, FLOAT32),
            layer=replace(drawn, qkv=random(heads * c.head_dim, 2 * c.hidden_size)),
            final_norm=np.ones(c.hidden_size, FLOAT32),
            lm_head=StackedWeight((normal(generator, vocab_size, c.hidden_size),)),
            rotary=target.weights.rotary,
            target_ids=np.sort(generator.permutation(c.vocab_size)[:vocab_size]),
            max_position_embeddings=c.max_position_embeddings,
        )
    )


def table_model(following: Mapping[int, int], vocab_size: int, *, not_finite: int | None = None) -> NativeDecoder:
    """Return a model in which token t is followed by `following[t]`, else by 0, whatever came before. After
    `not_finite` its logits are NaN."""
    c = config(vocab_size, hidden_size=vocab_size)
    embedding, lm_head = np.eye(vocab_size, dtype=FLOAT32), np.zeros((vocab_size, vocab_size), FLOAT32)
    for token in range(vocab_size):
        lm_head[following.get(token, 0), token] = 1.0
    if not_finite is not None:
        embedding[not_finite] = np.nan
    return NativeDecoder(weights(c, embedding, lm_head, 0.0, 0))

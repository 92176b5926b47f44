"""Llama 4: transformers' logits however tokens are fed, natively and by torch, and errors for what is not
implemented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from hf_reference import load
from hybrid_reference import wide_norm
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.weights import load_native
from specrs.backends.model_source import ModelSource
from specrs.config import EngineConfig
from specrs.errors import CheckpointError, UnsupportedConfigError
from specrs.models import torch_decoder
from specrs.models.loader import CPU_DTYPES, load_config
from specrs.models.query_scaling import QueryScaling
from specrs.models.shards import check_divides
from specrs.models.torch_loader import load_model
from torch import Tensor
from transformers.models.llama4 import modeling_llama4

from models.harness import Feeder
from models.layers_with_states import close

TOKENS = [(7 * i * i + 3 * i) % 61 for i in range(40)]
BOUND = 2e-5
"""Largest allowed difference of native logits from logits in float64, relative to the largest logit."""
SHAPE = {"vocab": 61, "layers": 4, "kv_heads": 2, "tie": False}


def _turn(query: Tensor, key: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighbouring features of heads, `[batch, tokens, heads, features]`, in float64."""
    wide = turns.to(torch.complex128)[:, :, None]

    def of(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * wide).flatten(3)

    return of(query), of(key)


def _cos_sin(positions: Tensor, signed: Tensor, dtype: torch.dtype, magnitude: float) -> tuple[Tensor, Tensor]:
    """Compute `specrs.kernels.rotary.rotary_cos_sin` in float64, for angles in float32 as the original has them."""
    angles = (positions.float().view(-1, 1, 1) * signed).double()
    return angles.cos().to(dtype) * magnitude, angles.sin().to(dtype) * magnitude


def _route(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of experts, 0 for experts that are not chosen, and the logits, `[tokens, experts]`."""
    made = torch.nn.functional.linear(hidden, self.weight)
    chosen = made.topk(self.top_k, dim=1).indices
    return torch.zeros_like(made).scatter(1, chosen, made.gather(1, chosen).sigmoid()), made


@contextmanager
def float64() -> Iterator[None]:
    """Let transformers and `TorchDecoder` compute norms, rotation and routers' sigmoids in float64. By default some are
    in float32, and sines there depend on how many are computed at once. Angles and factors of queries stay in
    float32."""
    with ExitStack() as stack:
        for owner, name, made in (
            (torch_decoder, "rms_norm", wide_norm),
            (modeling_llama4, "apply_rotary_emb", _turn),
            (torch, "polar", lambda _, angles: torch.complex(angles.double().cos(), angles.double().sin())),
            (torch_decoder, "rotary_cos_sin", _cos_sin),
            (modeling_llama4.Llama4Router, "forward", _route),
            (modeling_llama4.Llama4TextL2Norm, "forward", lambda self, x: self._norm(x)),
            (modeling_llama4.Llama4TextRMSNorm, "forward", lambda self, x: self._norm(x) * self.weight),
        ):
            stack.enter_context(patch.object(owner, name, made))
        yield


@torch.inference_mode()
def logits(path: Path) -> Tensor:
    """Return the logits of transformers for `TOKENS`, `[tokens, vocab]` in float64."""
    with float64():
        found: Tensor = load(path)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return found


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the fields that Llama 4 lets vary: chunks, layers with RoPE and with experts, growing queries, norms."""
    layers = draw(st.integers(1, 4))
    rotated = draw(st.one_of(st.none(), st.just([]), st.lists(st.integers(0, 1), min_size=layers, max_size=layers)))
    kinds = st.lists(st.sampled_from(["chunked_attention", "full_attention"]), min_size=layers, max_size=layers)
    experts = draw(st.integers(1, 5))
    return {
        "layers": layers,
        "no_rope_layers": rotated,
        "no_rope_layer_interval": draw(st.integers(1, 3)),
        "layer_types": draw(st.one_of(st.none(), kinds)),
        "attention_chunk_size": draw(st.sampled_from([1, 4, 9, 16, 33, 600])),
        "moe_layers": draw(st.one_of(st.none(), st.lists(st.integers(0, layers), max_size=2))),
        "interleave_moe_layer_step": draw(st.integers(1, 3)),
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(experts, 2))),
        "use_qk_norm": draw(st.booleans()),
        "attn_temperature_tuning": draw(st.booleans()),
        "floor_scale": draw(st.integers(1, 12)),
        "attn_scale": draw(st.sampled_from([0.1, 0.6])),
        "attention_bias": draw(st.booleans()),
        "tie": draw(st.booleans()),
        "kv_heads": draw(st.integers(1, 2)),
        "hidden": draw(st.sampled_from([40, 64])),
        "head_dim": draw(st.sampled_from([6, 16])),
        "intermediate": draw(st.sampled_from([9, 32])),
        "seed": draw(st.integers(0, 9)),
    }


@settings(max_examples=15)
@given(shapes(), st.integers(1, 20), st.sampled_from([1, 4, 16]))
def test_the_logits_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, shape: Any, first: int, block_size: int
) -> None:
    """Check logits by torch in float64, and those of native passes, against transformers. Pieces of the text end within
    chunks of attention."""
    path = make_checkpoint(tmp_path_factory.mktemp("llama4"), "llama4_text", **{"vocab": 61} | shape)
    expected, pieces = logits(path), [first, 1, 5, len(TOKENS) - first - 6]
    with float64():
        model = load_model(path, dtype="float64")
        close(Feeder(model, block_size=block_size).feed_chunks(TOKENS, pieces), expected, 1e-12)
    close(Feeder(load_native(path), block_size=block_size).feed_chunks(TOKENS, pieces), expected, BOUND)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden": 64, "head_dim": 16, "intermediate": 32, "intermediate_size_mlp": 96}
    return make_checkpoint(tmp_path_factory.mktemp("llama4"), "llama4_text", **SHAPE | sizes)


def test_bits_do_not_depend_on_pieces(path: Path) -> None:
    """Check that native logits have the same bits for any pieces, with rows rounded to bf16 too, over blocks that lie
    across chunks."""
    for dtype in ("float32", "bfloat16"):
        model = load_native(path, dtype=dtype)
        whole = Feeder(model, block_size=4).feed_chunks(TOKENS, [len(TOKENS)])
        for pieces in ([1] * len(TOKENS), [8, 2, 17, 13]):
            assert torch.equal(Feeder(model, block_size=4).feed_chunks(TOKENS, pieces), whole), (dtype, pieces)


def test_bf16_is_near(tmp_path: Path) -> None:
    """Check bf16 against float64, with one expert: a row may go to another one if its input is rounded."""
    path = make_checkpoint(tmp_path, "llama4_text", **SHAPE, num_local_experts=1, dtype=torch.bfloat16)
    expected = logits(path)
    close(Feeder(load_native(path, dtype="bfloat16")).feed_chunks(TOKENS, [11, 29]), expected, 0.05)
    close(Feeder(load_model(path, dtype="bfloat16")).feed_chunks(TOKENS, [11, 29]), expected, 0.1)


@pytest.mark.parametrize("quantization", ["int8", "int4", "q8_0", "q4_0", "fp8"])
def test_native_logits_of_quantized_weights(quantization: str, path: Path) -> None:
    """Check native logits of quantized weights against torch with the dequantized ones."""
    with float64():
        model = load_model(path, dtype="float64", quantization=quantization)
        expected = Feeder(model).feed_chunks(TOKENS, [len(TOKENS)])
    found = Feeder(load_native(path, quantization=quantization)).feed_chunks(TOKENS, [4, 1, 35])
    close(found, expected, 0.02 if quantization == "fp8" else 2e-3)


def test_a_tensor_for_each_expert(path: Path, tmp_path: Path) -> None:
    """Check that experts may have tensors of their own, `[out, in]`, as quantized checkpoints have."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        block, stacked = name.rsplit(".", 1)[0], tensors.pop(name).transpose(1, 2)
        parts = {"down": stacked}
        if name.endswith("gate_up_proj"):
            parts = dict(zip(("gate", "up"), stacked.chunk(2, 1), strict=True))
        for part, weights in parts.items():
            for expert, weight in enumerate(weights):
                tensors[f"{block}.{expert}.{part}_proj.weight"] = weight.contiguous()
    tmp_path.joinpath("config.json").write_bytes(path.joinpath("config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    ours, theirs = (Feeder(load_native(folder)).feed_chunks(TOKENS, [40]) for folder in (tmp_path, path))
    assert torch.equal(ours, theirs)


def test_defaults_are_those_of_transformers(path: Path, tmp_path: Path) -> None:
    """Check that fields which config.json lacks have the values of transformers' class."""
    absent = (
        "head_dim",
        "num_key_value_heads",
        "intermediate_size",
        "intermediate_size_mlp",
        "num_local_experts",
        "num_experts_per_tok",
        "attention_chunk_size",
        "floor_scale",
        "attn_scale",
        "attn_temperature_tuning",
        "use_qk_norm",
        "rms_norm_eps",
        "no_rope_layers",
        "no_rope_layer_interval",
        "interleave_moe_layer_step",
        "moe_layers",
        "layer_types",
        "rope_parameters",
    )
    tmp_path.joinpath("config.json").write_bytes(path.joinpath("config.json").read_bytes())
    edit_json(tmp_path / "config.json", absent, max_position_embeddings=20000, num_attention_heads=8)
    theirs = modeling_llama4.Llama4TextConfig(num_hidden_layers=4)
    ours = load_config(tmp_path)
    assert ours.experts is not None
    assert ours.experts.layers == tuple(i in theirs.moe_layers for i in range(4)) == (True,) * 4
    assert (ours.experts.count, ours.experts.per_token) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    assert ours.experts.intermediate_size == ours.experts.shared == theirs.intermediate_size
    assert (ours.head_dim, ours.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert ours.windows == (theirs.attention_chunk_size,) * 3 + (None,)
    assert [ours.rope_of(i) is not None for i in range(4)] == theirs.no_rope_layers
    assert ours.rope_theta == theirs.default_theta
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rotated_norm == theirs.use_qk_norm
    assert ours.query_scaling == QueryScaling(theirs.attn_scale, theirs.floor_scale, offset=1, unrotated=True)
    edit_json(tmp_path / "config.json", ("intermediate_size",), interleave_moe_layer_step=2)
    assert load_config(tmp_path).intermediate_size == theirs.intermediate_size_mlp


def test_texts_for_which_nothing_grows(path: Path) -> None:
    """Check that queries of texts shorter than `floor_scale` are not scaled: the factor of position 6 is the first."""
    config = load_config(path)
    assert config.query_scaling is not None
    assert config.for_length(6).query_scaling is None
    assert config.for_length(7) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_chunk_size": None}, "attention_chunk_size=None: not implemented; allowed: a number"),
        ({"attention_chunk_size": 0}, "attention_chunk_size=0: must be an integer of at least 1"),
        ({"sliding_window": 8}, "sliding_window=8: not implemented; allowed: None"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types=.*: not implemented; allowed: 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types=.*: .* in every one of 4 layers"),
        ({"moe_layers": [0.5]}, r"moe_layers=\[0.5\]: must be a list of layers"),
        (
            {"interleave_moe_layer_step": 0, "moe_layers": None},
            "interleave_moe_layer_step=0: must be an integer of at least 1",
        ),
        ({"attn_temperature_tuning": -1}, "attn_temperature_tuning=-1: must be true or false"),
        ({"attn_scale": -0.1}, "attn_scale=-0.1: must be 0, or a number from 1e-6 to 1e6"),
        ({"floor_scale": 0}, "floor_scale=0: must be an integer of at least 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9: must be at most num_local_experts=5"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': not implemented"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn': not implemented; allowed: "),
    ],
)
def test_what_is_rejected(fields: dict[str, Any], message: str, path: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_bytes(path.joinpath("config.json").read_bytes())
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path))}/config.json: .*{message}"):
        load_config(tmp_path)


@pytest.mark.parametrize(("switch", "grows"), [(4, True), (0, False), (None, True)])
def test_a_number_in_the_place_of_a_switch(switch: int | None, grows: bool, path: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_bytes(path.joinpath("config.json").read_bytes())
    edit_json(tmp_path / "config.json", attn_temperature_tuning=switch)
    assert (load_config(tmp_path).query_scaling is not None) == grows


def test_null_is_the_default(path: Path, tmp_path: Path) -> None:
    given = tmp_path / "config.json"
    given.write_bytes(path.joinpath("config.json").read_bytes())
    edit_json(given, attn_scale=None, floor_scale=None)
    null = load_config(tmp_path)
    edit_json(given, remove=("attn_scale", "floor_scale"))
    assert null == load_config(tmp_path)
    assert null.query_scaling == QueryScaling(0.1, 8192, offset=1, unrotated=True)


def test_the_size_of_an_mlp_has_its_own_field(tmp_path: Path) -> None:
    """Check errors about the size of the MLP. `intermediate_size` is that of experts, which would fit."""
    path = make_checkpoint(tmp_path, "llama4_text", moe_layers=[0], intermediate=64, intermediate_size_mlp=72)
    config = load_config(path)
    with pytest.raises(UnsupportedConfigError, match=r"^tensor_parallel_size=16: .* has intermediate_size_mlp=72; "):
        check_divides(replace(config, num_heads=16, num_kv_heads=16), str(path), "tensor_parallel_size", 16)
    source = ModelSource.of_target(EngineConfig(model=str(path), quantization="int4"))
    with pytest.raises(
        UnsupportedConfigError, match=r"^quantization='int4': .* has intermediate_size_mlp = 72, groups"
    ):
        source.types(CPU_DTYPES)

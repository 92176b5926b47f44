"""Every field of config.json that transformers reads is read, rejected, or known to have no effect."""

import contextlib
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import LLAMA3_ROPE, MINISTRAL_ROPE, make_checkpoint
from hf_reference import load
from hybrid_reference import float64
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.errors import CheckpointError
from specrs.models import config as config_module
from specrs.models import delta_net as delta_module
from specrs.models import experts as experts_module
from specrs.models import layers as layers_module
from specrs.models import query_scaling as scaling_module
from specrs.models import registry as registry_module
from specrs.models import rope as rope_module
from specrs.models import short_conv as conv_module
from specrs.models import varied_layers as varied_module
from specrs.models.fields import NEUTRAL, WITHOUT_EFFECT
from specrs.models.registry import FAMILIES
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model
from transformers import PreTrainedConfig

from models.harness import Feeder

READ = {
    name
    for module in (
        config_module,
        conv_module,
        delta_module,
        experts_module,
        layers_module,
        scaling_module,
        registry_module,
        rope_module,
        varied_module,
    )
    for name in re.findall(r'"([a-z]\w+)"', Path(str(module.__file__)).read_text())
}
"""Every name that the code for config.json mentions as a string."""
EXAMPLES = 40
PACKAGE = Path(transformers.__file__).parent


def configuration(family: str) -> PreTrainedConfig:
    return transformers.CONFIG_MAPPING[FAMILIES[family].model_type]()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_attribute_of_a_configuration_is_known(family: str) -> None:
    own = configuration(family)
    names = {field.name for field in dataclasses.fields(own)} | set(own.to_dict()) | set(vars(own))
    unknown = {name for name in names if not name.startswith("_")} - READ - set(NEUTRAL) - set(WITHOUT_EFFECT)
    assert not unknown, f"transformers {transformers.__version__} has fields that no table here names"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_attribute_that_code_asks_for_is_known(family: str) -> None:
    """Check that every attribute that transformers' code asks a configuration for is known: code of the family, and of
    masks, caches and loading."""
    own = configuration(family)
    name = type(own).__module__.split(".")[-2]
    asked = set()
    for file in (f"models/{name}/modeling_{name}.py", "masking_utils.py", "cache_utils.py"):
        text = (PACKAGE / file).read_text(encoding="utf-8")
        asked |= set(re.findall(r"\bconfig\.([a-z]\w*)", text))
        asked |= set(re.findall(r'getattr\(\w*\.?\w*config, "(\w+)"', text))
    loading = (PACKAGE / "modeling_utils.py").read_text(encoding="utf-8")
    asked |= set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', loading))
    assert {"hidden_size", "is_causal", "tie_word_embeddings"} <= asked, "the patterns still match"
    plumbing = {
        "get_text_config",  # a method
        "distributed_config",  # which rank holds what
        "gradient_checkpointing",  # memory of training
        "sep_token_id",  # a warning about padding
        "number_of_conv_states",  # of layers that `layer_types` would have to name
        *("text_config", "vision_config", "image_token_id", "mm_tokens_per_image"),  # of models with images
    }
    # Code of towers for images, in the file of the text model.
    neighbours = vars(sys.modules[type(own).__module__]).values()
    towers = {field.name for kind in neighbours if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)}
    towers |= {"num_heads", "vision_start_token_id"} if towers else set()
    towers -= set(vars(own))
    unknown = asked - READ - set(NEUTRAL) - set(WITHOUT_EFFECT) - plumbing - towers
    unknown = {field for field in unknown if not field.startswith("_") and not callable(getattr(own, field, None))}
    assert not unknown, f"transformers {transformers.__version__} asks for fields that no table here names"


def test_the_tables_do_not_overlap() -> None:
    assert not set(NEUTRAL) & set(WITHOUT_EFFECT)
    assert not READ & set(WITHOUT_EFFECT)


VALUES: dict[str, list[Any]] = {
    "rope_parameters": [
        None,
        {},
        {"rope_type": "default", "rope_theta": 1e4},
        {"type": "default", "rope_theta": 500},
        {"rope_theta": 500, "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "beta_fast": 2},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False},
        {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]},
        {"full_attention": {"rope_type": "default", "rope_theta": 500}},
        LLAMA3_ROPE,
        {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"},
        LLAMA3_ROPE | {"partial_rotary_factor": 0.5},
    ],
    "rope_theta": [500, 1e6],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [4, 64],
    "is_causal": [True, False],
    # Not 1: cached passes of transformers then differ from its own pass over the whole text.
    "attention_chunk_size": [2, 3, None, 600],
    "sliding_window": [None, 3, 512],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1],
    "layer_types": [None, ["full_attention"], ["sliding_attention"], ["chunked_attention"]],
    "per_layer_config": [{}, {"0": {"rms_norm_eps": 0.5}}],
    "kv_sharing_modes": [["reuse"]],
    "hidden_act": ["silu", "gelu", "relu"],
    "rms_norm_eps": [1e-6, 0.3],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "attention_dropout": [0.5],
    "pretraining_tp": [2],
    "use_cache": [False],
    "chunk_size_feed_forward": [1],
    "initializer_range": [0.5],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "return_dict": [False],
    "attn_implementation": ["eager"],
    "pad_token_id": [0, 3],
    "bos_token_id": [5],
    "problem_type": ["regression"],
    "tie_word_embeddings": [True, False],
    "model_type": ["llama", "mistral", "qwen2", "qwen3"],
    "dtype": ["float32", "bfloat16"],
    "torch_dtype": ["float16"],
    "num_experts": [0, 2],
    "num_local_experts": [2],
    # Of other families: in these they are not read.
    "logits_scaling": [8.0],
    "embedding_multiplier": [3.0],
    "attention_multiplier": [0.5],
    "residual_multiplier": [0.3],
    "final_logit_softcapping": [1.0],
    "attn_logit_softcapping": [1.0],
    "query_pre_attn_scalar": [2],
    "use_qk_norm": [True, False],
    "qkv_bias": [True, False],
    "no_rope_layers": [[0]],
    "num_kv_shared_layers": [1],
    "use_bidirectional_attention": [True],
    "clip_qkv": [0.01],
    "scale_attn_weights": [False],
    "temperature": [0.3],
    "repetition_penalty": [3.0],
    "suppress_tokens": [[1, 2, 3]],
}
VALUES |= {
    # Of some of ours.
    "no_rope_layer_interval": [1, 4],
    "sliding_window_pattern": [1, 2],
    "rope_local_base_freq": [30.0],
    "hidden_activation": ["gelu", "gelu_pytorch_tanh"],
    "num_key_value_heads": [None, 2],
    "embd_pdrop": [0.5],
    "num_experts_per_tok": [1, 2, 9],
    "norm_topk_prob": [True, False],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [None, [], [0], [3]],
    "output_router_logits": [True],
    "router_jitter_noise": [0.5],
    "swiglu_alpha": [1.0, 0],
    "swiglu_limit": [0.5, None],
}
VALUES |= {
    "norm_eps": [1e-6, 0.3],
    "conv_L_cache": [1, 2, 4, None],
    "conv_bias": [True, False],
    "full_attn_idxs": [None, [], [0], [0, 1], [1, 7], "1"],
    "block_ff_dim": [None, 1, 17, 48],
    "block_multiple_of": [0, 1, 7],
    "num_dense_layers": [0, 1, 3, -1, None],
    "use_expert_bias": [True, False, 1],
    "routed_scaling_factor": [1.0, 0.5, 0],
    "block_ffn_dim_multiplier": [None, 0.4, 2],
    "block_auto_adjust_ff_dim": [True, False, None],
    "tie_embedding": [True, False, None],
    "block_use_swiglu": [False],
}
VALUES |= {
    "attn_temperature_tuning": [True, False, None, 4],
    "attn_scale": [0, 0.7, -1],
    "floor_scale": [1, 3, 0],
    "intermediate_size_mlp": [8, 16, None],
    "interleave_moe_layer_step": [1, 2, 0],
    "moe_layers": [None, [], [0], [0, 5], "0"],
}
VALUES["no_rope_layers"] += [[1], [0, 1], [2], None]
VALUES["layer_types"] += [["sliding_attention", "full_attention"], ["full_attention", "conv"], ["conv"]]
VALUES["rope_parameters"] += [
    {"full_attention": {"rope_type": "linear", "factor": 3.0}, "sliding_attention": {"rope_theta": 77.0}},
    {"sliding_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    {"full_attention": {"rope_theta": 77.0, "partial_rotary_factor": 0.5}},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "partial_rotary_factor": 0.5},
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "factor": 3.0,
    },
]
VALUES["rope_parameters"] += [
    MINISTRAL_ROPE | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 1.5},
    MINISTRAL_ROPE | {"mscale_all_dim": 0.0, "max_position_embeddings": 9},
    MINISTRAL_ROPE | {"llama_4_scaling_beta": 0},
    {key: value for key, value in MINISTRAL_ROPE.items() if key != "original_max_position_embeddings"},
]
VALUES["rope_scaling"] = VALUES["rope_parameters"]

mutations = st.lists(
    st.sampled_from(sorted(VALUES)).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(VALUES[name]))),
    min_size=1,
    max_size=3,
    unique_by=lambda pair: pair[0],
)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fields")
    shape = {"layers": 1, "hidden": 16, "intermediate": 16, "kv_heads": 1, "head_dim": 8, "vocab": 23}
    # By default, Gemma 4 has half a gigabyte of embeddings per layer.
    more = {"Gemma4ForCausalLM": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 23}}
    return {
        name: make_checkpoint(
            folder / name,
            family.model_type,
            tie=True,
            **shape | ({"layers": 2} if family.has_states else {}) | more.get(name, {}),
        )
        for name, family in FAMILIES.items()
    }


@pytest.fixture
def quiet() -> Iterator[None]:
    """Silence transformers, which warns of most mutations."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(before)


def ours(folder: Path) -> tuple[TorchDecoder | None, str]:
    """Load with specrs. Return the model and an empty message, or None and the error."""
    try:
        # As long as the texts here: LongRoPE depends on it.
        return load_model(folder, dtype="float64", max_model_len=len(IDS) + 6), ""
    except CheckpointError as fault:
        return None, str(fault)


def theirs(folder: Path) -> tuple[torch.Tensor, list[int]] | None:
    """Return logits and continuation by transformers; None if it rejects the checkpoint."""
    try:
        model = load(folder)
        ids = torch.tensor([IDS])
        with torch.inference_mode():
            logits = model(ids, return_dict=True).logits[0]
            text = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    except Exception:
        return None
    return logits, text[0, len(IDS) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(mutated=mutations)
@pytest.mark.usefixtures("quiet")
def test_the_logits_of_transformers_or_a_refusal_by_name(
    family: str, mutated: list[tuple[str, Any]], checkpoints: dict[str, Path]
) -> None:
    check(checkpoints[family], dict(mutated))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("quiet")
def test_a_field_that_is_not_there_is_what_transformers_takes_it_for(family: str, checkpoints: dict[str, Path]) -> None:
    folder = checkpoints[family]
    served = {name for name in json.loads((folder / "config.json").read_text()) if check(folder, {}, absent=name)}
    assert {FAMILIES[family].eps_field, "rope_parameters"} <= served


@pytest.mark.usefixtures("quiet")
def test_every_pair_of_rope_layouts(checkpoints: dict[str, Path]) -> None:
    served = 0
    for parameters, scaling in itertools.product(VALUES["rope_parameters"][:15], repeat=2):
        served += check(checkpoints["LlamaForCausalLM"], {"rope_parameters": parameters, "rope_scaling": scaling})
    assert served > 15


def check(folder: Path, mutated: dict[str, Any], *, absent: str | None = None) -> bool:
    """Compare the checkpoint with changed fields in its config.json, and without `absent`, with transformers, or see
    specrs's error. Return whether both serve it."""
    with float64() if FAMILIES[folder.name].delta_net else contextlib.nullcontext():
        return compare(folder, mutated, absent)


def compare(folder: Path, mutated: dict[str, Any], absent: str | None) -> bool:
    """Compare as `check` does, in the precision that transformers uses."""
    file = folder / "config.json"
    original = file.read_text()
    try:
        fields = {name: value for name, value in json.loads(original).items() if name != absent}
        file.write_text(json.dumps(fields | mutated))
        model, refusal = ours(folder)
        if model is None:
            # By the field, or by a tensor that the field asks for.
            assert any(name in refusal for name in (*mutated, absent or ".weight", ".bias", ".weight", ".expert_bias"))
            return False
        expected = theirs(folder)
    finally:
        file.write_text(original)
    if expected is None:
        return False
    logits, text = expected
    # The eager attention of transformers takes its softmax in fp32. Its Gemma and gpt-oss have norms' weights in it,
    # and its Llama 4 rotates in it.
    in_fp32 = model.config.architecture.startswith(("Gemma", "GptOss", "Llama4"))
    atol = 1e-5 if "attn_implementation" in mutated or in_fp32 else 1e-11
    torch.testing.assert_close(Feeder(model).feed_chunks(IDS, [len(IDS)]), logits, rtol=0, atol=atol)
    whole = Feeder(model).feed_chunks([*IDS, *text], [len(IDS) + len(text)])
    assert whole[len(IDS) - 1 : -1].argmax(dim=-1).tolist() == text
    return True

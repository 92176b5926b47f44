"""Table of model families. All families share one decoder; a row of the table says how a family differs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from specrs.errors import CheckpointError
from specrs.models.errors import unsupported
from specrs.models.rope import KINDS

Norms: TypeAlias = Literal["before", "after", "around"]
"""Place of a layer's norms. `before`: before attention and MLP. `after`: after them, so that their outputs are normed
before they are added to the residual stream. `around`: both."""
Stacked: TypeAlias = Literal["alternating", "halves", "turned halves"]
"""Layout of tensors that hold all experts of a layer: see `models.stacked`."""


@dataclass(frozen=True, slots=True)
class ExpertFields:
    """Fields of config.json and tensor names with which a family describes its experts."""

    count: str
    """Field for the number of experts in a layer."""
    default_count: int | None
    """Number of experts in a layer if the field is missing. None: the field is required."""
    default_per_tok: int | None
    """Number of experts that a row uses if the field `per_tok` is missing. None: the field is required."""
    intermediate_size: str
    """Field for the intermediate size of an expert."""
    default_intermediate_size: int | None
    """Intermediate size if the field is missing. None: the field is required."""
    block: str
    """Beginning of the tensor names of router and `experts.N` within a layer, such as `mlp.`."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of the gate, up and down projection of an expert."""
    norm_topk_prob: bool = False
    """True if the weights of the chosen experts always add up to 1. False: only if the field `norm_topk_prob` is
    true."""
    default_norm_topk_prob: bool = False
    """Value of `norm_topk_prob` if the field is missing."""
    dense_layers: bool = False
    """True if some layers have an MLP: those in `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    listed_layers: bool = False
    """True if some layers have an MLP: those that are not in `moe_layers`, or all but every
    `interleave_moe_layer_step`-th."""
    first_dense: int | None = None
    """Value of `num_dense_layers`, the number of layers that have an MLP and come first, if the field is missing. None:
    the field is not read."""
    router: str = "gate"
    """Name of the router."""
    biases: bool = False
    """True if router and experts have biases."""
    softmax_of_chosen: bool = False
    """True if weights are the softmax of the chosen logits only. Up to rounding, `norm_topk_prob` gives the same
    weights."""
    clamped: bool = False
    """True if experts use the clamped SwiGLU, with `swiglu_alpha` and `swiglu_limit`."""
    sigmoids: bool = False
    """True if weights are the sigmoids of the chosen logits. False: a softmax."""
    biased_choice: bool = False
    """True if the experts with the largest sums of sigmoid and a bias are chosen, unless `use_expert_bias` is false.
    Weights of chosen experts are then multiplied by `routed_scaling_factor`."""
    weighs_input: bool = False
    """True if weights multiply the experts' inputs. False: they multiply the experts' outputs."""
    stacked: Stacked | None = None
    """Layout of tensors `experts.gate_up_proj` and `experts.down_proj`, which hold all experts of a layer: see
    `models.stacked`. Except with `alternating`, a checkpoint may also have one tensor per expert and projection. None:
    it has."""
    shared_intermediate_size: int | None = None
    """Value of `shared_expert_intermediate_size`, the size of an expert that every row uses, if the field is missing.
    None: there is no such expert, or `plain_shared`."""
    plain_shared: bool = False
    """True if every row uses one expert more, which is as large as the others. Its output is added as it is."""
    per_tok: str = "num_experts_per_tok"
    """Field for the number of experts that a row uses."""
    enabled: str | None = None
    """Field that is true in models with experts. Then all layers have them. None: the family always has experts."""
    parallel_mlp: bool = False
    """True if layers have an MLP as well as experts. Both read the residual stream, each after a norm of its own. Their
    outputs are normed, and then added."""
    scaled_router: bool = False
    """True if the router reads the residual stream after a norm without weights, times `router.scale` and divided by
    sqrt(hidden_size), and if weights of chosen experts are multiplied by `router.per_expert_scale`."""


@dataclass(frozen=True, slots=True)
class Family:
    """Properties that an architecture fixes, and the fields of config.json that it lets vary.

    Defaults are transformers' values for a field that config.json leaves out. None means that the field is required;
    for `head_dim`, that it is derived as hidden_size / num_attention_heads.
    """

    model_type: str
    """Name of the family in config.json. transformers uses it even if `architectures` names another one."""
    models: str
    """Names of the models of this family, for the table in docs/supported.md."""
    qk_norm: Literal["heads", "whole"] | None = None
    """RMSNorm of queries and keys before RoPE: of each head, or over all query heads and over all key heads as a whole.
    None: there is none."""
    qkv_bias: bool = False
    """True if q, k and v projections always have a bias and o never. The field `attention_bias` does not exist then."""
    has_attention_bias: bool = False
    """True if `attention_bias` may be true. Then q, k, v and o projections have a bias."""
    attention_bias: bool = False
    """Value of `attention_bias` if the field is missing."""
    attention_out_bias: bool = False
    """True if the field `attention_out_bias` says whether the o projection has a bias, and `attention_bias` says so for
    q, k and v alone. False: `attention_bias` says both."""
    sinks: bool = False
    """True if each query head has an attention sink: a score that takes its share of the softmax and adds nothing."""
    has_mlp_bias: bool = False
    """True if `mlp_bias` may be true. Then gate, up and down projections have a bias."""
    head_dim: int | None = None
    """Number of features per head if the field is missing. None: hidden_size / num_attention_heads."""
    kv_heads_default: bool = False
    """True if a missing `num_key_value_heads` means one KV head for each query head."""
    num_key_value_heads: int | None = None
    """Number of KV heads if the field is missing."""
    windows: (
        Literal["all", "switched", "chosen", "unrotated", "pattern", "alternating", "three of four", "chunks"] | None
    ) = None
    """Rule for the layers that have a sliding window. None: no layer has one.

    - `all`: every layer, if `sliding_window` is a number.
    - `switched`: every layer, if `use_sliding_window` is true.
    - `chosen`: if `use_sliding_window` is true, the layers that `layer_types` names, or layers from `max_window_layers`
      on.
    - `unrotated`: if `use_sliding_window` is true, the layers that `layer_types` names, or layers without RoPE.
    - `pattern`: layers that `layer_types` names, or all but every sixth (`sliding_window_pattern`).
    - `alternating`: layers that `layer_types` names, or every second, starting with the first.
    - `three of four`: layers that `layer_types` names, or all but every fourth.
    - `chunks`: layers that `layer_types` names, or layers with RoPE. The text is divided into chunks of
      `attention_chunk_size` tokens, and a window ends where the row's chunk begins.
    """
    sliding_window: int | None = None
    """Size of sliding windows in tokens if the field is missing."""
    max_window_layers: int = 28
    """First layer with a window, for `chosen` windows, if the field is missing."""
    norms: Norms = "before"
    norm_offset: float = 0.0
    """Number that is added to the weights of norms when they are loaded."""
    act_field: str = "hidden_act"
    """Field for the activation of the MLP."""
    activation: str = "silu"
    """The one value that `act_field` may have."""
    fused_projections: bool = False
    """True if checkpoints store q, k and v as one tensor, and gate and up as one tensor."""
    partial_rotary: bool = False
    """True if `partial_rotary_factor` may be less than 1."""
    rotary_factor: float = 1.0
    """Value of `partial_rotary_factor` if the field is missing."""
    rope_theta: float = 10000.0
    rope_kinds: tuple[str, ...] = KINDS
    """Values of `rope_type` that the family may have."""
    rope_default: tuple[tuple[str, object], ...] = ()
    """Fields of the RoPE object for a config.json that has neither `rope_parameters` nor `rope_scaling`. Empty: plain
    RoPE."""
    original_positions: int | None = None
    """Value of `original_max_position_embeddings` if the field is missing."""
    rope_sections: bool = False
    """True if RoPE's angles are of three kinds of positions, `mrope_section`. They are the same for text."""
    local_rope_theta: float | None = None
    """Theta of a second RoPE, for layers with a window, if config.json names none. None: all layers share one RoPE."""
    query_scaling: bool = False
    """True if RoPE's object has a field by which queries grow with their position: see `models.query_scaling`."""
    unrotated_scaling: bool = False
    """True if queries of layers without RoPE may grow with their position, as `attn_temperature_tuning`, `attn_scale`
    and `floor_scale` say."""
    interleaved_rope: bool = False
    """True if RoPE rotates neighbouring features of a head. False: it rotates its halves against each other."""
    rotated_norm: bool = False
    """True if heads of queries and keys in layers with RoPE have an RMSNorm without weights after it, unless
    `use_qk_norm` is false."""
    unrotated_layers: bool = False
    """True if some layers have no RoPE: those with 0 in `no_rope_layers`, or every fourth
    (`no_rope_layer_interval`)."""
    multipliers: bool = False
    """True if `embedding_multiplier`, `residual_multiplier`, `attention_multiplier` and `logits_scaling` are read."""
    scaled_embedding: bool = False
    """True if embeddings are multiplied by sqrt(hidden_size)."""
    query_pre_attn_scalar: int | None = None
    """Value of the field `query_pre_attn_scalar` if it is missing. Attention scores are divided by its square root.
    None: by sqrt(head_dim)."""
    eps_field: str = "rms_norm_eps"
    """Field for the number added to the mean square of norms."""
    rms_norm_eps: float = 1e-6
    tied: bool = False
    """True if a missing `tie_word_embeddings` means true."""
    intermediate_field: str = "intermediate_size"
    """Field for the intermediate size of the MLP."""
    intermediate_size: int | None = None
    """Intermediate size of the MLP if the field is missing. None: the field is required, unless all layers have
    experts."""
    experts: ExpertFields | None = None
    """Description of the experts that replace the MLP or stand next to it. None: there are no experts."""
    delta_net: bool = False
    """True if some layers have a gated delta net in the place of attention: see `models.delta_net`."""
    fused_delta_net: bool = False
    """True if a delta net has two input projections, `in_proj_qkvz` and `in_proj_ba`, whose outputs lie by key head."""
    short_conv: bool = False
    """True if some layers have a gated short convolution in the place of attention, and fields have LFM2's names: see
    `models.short_conv`."""
    output_gate: bool = False
    """True if attention's output is multiplied by the sigmoid of a gate. `q_proj` has of each head its query, then its
    gate."""
    varied_layers: bool = False
    """True if sizes of layers differ, layers may share keys and values, and each may have embeddings of its own: see
    `models.varied_layers`."""
    mtp: bool = False
    """True if checkpoints may have an MTP head `mtp.*`, which reads hidden states after the final norm."""
    neutral: tuple[tuple[str, tuple[object, ...]], ...] = ()
    """Fields of this family that are not read, with the values at which they have no effect."""
    tensor_names: tuple[tuple[str, str], ...] = ()
    """Parts of tensor names in checkpoints of this family that differ, and the names that other families have."""

    @property
    def has_states(self) -> bool:
        """True if some layers have a state in the place of keys and values."""
        return self.delta_net or self.short_conv


_QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3.5, Qwen3.6, Qwen3.8, dense",
    qk_norm="heads",
    norm_offset=1.0,
    num_key_value_heads=4,
    head_dim=256,
    partial_rotary=True,
    rotary_factor=0.25,
    rope_kinds=("default",),
    rope_sections=True,
    delta_net=True,
    output_gate=True,
    mtp=True,
    neutral=(
        ("attn_output_gate", (None, True)),
        ("mamba_ssm_dtype", (None, "float32")),
        ("mlp_only_layers", (None, [])),
        ("mtp_use_dedicated_embeddings", (None, False)),
    ),
)
"""Dense Qwen3.5, from which the rows of its relatives with experts are derived."""
_QWEN3_5_EXPERTS = ExpertFields(
    "num_experts",
    256,
    8,
    "moe_intermediate_size",
    512,
    "mlp.",
    norm_topk_prob=True,
    stacked="halves",
    shared_intermediate_size=512,
)

_LFM2 = Family(
    "lfm2",
    "LFM2, LFM2.5, dense",
    qk_norm="heads",
    num_key_value_heads=8,
    rope_theta=1e6,
    eps_field="norm_eps",
    rms_norm_eps=1e-5,
    tied=True,
    short_conv=True,
    neutral=(("conv_bias", (None, False)), ("block_use_swiglu", (None, True)), ("use_pos_enc", (None, True))),
    tensor_names=(
        ("embedding_norm", "norm"),
        ("operator_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("self_attn.q_layernorm", "self_attn.q_norm"),
        ("self_attn.k_layernorm", "self_attn.k_norm"),
        ("self_attn.out_proj", "self_attn.o_proj"),
        ("feed_forward", "mlp"),
        ("w1", "gate_proj"),
        ("w3", "up_proj"),
        ("w2", "down_proj"),
    ),
)
"""Dense LFM2, from which the row of its relative with experts is derived."""

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama", "Llama 2, 3, 3.1, 3.2, 3.3", has_attention_bias=True, has_mlp_bias=True, kv_heads_default=True
    ),
    "MistralForCausalLM": Family("mistral", "Mistral", windows="all", sliding_window=4096),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        "Ministral 3, Devstral 2",
        num_key_value_heads=8,
        head_dim=128,
        windows="all",
        rope_kinds=("yarn",),
        rope_default=(
            ("rope_type", "yarn"),
            ("rope_theta", 1e6),
            ("factor", 16.0),
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("mscale", 1.0),
            ("mscale_all_dim", 1.0),
            ("original_max_position_embeddings", 16384),
            ("llama_4_scaling_beta", 0.1),
        ),
        query_scaling=True,
        rms_norm_eps=1e-5,
    ),
    "Qwen2ForCausalLM": Family("qwen2", "Qwen2, Qwen2.5", qkv_bias=True, windows="chosen", sliding_window=4096),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        "Qwen3, dense",
        qk_norm="heads",
        has_attention_bias=True,
        head_dim=128,
        windows="chosen",
        sliding_window=4096,
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        "OLMo 2",
        qk_norm="whole",
        norms="after",
        has_attention_bias=True,
        kv_heads_default=True,
        rms_norm_eps=1e-5,
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        "OLMo 3",
        qk_norm="whole",
        norms="after",
        has_attention_bias=True,
        kv_heads_default=True,
        windows="three of four",
        sliding_window=4096,
        rope_theta=5e5,
        local_rope_theta=5e5,
        rope_kinds=("default", "linear", "yarn", "llama3"),
        rms_norm_eps=1e-5,
        # transformers leaves it alone.
        neutral=(("rope_local_base_freq", (None,)),),
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        "Seed-OSS",
        has_attention_bias=True,
        attention_bias=True,
        attention_out_bias=True,
        has_mlp_bias=True,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        "Phi-3, Phi-3.5, Phi-4",
        kv_heads_default=True,
        fused_projections=True,
        windows="all",
        partial_rotary=True,
        rope_kinds=("default", "longrope"),
        original_positions=4096,
        rms_norm_eps=1e-5,
    ),
    "GraniteForCausalLM": Family(
        "granite",
        "Granite 3, dense",
        has_attention_bias=True,
        has_mlp_bias=True,
        kv_heads_default=True,
        multipliers=True,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        "SmolLM3",
        has_attention_bias=True,
        has_mlp_bias=True,
        num_key_value_heads=4,
        windows="unrotated",
        unrotated_layers=True,
        rope_theta=2e6,
        tied=True,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        "Gemma 3, text",
        qk_norm="heads",
        norms="around",
        norm_offset=1.0,
        act_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        has_attention_bias=True,
        num_key_value_heads=4,
        head_dim=256,
        windows="pattern",
        sliding_window=4096,
        rope_theta=1e6,
        local_rope_theta=1e4,
        rope_kinds=("default", "linear"),
        scaled_embedding=True,
        query_pre_attn_scalar=256,
        tied=True,
        neutral=(
            ("use_bidirectional_attention", (None, False)),
            ("attn_logit_softcapping", (None,)),
            ("final_logit_softcapping", (None,)),
        ),
    ),
    "Gemma4ForCausalLM": Family(
        "gemma4_text",
        "Gemma 4, text",
        qk_norm="heads",
        norms="around",
        act_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        has_attention_bias=True,
        num_key_value_heads=4,
        head_dim=256,
        windows="pattern",
        sliding_window=512,
        rope_theta=1e6,
        local_rope_theta=1e4,
        rope_kinds=("default", "proportional"),
        rope_default=(
            ("full_attention", {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}),
            ("sliding_attention", {"rope_type": "default", "rope_theta": 1e4}),
        ),
        scaled_embedding=True,
        tied=True,
        varied_layers=True,
        experts=ExpertFields(
            "num_experts",
            None,
            None,
            "moe_intermediate_size",
            None,
            "",
            norm_topk_prob=True,
            router="router.proj",
            stacked="halves",
            per_tok="top_k_experts",
            enabled="enable_moe_block",
            parallel_mlp=True,
            scaled_router=True,
        ),
        neutral=(("use_bidirectional_attention", (None, False, "vision")),),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "Qwen3, experts",
        qk_norm="heads",
        has_attention_bias=True,
        num_key_value_heads=4,
        windows="switched",
        sliding_window=4096,
        experts=ExpertFields("num_experts", 128, 8, "moe_intermediate_size", 768, "mlp.", dense_layers=True),
        neutral=(("use_qk_norm", (None, True)), ("qkv_bias", (None, False))),
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        "Mixtral",
        rope_theta=1e6,
        num_key_value_heads=8,
        windows="all",
        rms_norm_eps=1e-5,
        experts=ExpertFields(
            "num_local_experts",
            8,
            2,
            "intermediate_size",
            None,
            "block_sparse_moe.",
            ("w1", "w3", "w2"),
            norm_topk_prob=True,
        ),
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": replace(
        _QWEN3_5,
        model_type="qwen3_5_moe_text",
        models="Qwen3.5, Qwen3.6, experts",
        num_key_value_heads=2,
        experts=_QWEN3_5_EXPERTS,
        neutral=(*_QWEN3_5.neutral, ("decoder_sparse_step", (None, 1))),
    ),
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5,
        model_type="qwen3_next",
        models="Qwen3-Next",
        num_key_value_heads=2,
        rope_kinds=KINDS,
        rope_sections=False,
        fused_delta_net=True,
        experts=replace(
            _QWEN3_5_EXPERTS,
            default_count=512,
            default_per_tok=10,
            norm_topk_prob=False,
            default_norm_topk_prob=True,
            dense_layers=True,
        ),
        neutral=tuple(field for field in _QWEN3_5.neutral if field[0] != "mlp_only_layers"),
    ),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        model_type="lfm2_moe",
        models="LFM2, LFM2.5, experts",
        experts=ExpertFields(
            "num_experts",
            32,
            4,
            "moe_intermediate_size",
            1792,
            "mlp.",
            default_norm_topk_prob=True,
            first_dense=2,
            sigmoids=True,
            biased_choice=True,
            stacked="halves",
        ),
    ),
    "Llama4ForCausalLM": Family(
        "llama4_text",
        "Llama 4 Scout, Maverick, text",
        has_attention_bias=True,
        num_key_value_heads=8,
        head_dim=128,
        windows="chunks",
        rope_theta=5e5,
        # Of a magnitude of 1, because RoPE and the norm after it are computed the other way round.
        rope_kinds=("default", "llama3", "linear"),
        unrotated_scaling=True,
        interleaved_rope=True,
        rotated_norm=True,
        unrotated_layers=True,
        rms_norm_eps=1e-5,
        intermediate_field="intermediate_size_mlp",
        intermediate_size=16384,
        experts=ExpertFields(
            "num_local_experts",
            16,
            1,
            "intermediate_size",
            8192,
            "mlp.",
            listed_layers=True,
            router="router",
            sigmoids=True,
            weighs_input=True,
            stacked="turned halves",
            plain_shared=True,
        ),
        neutral=(("sliding_window", (None,)), ("for_llm_compressor", (None, False)), ("norm_topk_prob", (None, False))),
        tensor_names=(("feed_forward", "mlp"),),
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        "gpt-oss",
        has_attention_bias=True,
        attention_bias=True,
        sinks=True,
        num_key_value_heads=8,
        head_dim=64,
        windows="alternating",
        sliding_window=128,
        rope_theta=150000.0,
        rope_default=(
            ("rope_type", "yarn"),
            ("factor", 32.0),
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("truncate", False),
            ("original_max_position_embeddings", 4096),
        ),
        rms_norm_eps=1e-5,
        experts=ExpertFields(
            "num_local_experts",
            128,
            4,
            "intermediate_size",
            None,
            "mlp.",
            norm_topk_prob=True,
            router="router",
            biases=True,
            softmax_of_chosen=True,
            clamped=True,
            stacked="alternating",
        ),
    ),
}


def is_known(architectures: object) -> bool:
    """Return whether the `architectures` field of a config.json names a family of this table, or the base model of
    one."""
    if not isinstance(architectures, list) or len(architectures) != 1:
        return False
    return isinstance(architectures[0], str) and _of_causal_model(architectures[0]) in FAMILIES


def family_of(architectures: object) -> tuple[str, Family]:
    """Return (name, family) for the `architectures` field of a config.json, which must hold exactly one known name. A
    base model, such as `Qwen3Model`, has the name of its causal model.

    Raises UnsupportedModelError with the list of known names otherwise.
    """
    if not isinstance(architectures, list) or not is_known(architectures):
        raise unsupported("architectures", architectures, "a list of one of " + ", ".join(FAMILIES))
    name = _of_causal_model(architectures[0])
    return name, FAMILIES[name]


def _of_causal_model(architecture: str) -> str:
    """Return the name of a base model's causal model; other names unchanged."""
    causal = architecture.removesuffix("Model") + "ForCausalLM"
    return causal if architecture.endswith("Model") and causal in FAMILIES else architecture


def renamed(folder: Path, names: Mapping[str, str], architectures: object) -> dict[str, str]:
    """Return `names`, a map from tensors to their names in the files of `folder`, with tensors named as in other
    families: see `Family.tensor_names`. `architectures` is the field of config.json.

    Raises CheckpointError if two tensors would have the same name.
    """
    architecture = family_of(architectures)[0] if is_known(architectures) else None
    made: dict[str, str] = {}
    for name, file in names.items():
        own = name if architecture is None else common_name(architecture, name)
        if own in made:
            raise CheckpointError(f"{folder}: {made[own]} and {file} are the same tensor; remove one")
        made[own] = file
    return made


def common_name(architecture: str, name: str) -> str:
    """Return the name in other families of the tensor `name` of a checkpoint of `architecture`: see
    `Family.tensor_names`."""
    own = f".{name}"
    for theirs, ours in FAMILIES[architecture].tensor_names:
        own = own.replace(f".{theirs}.", f".{ours}.")
    return own[1:]


def stored_name(architecture: str, name: str) -> str:
    """Return the name in checkpoints of `architecture` of the module `name`, which is named as in other families: see
    `Family.tensor_names`."""
    own = f".{name}."
    for theirs, ours in FAMILIES[architecture].tensor_names:
        own = own.replace(f".{ours}.", f".{theirs}.")
    return own[1:-1]

"""The table of model families. A family is a row of this table: all share one decoder; what differs is data."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from specrs.models.errors import unsupported
from specrs.models.rope import KINDS

Norms: TypeAlias = Literal["before", "behind", "around"]
"""Where a layer's norms are: before attention and MLP, behind them (their outputs are normed before they are added to
the residual stream), or both."""


@dataclass(frozen=True, slots=True)
class ExpertFields:
    """How a family of mixtures of experts says what it has, and what it calls their tensors."""

    count: str
    """The field of how many there are in a layer."""
    default_count: int
    default_per_tok: int
    intermediate_size: str
    default_intermediate_size: int | None
    block: str
    """Of a layer, the prefix of its router `gate` and of `experts.N`."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    norm_topk_prob: bool = False
    """Weights of the chosen experts always add up to 1; False: where the field `norm_topk_prob` is true."""
    dense_layers: bool = False
    """Some layers have a plain MLP: those in `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    router: str = "gate"
    """What the router is called."""
    biases: bool = False
    """Router and experts have biases."""
    softmax_of_chosen: bool = False
    """Weights are the softmax of the chosen logits: what `norm_topk_prob` makes of that of all, up to rounding."""
    clamped: bool = False
    """Experts have a clamped SwiGLU, of `swiglu_alpha` and `swiglu_limit`."""
    stacked: bool = False
    """A checkpoint has all experts of a layer in one tensor a projection: see `models.stacked`."""


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes, and which fields of config.json it lets vary.

    Defaults are those of transformers for a field that config.json leaves out; `None` means that it must be there
    (or, for `head_dim`, that it is derived as hidden_size / num_attention_heads).
    """

    model_type: str
    """What config.json calls the family; transformers goes by it where `architectures` says something else."""
    models: str
    """What the models are called."""
    qk_norm: Literal["heads", "whole"] | None = None
    """RMSNorm before RoPE over each query and key head, or over all query heads as one and all key heads as one."""
    qkv_bias: bool = False
    """q, k and v projections always have a bias, o never; `attention_bias` does not exist."""
    has_attention_bias: bool = False
    """`attention_bias` may be true: q, k, v and o projections then have a bias."""
    attention_bias: bool = False
    """Where the field is missing."""
    sinks: bool = False
    """Each query head has a score of its own that takes its share of every softmax and adds nothing."""
    has_mlp_bias: bool = False
    """`mlp_bias` may be true: gate, up and down projections then have a bias."""
    head_dim: int | None = None
    kv_heads_default: bool = False
    """A missing `num_key_value_heads` means as many as query heads."""
    num_key_value_heads: int | None = None
    """So many where the field is missing."""
    windows: Literal["all", "switched", "chosen", "unrotated", "pattern", "alternating"] | None = None
    """Layers with a sliding window: `all` where `sliding_window` is a number, `switched`: and `use_sliding_window` is
    true, or `chosen` ones, where
    `use_sliding_window` is true, too: those that `layer_types` names, or from `max_window_layers` on. `unrotated`: the
    same, or those without RoPE. `pattern`: those that `layer_types` names, or all but every sixth
    (`sliding_window_pattern`). `alternating`: those that `layer_types` names, or every second, the first among them.
    None: it has none."""
    sliding_window: int | None = None
    max_window_layers: int = 28
    norms: Norms = "before"
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
    act_field: str = "hidden_act"
    activation: str = "silu"
    """The one value that `act_field` may have."""
    fused_projections: bool = False
    """q, k and v are one tensor, and so are gate and up."""
    partial_rotary: bool = False
    """`partial_rotary_factor` may be less than 1."""
    rope_theta: float = 10000.0
    rope_kinds: tuple[str, ...] = KINDS
    rope_default: tuple[tuple[str, object], ...] = ()
    """The RoPE object where config.json has none."""
    original_positions: int | None = None
    """Of `original_max_position_embeddings`."""
    local_rope_theta: float | None = None
    """Layers with a window have RoPE of their own, with this theta where config.json says none."""
    unrotated_layers: bool = False
    """Some layers have no RoPE: those with 0 in `no_rope_layers`, or every fourth (`no_rope_layer_interval`)."""
    multipliers: bool = False
    """`embedding_multiplier`, `residual_multiplier`, `attention_multiplier` and `logits_scaling` are read."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of `hidden_size`."""
    query_pre_attn_scalar: int | None = None
    """Scores are divided by the root of that field instead of the root of `head_dim`."""
    rms_norm_eps: float = 1e-6
    tied: bool = False
    """A missing `tie_word_embeddings` means true."""
    experts: ExpertFields | None = None
    """In place of an MLP, layers have experts and a router that chooses among them."""
    neutral: tuple[tuple[str, tuple[object, ...]], ...] = ()
    """Fields of this family that are not read, with the values at which they have no effect."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama", "Llama 2, 3, 3.1, 3.2, 3.3", has_attention_bias=True, has_mlp_bias=True, kv_heads_default=True
    ),
    "MistralForCausalLM": Family("mistral", "Mistral", windows="all", sliding_window=4096),
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
        norms="behind",
        has_attention_bias=True,
        kv_heads_default=True,
        rms_norm_eps=1e-5,
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
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "Qwen3, experts",
        qk_norm="heads",
        has_attention_bias=True,
        num_key_value_heads=4,
        windows="switched",
        sliding_window=4096,
        experts=ExpertFields("num_experts", 128, 8, "moe_intermediate_size", 768, "mlp", dense_layers=True),
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
            "block_sparse_moe",
            ("w1", "w3", "w2"),
            norm_topk_prob=True,
        ),
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
            "mlp",
            norm_topk_prob=True,
            router="router",
            biases=True,
            softmax_of_chosen=True,
            clamped=True,
            stacked=True,
        ),
    ),
}


def is_known(architectures: object) -> bool:
    """Whether the `architectures` field of a config.json names a family of this table."""
    if not isinstance(architectures, list) or len(architectures) != 1:
        return False
    return isinstance(architectures[0], str) and architectures[0] in FAMILIES


def family_of(architectures: object) -> tuple[str, Family]:
    """Return (name, family) for the `architectures` field of a config.json, which must hold exactly one known name.

    Raises UnsupportedModelError with the list of known names otherwise.
    """
    if not isinstance(architectures, list) or not is_known(architectures):
        raise unsupported("architectures", architectures, "a list of one of " + ", ".join(FAMILIES))
    return architectures[0], FAMILIES[architectures[0]]

"""Parser of config.json. Checks each field. Reads no weights and no tokenizer.

transformers does not parse it for us, because it fills gaps with defaults and ignores unknown fields. A decoder that
ignores a field computes another model. Both of its layouts are read: version 4 has `rope_theta`, `rope_scaling` and
`torch_dtype`, version 5 has `rope_parameters` and `dtype`. If a file has both, they must agree. `fields.py` lists the
fields that are not read. From generation_config.json this module reads the stop ids; the server reads the sampling
parameters, and nothing else is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specrs.models.delta_net import DeltaNet, parse_delta_net
from specrs.models.errors import malformed, unsupported
from specrs.models.experts import EXPERT_COUNTS, SHARED_SIZE, Experts, parse_experts
from specrs.models.fields import NEUTRAL
from specrs.models.layers import layer_kinds, parse_layers
from specrs.models.query_scaling import QueryScaling, parse_beta, parse_unrotated
from specrs.models.registry import ExpertFields, Family, Norms, family_of
from specrs.models.rope import ALL_KINDS, LongRopeScaling, Rope, RopeFacts, Scaling, YarnScaling, rope_magnitude
from specrs.models.short_conv import ShortConv, parse_intermediate_size, parse_short_conv
from specrs.models.values import flag, number, optional_number, size
from specrs.models.varied_layers import LayerEmbedding, LayerSizes, parse_layer_embedding, parse_layer_sizes


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder: embedding, `num_layers` x (attention, gated MLP or experts), final norm, LM head.
    Immutable and checked."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Scaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    checkpoint_dtype: str | None
    """`dtype` of config.json without the prefix `torch.`. None if the file names none."""
    eos_token_ids: tuple[int, ...]
    """Token ids that end a text: from generation_config.json if it names any, as in transformers' `generate`, else from
    config.json."""
    mask_token_id: int | None
    """Token that a draft model for parallel drafting reads in place of drafts. None for other models."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens, including the row's own token; None: the layer attends to all positions.
    Empty: all layers attend to all positions."""
    chunked: bool = False
    """True if a window ends where the row's chunk begins: the text is divided into chunks as long as the window."""
    ropes: tuple[Rope | None, ...] = ()
    """RoPE of each layer; None: the layer has no RoPE. Empty: all layers use `rope_theta` and `rope_scaling`."""
    interleaved_rope: bool = False
    """True if RoPE rotates neighbouring features of a head. False: it rotates halves of a head against each other."""
    rotated_norm: bool = False
    """True if each head of queries and keys in layers with RoPE has an RMSNorm without weights, after RoPE. Passes
    compute it before RoPE, which does not change the mean square."""
    partial_rotary_dim: int | None = None
    """Number of features of a head that RoPE rotates, from the first on. None: all."""
    qk_norm_whole: bool = False
    """True if `qk_norm` is one norm over all query heads and one over all key heads. False: it norms each head by
    itself."""
    norms: Norms = "before"
    norm_offset: float = 0.0
    """Number that is added to the weights of norms when they are loaded."""
    activation: str = "silu"
    """Activation of the MLP: `silu` or `gelu_pytorch_tanh`."""
    fused_projections: bool = False
    """True if the checkpoint stores q, k and v as one tensor, and gate and up as one tensor."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on the outputs of attention and MLP before they are added to the residual stream."""
    attention_multiplier: float | None = None
    """Factor on attention scores. None: 1 / sqrt(head_dim)."""
    logits_scaling: float = 1.0
    """Number that logits are divided by."""
    sinks: bool = False
    """True if each query head has an attention sink: one more score in the softmax, with no position and a value of
    zero."""
    has_lm_head: bool = True
    """False for a checkpoint of a base model without an LM head, which embeds and generates no text. The embedding then
    stands in for the head."""
    experts: Experts | None = None
    """Sizes of the experts that replace the MLP in some or all layers, or with `parallel_mlp` stand next to it. None:
    there are no experts."""
    delta: DeltaNet | None = None
    """Sizes of the delta nets that replace attention in some layers. None: there are none."""
    conv: ShortConv | None = None
    """Sizes of the short convolutions that replace attention in some layers. None: there are none."""
    output_gate: bool = False
    """True if attention's output is multiplied by the sigmoid of a gate, a second half of each head of `q_proj`."""
    varied: tuple[LayerSizes, ...] = ()
    """Sizes of each layer. Empty: all layers have `head_dim`, `num_kv_heads` and `intermediate_size`."""
    layer_embedding: LayerEmbedding | None = None
    """Sizes of the embeddings that each layer adds for the row's token. None: there are none."""
    layer_scalars: bool = False
    """True if each layer multiplies its output, residual stream included, by a number of the checkpoint."""
    value_norm: bool = False
    """True if each head of values has an RMSNorm without weights."""
    query_scaling: QueryScaling | None = None
    """Factors of queries by position. None: all are 1."""
    final_logit_softcapping: float | None = None
    """Number c for which logits x become `c tanh(x / c)`. None: logits stay as they are."""

    @property
    def states(self) -> DeltaNet | ShortConv | None:
        """Sizes of the layers that have a state in the place of keys and values. None: all layers have attention."""
        return self.delta or self.conv

    def has_state(self, layer: int) -> bool:
        """Return whether a layer has a state in the place of keys and values."""
        return self.states is not None and self.states.layers[layer]

    def sizes_of(self, layer: int) -> LayerSizes:
        """Return the sizes of a layer."""
        return self.varied[layer] if self.varied else self.plain_sizes

    @property
    def plain_sizes(self) -> LayerSizes:
        """Sizes of a layer that the configuration does not name."""
        return LayerSizes(self.head_dim, self.num_kv_heads, self.intermediate_size)

    def rotary_dim_of(self, layer: int) -> int:
        """Return the number of features of a head that RoPE rotates in a layer, from the first on."""
        return self.varied[layer].head_dim if self.varied else self.rotary_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that have attention, and so keys and values."""
        return tuple(i for i in range(self.num_layers) if not self.has_state(i))

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of states of a running request, and further bytes for each of its drafts. (0, 0) if all layers have
        attention."""
        return (0, 0) if self.states is None else (self.states.row_bytes, self.states.draft_bytes)

    @property
    def num_parameters(self) -> int:
        """Number of weights that a pass over one row reads. Counts only the experts that a row uses, and the input
        embedding only if the LM head shares it."""
        return round(self.num_parameters_read(1))

    def num_parameters_read(self, rows: int) -> float:
        """Return the expected number of weights that a pass over `rows` rows reads. Counts the experts that some row
        uses (`Experts.expected`), and the input embedding only if the LM head shares it."""
        if self.varied:
            return self._varied_parameters(rows)
        q, kv, h, i = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.hidden_size,
            self.intermediate_size,
        )
        attention = h * (q + 2 * kv) + q * h + (q + 2 * kv) * self.qkv_bias + h * self.o_bias
        attention += h * q * self.output_gate
        if self.qk_norm:
            attention += q + kv if self.qk_norm_whole else 2 * self.head_dim
        if self.sinks:
            attention += self.num_heads
        mlp = 3 * h * i + (2 * i + h) * self.mlp_bias
        norms = (4 if self.norms == "around" else 2) * h
        total = len(self.attention_layers) * attention + self.num_layers * norms + h + self.vocab_size * h
        if self.states is not None:
            s = self.states
            total += sum(s.layers) * (h * s.outputs + s.inner * h + s.num_small)
        if self.experts is None:
            return total + self.num_layers * mlp
        sparse = sum(self.experts.layers)
        return total + sparse * self._expert_parameters(self.experts, rows) + (self.num_layers - sparse) * mlp

    def _expert_parameters(self, experts: Experts, rows: int) -> float:
        """Return the expected number of weights of a layer's router and experts that a pass over `rows` rows reads,
        with the norms that these have."""
        h = self.hidden_size
        router, expert = experts.count * h, 3 * h * experts.intermediate_size
        if experts.biases:
            router, expert = router + experts.count, expert + 2 * experts.intermediate_size + h
        if experts.scaled_router:
            router += h + experts.count
        if experts.biased_choice:
            router += experts.count
        shared = 0 if experts.shared is None else (3 * experts.shared + experts.shared_gate) * h
        norms = 3 * h if experts.parallel_mlp else 0
        return router + experts.expected(rows) * expert + shared + norms

    def _varied_parameters(self, rows: int) -> float:
        """Return the expected number of weights that a pass over `rows` rows reads of a model whose layers differ."""
        h, embedding = self.hidden_size, self.layer_embedding
        total: float = h + self.vocab_size * h
        if self.experts is not None:
            total += self.num_layers * self._expert_parameters(self.experts, rows)
        for sizes in self.varied:
            q, kv = self.num_heads * sizes.head_dim, sizes.projected_heads * sizes.head_dim
            total += h * (2 * q + kv) + (q + kv) * self.qkv_bias + h * self.o_bias + 3 * h * sizes.intermediate_size
            total += sizes.head_dim * (1 if sizes.source is not None else 2) + 4 * h + 1
            if embedding is not None:
                total += 2 * h * embedding.size + h
        if embedding is not None:
            total += embedding.size * (1 + self.num_layers * h)
        return total

    @property
    def attention_ratio(self) -> float:
        """Multiplications of attention per context position, divided by those of one token's matrix products without
        the LM head. Layers with a sliding window count as 0, because their cost stops growing once the window is
        full."""
        layers = self.attention_layers
        full = [i for i in layers if self.windows[i] is None] if self.windows else layers
        products = self.num_parameters - self.vocab_size * self.hidden_size
        return sum(2 * self.num_heads * self.sizes_of(i).head_dim for i in full) / products

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that RoPE rotates, from the first on."""
        return self.head_dim if self.partial_rotary_dim is None else self.partial_rotary_dim

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    def rope_of(self, layer: int) -> Rope | None:
        """Return the RoPE of a layer; None if it has none."""
        return self.ropes[layer] if self.ropes else (self.rope_theta, self.rope_scaling)

    @property
    def rope_magnitude(self) -> float:
        """Factor on the cos and sin of RoPE angles with `rope_scaling`. Layers in `ropes` may have another."""
        return rope_magnitude(self.rope_scaling)

    def for_length(self, max_model_len: int | None) -> "ModelConfig":
        """Return the configuration for texts of up to `max_model_len` tokens. Only LongRoPE depends on it, and query
        scaling, which is left out if all its factors are 1. None: keep the model's own length."""
        if max_model_len is None:
            return self
        if self.query_scaling is not None and not self.query_scaling.changes(max_model_len):
            return replace(self, query_scaling=None)
        if not isinstance(self.rope_scaling, LongRopeScaling):
            return self
        scaling = replace(self.rope_scaling, max_length=max_model_len)
        # Layers without RoPE, and layers with another scaling, stay as they are.
        ropes = tuple(rope and (rope[0], scaling if rope[1] == self.rope_scaling else rope[1]) for rope in self.ropes)
        return replace(self, rope_scaling=scaling, ropes=ropes)


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, rope_kinds: tuple[str, ...] = ALL_KINDS
) -> ModelConfig:
    """Build a ModelConfig from the objects in config.json and generation_config.json (None: there is no such file).

    `rope_kinds` are the kinds of RoPE that the caller's passes support.

    Raises UnsupportedModelError for what is not implemented and CheckpointError for malformed values. Each names the
    field, its value and what is allowed.
    """
    architecture, family = family_of(raw.get("architectures"))
    neutral = {"model_type": (None, family.model_type)} | NEUTRAL | dict(family.neutral)
    for field, values in neutral.items():
        if family.experts is not None and _counts(field, family.experts):
            continue
        if field == "partial_rotary_factor" and family.partial_rotary:
            continue
        if field in _VARIED and family.varied_layers:
            continue
        if field == "attention_chunk_size" and family.windows == "chunks":
            continue
        if raw.get(field) not in values:
            raise unsupported(field, raw[field], " or ".join(map(repr, values)))
    if raw.get(family.act_field, family.activation) != family.activation:
        raise unsupported(family.act_field, raw[family.act_field], repr(family.activation))
    num_layers = size(raw, "num_hidden_layers")

    hidden, heads = size(raw, "hidden_size"), size(raw, "num_attention_heads")
    default = heads if family.kv_heads_default else family.num_key_value_heads
    if default is not None and "num_key_value_heads" in raw:
        default = heads  # null: one KV head for each query head
    kv_heads = size(raw, "num_key_value_heads", default)
    if heads % kv_heads:
        raise malformed("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    attention_bias = flag(raw, "attention_bias", allowed=family.has_attention_bias, default=family.attention_bias)
    vocab = size(raw, "vocab_size")
    max_positions = size(raw, "max_position_embeddings")
    head_dim = _head_dim(raw, family, hidden, heads)
    factor = _rotary_factor(raw, family.rotary_factor) if family.partial_rotary else 1.0
    delta = parse_delta_net(raw, num_layers, by_key_head=family.fused_delta_net) if family.delta_net else None
    conv = parse_short_conv(raw, num_layers, hidden) if family.short_conv else None
    experts = None if family.experts is None else parse_experts(raw, family.experts, num_layers)
    # Where every layer has experts, a file need not have the size of an MLP.
    only_experts = experts is not None and all(experts.layers) and not experts.parallel_mlp
    no_mlp = experts.intermediate_size if experts is not None and only_experts else None
    if family.has_states:
        raw = {field: value for field, value in raw.items() if field != "layer_types"}
    if family.rope_sections:
        raw = {**raw} | {
            name: _without_sections(raw[name]) for name in ("rope_parameters", "rope_scaling") if name in raw
        }
    kinds = tuple(kind for kind in family.rope_kinds if kind in rope_kinds)
    original = _original(raw)
    if original is None and family.original_positions is not None:
        original = family.original_positions
        raw = {**raw, "original_max_position_embeddings": original}
    if family.rope_default and raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw = {**raw, "rope_parameters": dict(family.rope_default)}
    raw, beta = parse_beta(raw) if family.query_scaling else (raw, 0.0)
    facts = RopeFacts(max_positions, family.rope_theta, _rotary_dim(head_dim, factor), original, kinds)
    (theta, scaling), ropes, windows = parse_layers(raw, family, num_layers, facts, factor)
    own = family.intermediate_size if no_mlp is None else no_mlp
    adjusted = family.short_conv and family.experts is None
    intermediate = parse_intermediate_size(raw) if adjusted else size(raw, family.intermediate_field, own)
    tie = "tie_embedding" if family.short_conv and "tie_embedding" in raw else "tie_word_embeddings"
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(raw, family.eps_field, default=family.rms_norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        tie_word_embeddings=flag(raw, tie, default=family.tied),
        has_lm_head=True,
        qk_norm=family.qk_norm is not None,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=flag(raw, "attention_out_bias") if family.attention_out_bias else attention_bias,
        mlp_bias=flag(raw, "mlp_bias", allowed=family.has_mlp_bias),
        checkpoint_dtype=_checkpoint_dtype(raw),
        eos_token_ids=stop_ids(raw, generation or {}, vocab),
        mask_token_id=mask_token_id(raw),
        windows=windows,
        chunked=bool(windows) and family.windows == "chunks",
        ropes=ropes,
        interleaved_rope=family.interleaved_rope,
        rotated_norm=family.rotated_norm and flag(raw, "use_qk_norm", default=True),
        partial_rotary_dim=None if facts.rotary_dim == head_dim else facts.rotary_dim,
        qk_norm_whole=family.qk_norm == "whole",
        norms=family.norms,
        norm_offset=family.norm_offset,
        activation=family.activation,
        fused_projections=family.fused_projections,
        sinks=family.sinks,
        experts=experts,
        delta=delta,
        conv=conv,
        output_gate=family.output_gate,
        query_scaling=parse_unrotated(raw) if family.unrotated_scaling else _query_scaling(beta, scaling),
        **_multipliers(raw, family, hidden),
        **_varied(raw, family, num_layers, max_positions, LayerSizes(head_dim, kv_heads, intermediate)),
    )


_VARIED = ("per_layer_config", "num_kv_shared_layers")
"""Fields that only families with `varied_layers` read."""


def _varied(
    raw: Mapping[str, Any], family: Family, num_layers: int, max_positions: int, plain: LayerSizes
) -> dict[str, Any]:
    """Return the fields of ModelConfig for a family with `varied_layers`."""
    if not family.varied_layers:
        return {}
    kinds = layer_kinds(raw, family, num_layers, max_positions)
    return {
        "varied": parse_layer_sizes(raw, kinds, size(raw, "num_attention_heads"), plain),
        "layer_embedding": parse_layer_embedding(raw, size(raw, "vocab_size")),
        "layer_scalars": True,
        "value_norm": True,
        "attention_multiplier": 1.0,
        "final_logit_softcapping": optional_number(raw, "final_logit_softcapping"),
    }


def _counts(field: str, fields: ExpertFields) -> bool:
    """Return whether a family with experts reads `field`, which is without effect in others."""
    return field in EXPERT_COUNTS or (field == SHARED_SIZE and fields.shared_intermediate_size is not None)


def _multipliers(raw: Mapping[str, Any], family: Family, hidden: int) -> dict[str, Any]:
    """Return the fields of ModelConfig that multiply embeddings, residuals and scores, or divide logits."""
    made: dict[str, Any] = {}
    if family.multipliers:
        fields = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
        made |= {field: number(raw, field, default=1.0) for field in fields}
    if family.scaled_embedding:
        made["embedding_multiplier"] = hidden**0.5
    if family.query_pre_attn_scalar is not None:
        made["attention_multiplier"] = size(raw, "query_pre_attn_scalar", family.query_pre_attn_scalar) ** -0.5
    return made


def _query_scaling(beta: float, scaling: Scaling | None) -> QueryScaling | None:
    """Return the query scaling of a model with this field and RoPE scaling; None if all its factors are 1."""
    if beta == 0:
        return None
    assert isinstance(scaling, YarnScaling), "such a family has no other kind of RoPE"
    return QueryScaling(beta, scaling.original_max_position_embeddings)


def _without_sections(rope: object) -> object:
    """Return a RoPE object without the fields that say which features turn by the positions of images. For text all
    kinds of positions are the same."""
    if not isinstance(rope, Mapping):
        return rope
    return {field: value for field, value in rope.items() if field not in ("mrope_section", "mrope_interleaved")}


def _rotary_factor(raw: Mapping[str, Any], default: float) -> float:
    """Return the share of a head's features that RoPE rotates. The RoPE object's value wins over the top-level
    field."""
    factor = None
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name)
        if factor is None and isinstance(rope, Mapping):
            factor = optional_number(rope, "partial_rotary_factor")
    if factor is None:
        factor = number(raw, "partial_rotary_factor", default=default)
    if factor > 1:
        raise malformed("partial_rotary_factor", factor, "at most 1")
    return factor


def _rotary_dim(head_dim: int, factor: float) -> int:
    dim = int(head_dim * factor)
    if dim < 2 or dim % 2:
        raise malformed("partial_rotary_factor", factor, f"so that an even number of head_dim={head_dim} is rotated")
    return dim


def _original(raw: Mapping[str, Any]) -> int | None:
    length = raw.get("original_max_position_embeddings")
    return None if length is None else size(raw, "original_max_position_embeddings")


def _head_dim(raw: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is not None:
        head_dim = size(raw, "head_dim")
    elif family.head_dim is not None:
        head_dim = family.head_dim
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise malformed("hidden_size", hidden, f"a multiple of num_attention_heads={heads} where head_dim is missing")
    if head_dim % 2:
        raise malformed("head_dim", head_dim, "even, because RoPE rotates pairs")
    return head_dim


def stop_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """Return the token ids that end a text: from generation_config.json if it names any, else from config.json. Raises
    CheckpointError for ids outside the vocabulary."""
    for source, file in ((generation, "generation_config.json"), (raw, "config.json")):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < vocab for i in ids):
            allowed = f"an id or a list of ids from 0 to vocab_size - 1 = {vocab - 1}"
            raise malformed("eos_token_id", value, allowed, file=file)
        return tuple(dict.fromkeys(ids))
    return ()


MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Fields that may name the mask token of parallel drafting. The first that is present counts, as in vLLM."""


def mask_token_id(raw: Mapping[str, Any]) -> int | None:
    """Return the mask token of a draft model for parallel drafting; None if it has none. Raises CheckpointError if the
    field is no token id."""
    vocab = size(raw, "vocab_size")
    for field in MASK_TOKEN_FIELDS:
        value = raw.get(field)
        if value is not None:
            if type(value) is not int or not 0 <= value < vocab:
                raise malformed(field, value, f"an id from 0 to vocab_size - 1 = {vocab - 1}")
            return value
    return None


def _checkpoint_dtype(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("dtype")
    if value is None:
        value = raw.get("torch_dtype")
    if value is None:
        return None
    if not isinstance(value, str):
        raise malformed("dtype", value, "a string")
    return value.removeprefix("torch.")

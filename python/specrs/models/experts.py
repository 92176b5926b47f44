"""Parser of the fields of config.json about experts, and the expected number of experts that a pass reads. Computes no
layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from specrs.models.errors import malformed
from specrs.models.registry import ExpertFields, Stacked
from specrs.models.values import flag, number, size

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Two names of the field for the number of experts in a layer."""
SHARED_SIZE = "shared_expert_intermediate_size"
"""Field for the intermediate size of an expert that every row uses."""


SUM_EPS = 1e-6
"""Number added to a sum of sigmoids before weights are divided by it, as in transformers."""


class ClampedSwiglu(NamedTuple):
    """Parameters of the clamped SwiGLU activation (gpt-oss), `kernels.activation.clamped_swiglu`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes and rules of layers with `count` experts. Each row uses the `per_token` experts with the largest router
    logits.

    Their outputs are added with weights: the softmax of the router's logits over all experts, in fp32 (Fedus et al.
    2021, eq. 1), or the sigmoids of the chosen logits. With `biased_choice`, each row uses the experts with the largest
    sums of sigmoid and a bias.
    """

    count: int
    per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    """True if the weights of the chosen experts are divided by their sum."""
    layers: tuple[bool, ...]
    """For each layer, True if it has experts; False: it has an MLP."""
    block: str
    """Beginning of the tensor names of router and experts within a layer, such as `mlp.`."""
    projections: tuple[str, str, str]
    """Names of the gate, up and down projection of an expert."""
    router: str = "gate"
    """Name of the router."""
    biases: bool = False
    """True if router and experts have biases."""
    softmax_of_chosen: bool = False
    """True if weights are the softmax of the chosen logits only."""
    sigmoids: bool = False
    """True if weights are sigmoids of the chosen logits. Then `norm_topk_prob` divides by their sum plus `SUM_EPS`."""
    biased_choice: bool = False
    """True if a bias of each expert is added to its sigmoid for the choice, and not to its weight."""
    factor: float = 1.0
    """Factor of all weights, after `norm_topk_prob`."""
    weighs_input: bool = False
    """True if weights multiply the experts' inputs. False: they multiply the experts' outputs."""
    stacked: Stacked | None = None
    """Layout of tensors that hold all experts of a layer, as in `ExpertFields`. None: each expert has its own."""
    shared: int | None = None
    """Intermediate size of an expert that every row uses in addition. None: there is none."""
    shared_gate: bool = True
    """True if the output of the expert that every row uses is multiplied by the sigmoid of a gate. False: it is added
    as it is."""
    swiglu: ClampedSwiglu | None = None
    """Parameters of the experts' clamped SwiGLU. None: experts use the model's activation."""
    parallel_mlp: bool = False
    """True if layers have an MLP as well as experts, as in `ExpertFields`."""
    scaled_router: bool = False
    """True if a router's input and the weights of chosen experts are scaled, as in `ExpertFields`."""

    def expected(self, rows: int) -> float:
        """Return the expected number of different experts of a layer that `rows` rows use.

        Assumes that rows choose independently and all choices are equally likely: `E (1 - (1 - k / E)^rows)` for E
        experts and k per row. Verifying K + 1 rows therefore reads more weights than a pass over one row. Rows of one
        text choose alike and use fewer experts than this.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


def parse_experts(raw: Mapping[str, Any], fields: ExpertFields, num_layers: int) -> Experts | None:
    """Return the experts that config.json describes; None if the model has none. Raises CheckpointError, which names
    field and value."""
    if fields.enabled is not None and not flag(raw, fields.enabled):
        return None
    layers = _listed(raw, num_layers) if fields.listed_layers else (True,) * num_layers
    if fields.first_dense is not None:
        layers = _after_dense(raw, fields.first_dense, num_layers)
    if not any(layers):
        return None
    given = [name for name in EXPERT_COUNTS if raw.get(name) is not None]
    if len(given) == 2 and raw[given[0]] != raw[given[1]]:
        raise malformed(given[1], raw[given[1]], f"{given[0]}={raw[given[0]]}")
    count = size(raw, given[0] if given else fields.count, fields.default_count)
    per_token = size(raw, fields.per_tok, fields.default_per_tok)
    if per_token > count:
        raise malformed(fields.per_tok, per_token, f"at most {fields.count}={count}")
    if raw.get("experts_per_token") not in (None, per_token):
        raise malformed("experts_per_token", raw["experts_per_token"], f"{fields.per_tok}={per_token}")
    shared = fields.shared_intermediate_size
    if fields.dense_layers:
        every, dense = size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers")
        dense = [] if dense is None else dense
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            raise malformed("mlp_only_layers", dense, "a list of layers")
        layers = tuple(i not in dense and (i + 1) % every == 0 for i in range(num_layers))
    intermediate = size(raw, fields.intermediate_size, fields.default_intermediate_size)
    own_size = None if shared is None else size(raw, SHARED_SIZE, shared)
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=intermediate,
        norm_topk_prob=fields.norm_topk_prob or flag(raw, "norm_topk_prob", default=fields.default_norm_topk_prob),
        layers=layers,
        block=fields.block,
        projections=fields.projections,
        router=fields.router,
        biases=fields.biases,
        softmax_of_chosen=fields.softmax_of_chosen,
        sigmoids=fields.sigmoids,
        biased_choice=fields.biased_choice and flag(raw, "use_expert_bias", default=True),
        factor=number(raw, "routed_scaling_factor", 1.0) if fields.biased_choice else 1.0,
        weighs_input=fields.weighs_input,
        stacked=fields.stacked,
        shared=intermediate if fields.plain_shared else own_size,
        shared_gate=not fields.plain_shared,
        swiglu=_swiglu(raw) if fields.clamped else None,
        parallel_mlp=fields.parallel_mlp,
        scaled_router=fields.scaled_router,
    )


def _listed(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts: those in `moe_layers`, or every `interleave_moe_layer_step`-th."""
    given = raw.get("moe_layers")
    if given is None:
        every = size(raw, "interleave_moe_layer_step", 1)
        return tuple((i + 1) % every == 0 for i in range(num_layers))
    if not isinstance(given, list) or any(type(layer) is not int for layer in given):
        raise malformed("moe_layers", given, "a list of layers")
    return tuple(i in given for i in range(num_layers))


def _after_dense(raw: Mapping[str, Any], default: int, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts: all but the first `num_dense_layers`."""
    dense = raw.get("num_dense_layers", default)
    if type(dense) is not int or dense < 0:
        raise malformed("num_dense_layers", dense, "a number of layers")
    return tuple(i >= dense for i in range(num_layers))


def _swiglu(raw: Mapping[str, Any]) -> ClampedSwiglu:
    return ClampedSwiglu(number(raw, "swiglu_alpha", 1.702), number(raw, "swiglu_limit", 7.0))

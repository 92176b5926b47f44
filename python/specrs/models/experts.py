"""Parser of the fields of config.json about experts, and the expected number of experts that a pass reads. Computes no
layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from specrs.models.errors import malformed
from specrs.models.registry import ExpertFields
from specrs.models.values import flag, number, size

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Two names of the field for the number of experts in a layer."""
SHARED_SIZE = "shared_expert_intermediate_size"
"""Field for the intermediate size of an expert that every row uses."""


class ClampedSwiglu(NamedTuple):
    """Parameters of the clamped SwiGLU activation (gpt-oss), `kernels.activation.clamped_swiglu`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes and rules of layers with `count` experts. Each row uses the `per_token` experts with the largest router
    logits.

    Their outputs are added with weights: the softmax of the router's logits over all experts, in fp32 (Fedus et al.
    2021, eq. 1).
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
    stacked: Literal["alternating", "halves"] | None = None
    """Layout of tensors that hold all experts of a layer, as in `ExpertFields`. None: each expert has its own."""
    shared: int | None = None
    """Intermediate size of an expert that every row uses in addition. Its output is multiplied by the sigmoid of a
    gate. None: there is none."""
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
    layers = (True,) * num_layers
    if fields.dense_layers:
        every, dense = size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers")
        dense = [] if dense is None else dense
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            raise malformed("mlp_only_layers", dense, "a list of layers")
        layers = tuple(i not in dense and (i + 1) % every == 0 for i in range(num_layers))
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=size(raw, fields.intermediate_size, fields.default_intermediate_size),
        norm_topk_prob=fields.norm_topk_prob or flag(raw, "norm_topk_prob", default=fields.default_norm_topk_prob),
        layers=layers,
        block=fields.block,
        projections=fields.projections,
        router=fields.router,
        biases=fields.biases,
        softmax_of_chosen=fields.softmax_of_chosen,
        stacked=fields.stacked,
        shared=None if shared is None else size(raw, SHARED_SIZE, shared),
        swiglu=_swiglu(raw) if fields.clamped else None,
        parallel_mlp=fields.parallel_mlp,
        scaled_router=fields.scaled_router,
    )


def _swiglu(raw: Mapping[str, Any]) -> ClampedSwiglu:
    return ClampedSwiglu(number(raw, "swiglu_alpha", 1.702), number(raw, "swiglu_limit", 7.0))

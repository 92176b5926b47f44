"""What config.json says of experts, and how many of them a pass reads. Computes no layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from specrs.models.errors import malformed
from specrs.models.registry import ExpertFields
from specrs.models.values import flag, number, size

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Names of one field."""


class ClampedSwiglu(NamedTuple):
    """See `kernels.activation.clamped_swiglu`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers whose MLP is one of `count` for each row: the `per_token` of the largest router logits, added by weight.

    The weights are the softmax of the router's logits over all experts, in fp32 (Fedus et al. 2021, eq. 1).
    """

    count: int
    per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    """Weights of the chosen ones are divided by their sum."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; others have an MLP."""
    block: str
    """See `ExpertFields`; like what follows."""
    projections: tuple[str, str, str]
    router: str = "gate"
    biases: bool = False
    softmax_of_chosen: bool = False
    stacked: bool = False
    swiglu: ClampedSwiglu | None = None
    """The activation of experts; None: the model's."""

    def expected(self, rows: int) -> float:
        """Different experts of a layer that `rows` rows are sent to, expected where every choice is as likely as any
        other and rows choose on their own: `E (1 - (1 - k / E)^rows)` of E experts, k for each row.

        So a verification of K + 1 rows reads more weights than a pass of one. Rows of one text choose alike, and read
        fewer than this.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


def parse_experts(raw: Mapping[str, Any], fields: ExpertFields, num_layers: int) -> Experts:
    """Raises CheckpointError by field and value."""
    given = [name for name in EXPERT_COUNTS if raw.get(name) is not None]
    if len(given) == 2 and raw[given[0]] != raw[given[1]]:
        raise malformed(given[1], raw[given[1]], f"{given[0]}={raw[given[0]]}")
    count = size(raw, given[0] if given else fields.count, fields.default_count)
    per_token = size(raw, "num_experts_per_tok", fields.default_per_tok)
    if per_token > count:
        raise malformed("num_experts_per_tok", per_token, f"at most {fields.count}={count}")
    if raw.get("experts_per_token") not in (None, per_token):
        raise malformed("experts_per_token", raw["experts_per_token"], f"num_experts_per_tok={per_token}")
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
        norm_topk_prob=fields.norm_topk_prob or flag(raw, "norm_topk_prob"),
        layers=layers,
        block=fields.block,
        projections=fields.projections,
        router=fields.router,
        biases=fields.biases,
        softmax_of_chosen=fields.softmax_of_chosen,
        stacked=fields.stacked,
        swiglu=_swiglu(raw) if fields.clamped else None,
    )


def _swiglu(raw: Mapping[str, Any]) -> ClampedSwiglu:
    return ClampedSwiglu(number(raw, "swiglu_alpha", 1.702), number(raw, "swiglu_limit", 7.0))

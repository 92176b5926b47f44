"""Ranges in the OpenAPI document equal those in which `SamplingParams` accepts values."""

import math
from typing import Any

import pytest
from specrs.errors import InvalidRequestError
from specrs.options import Integer, Number, options_of
from specrs.sampling import SamplingParams
from specrs.server.openapi import openapi
from specrs.server.ranges import MAX_INTEGER, ranged

SCHEMAS = openapi("0", [])["components"]["schemas"]
BODIES = ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest", "MessagesRequest")
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
"""Sampling parameter that each field of a body sets, if the names differ."""
NOT_RANGED = {
    ("ChatCompletionRequest", "logprobs"): "a switch",
    ("ResponsesRequest", "top_logprobs"): "rejected",
    ("MessagesRequest", "max_tokens"): "required, so that it has no branch for null",
}
LEAST = {("CompletionRequest", "max_tokens"): 0}
"""Minimum values that differ from the parameter's: 0 echoes the prompt."""
RANGED = [
    (body, field)
    for body in BODIES
    for field in SCHEMAS[body]["properties"]
    if (one := options_of(SamplingParams).get(OTHER_NAMES.get(field, field))) is not None
    and isinstance(one.values, Integer | Number)
    and (body, field) not in NOT_RANGED
]


def schema(body: str, field: str) -> dict[str, Any]:
    """Return the branch of the field's schema that is not null."""
    (found,) = [one for one in SCHEMAS[body]["properties"][field]["anyOf"] if one["type"] != "null"]
    return dict(found)


def accepts(field: str, value: float) -> bool:
    try:
        SamplingParams(
            **{OTHER_NAMES.get(field, field): value}, **({"max_tokens": None} if field == "min_tokens" else {})
        )
    except InvalidRequestError:
        return False
    return True


def test_fields_with_a_range_are_found() -> None:
    assert len(RANGED) > 25


@pytest.mark.parametrize(("body", "field"), RANGED)
def test_a_body_has_the_range_of_the_parameter(body: str, field: str) -> None:
    found = schema(body, field)
    whole = found["type"] == "integer"
    low, high = found.get("minimum"), found.get("maximum")
    assert "exclusiveMaximum" not in found
    if (open_low := found.get("exclusiveMinimum")) is not None:
        assert not accepts(field, open_low)
        assert accepts(field, math.nextafter(open_low, math.inf))
    elif (body, field) in LEAST:
        assert low == LEAST[body, field]
    else:
        assert low is not None
        assert accepts(field, low)
        assert not accepts(field, low - 1 if whole else math.nextafter(low, -math.inf))
    assert high is not None
    assert accepts(field, high)
    if not (whole and high == MAX_INTEGER):  # 32 bits are the bound where the parameter has none
        assert not accepts(field, high + 1 if whole else math.nextafter(high, math.inf))


def test_what_has_no_range_is_no_ranged_field() -> None:
    with pytest.raises(TypeError, match=r"^stop: "):
        ranged("stop")

"""StructuredOutputsParams: which values are read, and errors with field, value and what is allowed."""

import json
import subprocess
import sys
from typing import Any

import pytest
from specrs.errors import InvalidRequestError, UnsupportedRequestError
from specrs.structured import StructuredOutputsParams
from specrs.structured.params import MAX_CHOICES, MAX_SPECIFICATION_LENGTH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "^structured_outputs: nothing given; exactly one of json, regex, choice, grammar, json_object is allowed"),
        ({"json_object": False}, "^structured_outputs: nothing given"),
        ({"regex": "a", "json": "{}"}, "^structured_outputs: json and regex given; exactly one of"),
        ({"regex": ""}, r"^structured_outputs\.regex='': must be a string that is not empty"),
        ({"regex": 3}, r"^structured_outputs\.regex=3: must be a string"),
        ({"regex": "a\ud800"}, r"^structured_outputs\.regex: a lone surrogate at 1 is no character"),
        ({"grammar": ["a"]}, r"^structured_outputs\.grammar=\['a'\]: must be a string"),
        ({"json": 3}, r"^structured_outputs\.json=3: must be a string .* or a dictionary"),
        ({"json": {"a": float("nan")}}, r"^structured_outputs\.json=\{'a': nan\}: .*is no JSON"),
        ({"json": {"a": {1, 2}}}, r"^structured_outputs\.json=.*is no JSON"),
        ({"json_object": 1}, r"^structured_outputs\.json_object=1: must be True or False"),
        ({"choice": "ab"}, r"^structured_outputs\.choice='ab': must be a list of strings"),
        ({"choice": []}, r"^structured_outputs\.choice: 0 strings; must be from 1 to"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, r"^structured_outputs\.choice: 20001 strings; must be from 1 to 20000"),
        ({"choice": ["a", 3]}, r"^structured_outputs\.choice\[1\]=3: must be a string"),
        ({"choice": ["a", ""]}, r"^structured_outputs\.choice\[1\]='': must be a string that is not empty"),
        ({"choice": ["a" * 10**6, "b"]}, r"^structured_outputs\.choice: 1000001 characters; must be at most"),
        ({"regex": "a" * (MAX_SPECIFICATION_LENGTH + 1)}, r"^structured_outputs\.regex: 1000001 characters; must be"),
        ({"regex": "a", "disable_any_whitespace": True}, r"^structured_outputs\.disable_any_whitespace=True: is for"),
        ({"regex": "a", "whitespace_pattern": " "}, r"^structured_outputs\.whitespace_pattern=' ': is for json"),
        ({"json": "{}", "disable_any_whitespace": 1}, r"^structured_outputs\.disable_any_whitespace=1: must be True"),
        ({"json": "{}", "whitespace_pattern": ""}, r"^structured_outputs\.whitespace_pattern='': must be a string"),
        (
            {"json": "{}", "whitespace_pattern": " ", "disable_any_whitespace": True},
            r"^structured_outputs\.whitespace_pattern=' ': must be None with disable_any_whitespace=True",
        ),
    ],
)
def test_wrong_values_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutputsParams(**fields)


def test_what_vllm_has_and_specrs_has_not_is_rejected() -> None:
    with pytest.raises(UnsupportedRequestError, match=r"^structured_outputs\.structural_tag='\{\}': not implemented"):
        StructuredOutputsParams(structural_tag="{}")


def test_a_request_s_body_is_read() -> None:
    # clients spell out defaults
    body = {"regex": "a+", "json": None, "json_object": False, "disable_any_whitespace": False, "structural_tag": None}
    assert StructuredOutputsParams.from_mapping(body) == StructuredOutputsParams(regex="a+", json_object=False)
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: unknown key 'regexp'; did you mean regex"):
        StructuredOutputsParams.from_mapping({"regexp": "a"})


def test_a_schema_that_changes_later_changes_no_request() -> None:
    schema = {"type": "object"}
    params = StructuredOutputsParams(json=schema)
    schema["type"] = "array"
    assert json.loads(str(params.json)) == {"type": "object"}
    assert params == StructuredOutputsParams(json='{"type": "object"}')
    assert hash(params) == hash(StructuredOutputsParams(json={"type": "object"}))
    assert params.specification() != StructuredOutputsParams(json=schema).specification()


def test_importing_the_parameters_imports_nothing_heavy() -> None:
    code = "import sys, specrs.structured; print({'torch', 'llguidance', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n", done.stderr

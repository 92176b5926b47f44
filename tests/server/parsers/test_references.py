"""Schemas of single arguments mean what they meant inside the parameters, as jsonschema decides."""

from typing import Any

import jsonschema
import pytest
from specrs.server.parsers.alternatives import types_of
from specrs.server.parsers.references import property_schema, target

ROOT: dict[str, Any] = {
    "$id": "https://example.com/a/root.json",
    "type": "object",
    "properties": {
        "plain": {"type": "integer"},
        "pointer": {"$ref": "#/$defs/size"},
        "anchor": {"items": {"$ref": "#small"}, "type": "array"},
        "whole": {"$ref": "#"},
        "absolute": {"$ref": "https://example.com/a/root.json#/$defs/size"},
        "relative": {"$ref": "root.json#small"},
        "other": {"$ref": "part.json"},
        "inside": {"$ref": "part.json#/$defs/size"},
        "nested": {"$ref": "part.json#small"},
        "a b/~%": {"$ref": "#/properties/a%20b~1~0%25x"},
        "a b/~%x": {"const": 3},
        "data": {"anyOf": [{"const": {"$ref": "#/x"}}, {"$ref": "#small"}]},
        "$ref": {"$ref": "#/properties/plain"},
        "yes": True,
        "no": False,
    },
    "required": ["plain"],
    "$defs": {
        "size": {"type": "integer", "minimum": 5},
        "small": {"$anchor": "small", "enum": ["s"]},
        "part": {
            "$id": "part.json",
            "type": "object",
            "properties": {"size": {"$ref": "#/$defs/size"}, "out": {"$ref": "root.json#/$defs/size"}},
            "$defs": {"size": {"type": "string"}, "deep": {"$anchor": "small", "type": "null"}},
        },
    },
}
VALUES: list[Any] = [
    1,
    7,
    3,
    "s",
    "x",
    None,
    ["s"],
    ["x"],
    {"plain": 1},
    {},
    {"$ref": "#/x"},
    {"size": 1},
    {"size": "a"},
]
VALUES += [{"out": 3}, {"out": 9}, {"plain": 1, "whole": {}}, {"plain": 1, "whole": {"plain": 2}}]


def valid(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("base", ["https://example.com/a/root.json", "root.json", None])
@pytest.mark.parametrize("name", ROOT["properties"])
def test_a_property_means_what_it_meant(name: str, base: str | None) -> None:
    if base != ROOT["$id"] and name == "absolute":
        return
    if base is None and name not in ("plain", "pointer", "anchor", "whole", "a b/~%", "data", "$ref", "yes", "no"):
        return  # their references need an address
    root = {key: value for key, value in ROOT.items() if key != "$id"} | ({} if base is None else {"$id": base})
    if base is None:
        root["$defs"] = {key: value for key, value in ROOT["$defs"].items() if key != "part"}
        root["properties"] = {key: value for key, value in ROOT["properties"].items() if "json" not in str(value)}
    alone = property_schema(root, name)
    assert "$id" not in str(alone)
    # inside the parameters, where its references expect it
    assert [valid(alone, value) for value in VALUES] == [valid(root, {"plain": 1, name: value}) for value in VALUES]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("plain", {"integer"}),
        ("pointer", {"integer"}),
        ("whole", {"object"}),
        ("nested", {"null"}),
        ("inside", {"string"}),
    ],
)
def test_types_are_found_through_references(name: str, kinds: set[str]) -> None:
    schema = property_schema(ROOT, name)
    assert types_of(schema, schema) == kinds


def test_references_that_lead_nowhere_or_in_circles_end() -> None:
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert types_of(loop, loop) == set()
    tree = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}
    assert types_of(tree, tree) == {"null"}
    for reference in ("#/$defs/none", "#nowhere", "https://example.com/x", "#/$defs/a/9/9"):
        root = {"type": "object", "properties": {"p": {"$ref": reference}}, "$defs": {"a": [1]}}
        assert target(property_schema(root, "p")["$ref"], root) in (None, root, [1])


@pytest.mark.parametrize(
    "bad", [{"$id": "http://[bad"}, {"$id": "https://a", "properties": {"a": {"$ref": "//[b"}}}], ids=str
)
def test_a_property_of_a_schema_with_a_bad_address_is_a_value_error(bad: dict[str, Any]) -> None:
    properties = {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}, **bad.get("properties", {})}
    with pytest.raises(ValueError, match="IPv6"):
        property_schema({"type": "object", **bad, "properties": properties}, "a")


@pytest.mark.parametrize("kinds", [5, {}, None, [5], True])
def test_a_malformed_type_names_no_types(kinds: Any) -> None:
    assert types_of({"type": kinds}, {}) == set()


def test_an_index_of_many_digits_leads_nowhere() -> None:
    assert target("#/$defs/" + "9" * 5000, {"$defs": [1]}) is None

"""Declared options: checks and help texts follow from the declaration, and state what the code does."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.config import EngineConfig
from specrs.drafters import methods_of
from specrs.errors import InvalidConfigError, UnsupportedConfigError
from specrs.kv_events_config import KVEventsConfig
from specrs.options import (
    Checked,
    Choice,
    Integer,
    ListOf,
    Number,
    Switch,
    Text,
    Values,
    check_options,
    option,
    options_of,
)
from specrs.sampling import SamplingParams
from specrs.server.limits import HTTPLimits
from specrs.server.options import ServerOptions
from specrs.speculative_config import SpeculativeConfig

OWNERS = (EngineConfig, SpeculativeConfig, KVEventsConfig, SamplingParams, ServerOptions, HTTPLimits)
EVERY = [pytest.param(owner, name, id=f"{owner.__name__}.{name}") for owner in OWNERS for name in options_of(owner)]


@dataclass(frozen=True, kw_only=True)
class Toy:
    count: int = option(3, Integer(1, 8), "number of things", note="8: all", commands=("serve",))
    size: int | None = option(None, Integer(16, units=True, power_of_two=True), "bytes", default_is="what fits")
    drafts: int | str = option("auto", Integer(0, 4, word="auto"), "drafts")
    share: float = option(0.5, Number(0.0, 1.0, open_low=True), "share")
    kind: str = option("a", Choice(("a", "b"), {"B": "b"}), "kind", flag_name="toy-kind")
    kinds: str | None = option(None, Choice(("a",), unsupported=True), "kinds", default_is="none")
    on: bool = option(True, Switch(), "whether")
    path: str | None = option(None, Text("a folder"), "folder", default_is="none")
    sizes: tuple[int, ...] | None = option(None, ListOf(Integer(1), "sizes"), "sizes", default_is="none")

    def __post_init__(self) -> None:
        check_options(self, InvalidConfigError, "toy.")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("count", 0, "toy.count=0: must be an integer from 1 to 8"),
        ("count", None, "toy.count=None: must be an integer from 1 to 8"),
        ("count", True, "toy.count=True: must be an integer from 1 to 8"),
        ("size", 8, "toy.size=8: must be an integer of at least 16, or None"),
        ("size", 24, "toy.size=24: must be a power of two of at least 16, or None"),
        ("drafts", "best", "toy.drafts='best': must be an integer from 0 to 4, or 'auto'"),
        ("share", 0, "toy.share=0: must be a finite number greater than 0 and at most 1"),
        ("share", math.nan, "toy.share=nan: must be a finite number greater than 0 and at most 1"),
        ("kind", "c", "toy.kind='c': must be one of a, b"),
        ("on", 1, "toy.on=1: must be True or False"),
        ("path", "", "toy.path='': must be a string that is not empty: a folder, or None"),
        ("sizes", [], "toy.sizes=[]: must be a list of sizes, or None"),
        ("sizes", [1, 0], "toy.sizes[1]=0: must be an integer of at least 1"),
    ],
)
def test_wrong_values_name_field_value_and_what_is_allowed(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        Toy(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_values_of_other_programs_are_not_implemented() -> None:
    with pytest.raises(UnsupportedConfigError, match=r"^toy.kinds='z': not implemented; allowed: None, 'a'$"):
        Toy(kinds="z")


def test_values_are_stored_in_one_form() -> None:
    toy = Toy(kind="B", path=Path("x"), sizes=[1, 2], share=1, size=32, drafts=2)  # type: ignore[arg-type]
    assert (toy.kind, toy.path, toy.sizes, toy.share, toy.size, toy.drafts) == ("b", "x", (1, 2), 1.0, 32, 2)
    assert type(toy.share) is float


def test_help_texts() -> None:
    texts = {name: declared.help_text() for name, declared in options_of(Toy).items()}
    assert texts == {
        "count": "number of things, 1 to 8; 8: all; default: 3",
        "size": "bytes, a power of two, at least 16; default: what fits",
        "drafts": "drafts, 0 to 4, or auto; default: auto",
        "share": "share, above 0, at most 1; default: 0.5",
        "kind": "kind: one of a, b; default: a",
        "kinds": "kinds: one of a; default: none",
        "on": "whether; default: on",
        "path": "folder; default: none",
        "sizes": "sizes, each at least 1; default: none",
    }
    assert options_of(Toy)["kind"].flag == "--toy-kind"
    assert options_of(Toy)["count"].help_text(stated="the server's") == "number of things, 1 to 8; 8: all; default: " \
        "the server's"  # fmt: skip


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-30, 30))
def test_integers_are_checked_against_their_range(low: int, high: int, value: int) -> None:
    values = Integer(low, high)
    if low <= value <= high:
        assert values.check(InvalidConfigError, "x", value) == value
    else:
        with pytest.raises(InvalidConfigError):
            values.check(InvalidConfigError, "x", value)
    assert values.allowed() == f"{low} to {high}"


def test_large_bounds_are_powers() -> None:
    assert Integer(-(2**63), 2**63 - 1).allowed() == "-2^63 to 2^63 - 1"
    assert Integer(0, 1 << 24).allowed() == "0 to 2^24"
    assert Integer(1, 65536).allowed() == "1 to 65536"


@pytest.mark.parametrize("owner", OWNERS)
def test_every_field_is_an_option(owner: type) -> None:
    """Fields without a declaration would have no check, no flag and no row in the docs."""
    assert {field.name for field in dataclasses.fields(owner)} == options_of(owner).keys()


@pytest.mark.parametrize(("owner", "name"), EVERY)
def test_the_default_is_stated_and_allowed(owner: type, name: str) -> None:
    declared = options_of(owner)[name]
    default = declared.default
    (field,) = [one for one in dataclasses.fields(owner) if one.name == name]
    assert default is field.default
    assert declared.default_text, "default_is has to say what the default means"
    assert declared.help_text().endswith(f"; default: {declared.default_text}")
    if default is not None:
        kept = declared.check(InvalidConfigError, name, default)
        assert kept == default


def wrong(values: Values) -> list[Any]:
    """Values just outside those that are allowed."""
    match values:
        case Integer(low=low, high=high):
            return [low - 1, *([] if high is None else [high + 1])]
        case Number(low=low, high=high, open_low=open_low):
            below = low if open_low else math.nextafter(low, -math.inf)
            return [below, math.nan, *([] if math.isinf(high) else [math.nextafter(high, math.inf)])]
        case Choice() | Text():
            return ["no such name", 3] if isinstance(values, Choice) else [3]
        case Switch():
            return [1, "on"]
        case Checked():
            return []
        case _:
            return [object()]


@pytest.mark.parametrize(("owner", "name"), EVERY)
def test_the_dataclass_rejects_what_the_declaration_rejects(owner: type, name: str) -> None:
    """The check runs at construction, and its message begins with the name (or the flag) and the value."""
    declared = options_of(owner)[name]
    least: dict[str, Any] = {"num_speculative_tokens": 1} if owner is SpeculativeConfig else {}
    if owner is SpeculativeConfig and methods_of(name):
        least["method"] = methods_of(name)[0]
    for value in wrong(declared.values):
        with pytest.raises(ValueError, match=rf"^(?:\w+\.)?(?:{name}|{declared.flag})="):
            owner(**{**least, name: value})

"""Grammars of tool calls: what the model may write as a call, in the format of each parser. Parses nothing.

They are needed if a response format constrains the text, which is then calls or JSON of the format. These grammars are
stricter than the parsers, which accept mistakes of models.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specrs.server.parsers import deepseek_v3, gemma4, harmony, hermes, kimi_k2, llama3_json, mistral
from specrs.server.parsers.alternatives import alternatives, lengths_of, named_types, types_of, words_of
from specrs.server.parsers.base import Function
from specrs.server.parsers.deepseek_v3 import DeepSeekV3Parser, DeepSeekV31Parser
from specrs.server.parsers.glm45 import GLM45Parser
from specrs.server.parsers.kimi_k2 import KimiK2Parser
from specrs.server.parsers.marked_calls import Marks
from specrs.server.parsers.minimax_m2 import MiniMaxM2Parser
from specrs.server.parsers.pythonic import LFM2Parser, PythonicParser
from specrs.server.parsers.qwen3_coder import Qwen3CoderParser
from specrs.server.parsers.references import additional_schema, property_schema
from specrs.server.parsers.step3 import Step3Parser
from specrs.server.parsers.tagged_calls import Tags, is_json
from specrs.structured.schemas import subschemas

MAX_LENGTH_BOUND = 1000
"""Largest `minLength` and `maxLength` that are enforced for unquoted text. An automaton has to count the characters."""


@dataclass(slots=True)
class CallRules:
    """Rules of one grammar under construction, in llguidance's dialect of Lark. The rule `calls` is the start.

    `special`: id of each special token, by its text. `schemas`: the grammar's schemas as (field of the request,
    schema); the rule `schema_i` stands for item i. The caller may have added some.
    """

    functions: Sequence[Function]
    parallel: bool
    special: Callable[[str], int | None]
    schemas: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    openings: list[tuple[str, ...]] = field(default_factory=list)
    """Sequences of terminals that calls may begin with, with white space between them."""
    left_out: list[str] = field(default_factory=list)
    """Names of functions whose calls this format cannot write."""
    sources: list[Function] = field(default_factory=list)
    """Functions whose parameters the rules write one by one. Errors name these functions, not the parts."""
    malformed: set[str] = field(default_factory=set)
    """Fields of the request with a function of `sources` that has a keyword no rule could read. The compiler has to
    check its schema."""
    not_enforced: dict[str, set[str]] = field(default_factory=dict)
    """For each function's field in the request, the keywords of its parameters that the rules do not enforce."""
    _numbers: dict[int, int] = field(default_factory=dict)

    def mark(self, text: str) -> str:
        """Return the terminal for a mark of the format: a special token if the tokenizer has it, otherwise the text."""
        token_id = self.special(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def optional_mark(self, text: str) -> str:
        """Return the terminal for a mark that may be left out. Only models that have it as a special token write it."""
        return "" if self.special(text) is None else f"{self.mark(text)}?"

    def schema(self, place: str, schema: dict[str, Any]) -> str:
        """Add `schema`, from the request's field `place`, and return the name of its rule."""
        if id(schema) not in self._numbers:
            self._numbers[id(schema)] = len(self.schemas)
            self.schemas.append((place, schema))
        return f"schema_{self._numbers[id(schema)]}"

    def rule(self, name: str, *alternatives: str) -> str:
        """Add a rule and return its name."""
        self.lines.append(f"{name}: {' | '.join(alternatives)}")
        return name

    def several(self, name: str, one: str, separator: str = "") -> str:
        """Return a rule for one `one`, or for several with `separator` if the request allows parallel calls."""
        return self.rule(name, f"{one} ({separator} {one})*" if self.parallel else one)

    def json_calls(self, key: str) -> str | None:
        """Return the rule of a call `{"name": ..., key: {...}}`; None if there are no functions."""
        names = [
            " ".join(map(quoted, (quote(function.name), ",", quote(key), ":")))
            + " "
            + self.schema(function.place, function.parameters)
            for function in self.functions
        ]
        if not names:
            return None
        return self.rule("call_object", f'"{{" {quoted(quote("name"))} ":" ({" | ".join(names)}) "}}"')


def quote(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def quoted(text: str) -> str:
    """Return `text` as a Lark terminal."""
    return json.dumps(text)


def _hermes(rules: CallRules) -> None:
    call = rules.json_calls("arguments")
    if call is not None:
        rules.openings.append((hermes.OPEN,))
        rules.rule("call", f"{rules.mark(hermes.OPEN)} {call} {rules.mark(hermes.CLOSE)}")
        rules.several("calls", "call")


def _llama3_json(rules: CallRules) -> None:
    call = rules.json_calls("parameters")
    if call is not None:
        rules.openings += [
            ("{", '"name"', ":", quote(function.name), ",", '"parameters"') for function in rules.functions
        ]
        rules.openings.append((llama3_json.TAG,))
        rules.several("listed", call, '";"')
        rules.rule("calls", f"{rules.optional_mark(llama3_json.TAG)} listed")


def _mistral(rules: CallRules) -> None:
    tag = rules.mark(mistral.TAG)
    call = rules.json_calls("arguments")
    if call is None:
        return
    rules.openings.append((mistral.TAG,))
    rules.several("listed", call, '","')
    forms = [f'{tag} "[" listed "]"']
    arguments = rules.optional_mark(mistral.ARGS)
    named = [
        f"{quoted(function.name)} {arguments} {rules.schema(function.place, function.parameters)}"
        for function in rules.functions
        if _is_word(function.name) and not function.name.startswith(("[", "{"))
    ]
    if named:
        rules.rule("named", *(f"{tag} {call}" for call in named))
        forms.append(rules.several("all_named", "named"))
    rules.rule("calls", *forms)


def _pythonic(rules: CallRules) -> None:
    firsts = _python_calls(rules)
    if firsts:
        rules.openings += [("[", first) for first in firsts]
        rules.openings.append((PythonicParser.start,))
        start, end = rules.optional_mark(PythonicParser.start), rules.optional_mark(PythonicParser.end)
        rules.rule("calls", f'{start} "[" listed "]" {end}')


def _lfm2(rules: CallRules) -> None:
    if _python_calls(rules):
        rules.openings.append((LFM2Parser.start,))
        rules.rule("calls", f'{rules.mark(LFM2Parser.start)} "[" listed "]" {rules.mark(LFM2Parser.end)}')


def _python_calls(rules: CallRules) -> list[str]:
    """Add the rule `listed` for calls in a Python list. Return what each function's call begins with; nothing if no
    function has a call."""
    calls, firsts = [], []
    for number, function in enumerate(rules.functions):
        properties = _properties(rules, function)
        if properties is None:
            rules.left_out.append(function.name)
            continue
        names = [name for name, _, _ in properties if _is_identifier(name)]
        lost = [name for name, _, required in properties if required and name not in names]
        if not all(map(_is_identifier, function.name.split("."))) or lost:
            rules.left_out.append(function.name)
            continue
        # two rules for each place in the list: nothing is written yet, or a comma has to come
        last = len(names)
        first, after = f"call_{number}_first_", f"call_{number}_after_"
        properties = [item for item in properties if item[0] in names]
        for i, (name, schema, required) in enumerate(properties):
            value = rules.schema(function.place, schema)
            written = f'{quoted(name)} "=" {value} {after}{i + 1}'
            rules.rule(f"{first}{i}", written, *([] if required else [f"{first}{i + 1}"]))
            rules.rule(f"{after}{i}", f'"," {written}', *([] if required else [f"{after}{i + 1}"]))
        rules.rule(f"{first}{last}", '")"')
        rules.rule(f"{after}{last}", '")"')
        # one terminal: a line may not end before the bracket
        calls.append(f"{quoted(function.name + '(')} {first}0")
        firsts.append(function.name + "(")
    if calls:
        rules.rule("call", *calls)
        rules.several("listed", "call", '","')
    return firsts


def _tagged(tags: Tags, rules: CallRules, *, joint: bool = False) -> None:
    """Write the rules of calls with `tags`. With `joint`, all calls stand between one pair of outer tags."""
    calls = []
    for number, function in enumerate(rules.functions):
        properties = _properties(rules, function)
        if properties is None:
            rules.left_out.append(function.name)
            continue
        names = [name for name, _, _ in properties if name and name == name.strip() and not _has_mark(name, tags)]
        texts = {
            name: list(_raw_texts(rules, function, schema, tags))
            for name, schema, _ in properties
            if not _is_json(schema)
        }
        names = [name for name in names if texts.get(name) != []]
        lost = [name for name, _, required in properties if required and name not in names]
        if not _is_word(function.name) or _has_mark(function.name, tags) or lost:
            rules.left_out.append(function.name)
            continue
        parts = [quoted(f"{tags.function}{function.name}{tags.end_name}")]
        if not tags.end_name:  # the tag may be a special token
            parts = [rules.mark(tags.function), quoted(function.name)]
        for i, (name, schema, required) in enumerate(properties):
            if name not in names:
                continue
            opened, end, edge = f"{tags.key}{name}{tags.end_key}", tags.end_value, "\n" if tags.wrapped else ""
            if name not in texts:
                before = [quoted(opened), *([quoted(tags.value)] if tags.value else [])]
                part = " ".join([*before, rules.schema(function.place, schema), quoted(end)])
            else:
                # one terminal: white space inside it belongs to the value
                part = f"P{number}_{i}"
                key, opened = (quoted(opened) + " ", tags.value) if tags.value else ("", opened)
                rules.lines.append(f"{part}: {quoted(opened + edge)} ({' | '.join(texts[name])}) {quoted(edge + end)}")
                part = key + part
            parts.append(part if required else f"({part})?")
        calls.append(
            " ".join([*parts, rules.mark(tags.end_function) if not tags.end_name else quoted(tags.end_function)])
        )
    if not calls:
        return
    rules.openings.append(tags.opens[:1] or (tags.function,))
    rules.rule("call", *calls)
    if not tags.opens:
        rules.several("calls", "call")
        return
    outer, end = rules.mark(tags.opens[0]), rules.mark(tags.closes[-1])
    inner = " ".join([*map(rules.mark, tags.opens[1:]), *map(rules.mark, tags.inside), "call"])
    rules.rule("one", " ".join([inner, *map(rules.mark, tags.closes[:-1])]))
    if joint:
        rules.rule("calls", f"{outer} {rules.several('listed', 'one')} {end}")
    else:
        rules.several("calls", rules.rule("enclosed", f"{outer} one {end}"))


def _has_mark(name: str, tags: Tags) -> bool:
    """Return True if the parser would end `name` early."""
    return any(end in name for end in ("\n", tags.end_key, tags.end_name or "<"))


def _marked(marks: Marks, rules: CallRules, header: Callable[[str], list[str]]) -> None:
    """Write the rules of calls with `marks`. `header(name)` returns the terminals before the arguments."""
    calls = [
        f"{' '.join(header(function.name))} {rules.schema(function.place, function.parameters)}"
        for function in rules.functions
        if _may_be_header(function.name, rules)
    ]
    if calls:
        rules.openings.append((marks.section,))
        rules.rule("header_and_arguments", *calls)
        after = quoted("\n" + marks.after) if marks.after else ""
        rules.rule("call", f"{rules.mark(marks.call)} header_and_arguments {after} {rules.mark(marks.end_call)}")
        listed = rules.several("listed", "call")
        rules.rule("calls", f"{rules.mark(marks.section)} {listed} {rules.mark(marks.end_section)}")


def _may_be_header(name: str, rules: CallRules) -> bool:
    """Return True if `name` can stand in a header. Otherwise, adds it to `rules.left_out`."""
    fits = _is_word(name) and "<" not in name
    if not fits:
        rules.left_out.append(name)
    return fits


def _deepseek_v3(rules: CallRules) -> None:
    separator = rules.mark(deepseek_v3.SEPARATOR)
    _marked(
        DeepSeekV3Parser.marks,
        rules,
        lambda name: [quoted("function"), separator, quoted(f"{name}\n{deepseek_v3.CODE}\n")],
    )


def _deepseek_v31(rules: CallRules) -> None:
    _marked(DeepSeekV31Parser.marks, rules, lambda name: [quoted(name), rules.mark(deepseek_v3.SEPARATOR)])


def _kimi_k2(rules: CallRules) -> None:
    arguments = rules.mark(kimi_k2.ARGUMENTS)
    terminals: dict[str, str] = {}  # one for each id: no white space may stand inside it
    for name in dict.fromkeys(function.name for function in rules.functions):
        terminals[name] = f"ID_{len(terminals)}"
        rules.lines.append(f"{terminals[name]}: {quoted(f'functions.{name}:')} /[0-9]{{1,4}}/")
    _marked(KimiK2Parser.marks, rules, lambda name: [terminals[name], arguments])


def _gemma4(rules: CallRules) -> None:
    # arguments in JSON, which the parser reads, too: no schema can be written for the model's own form
    calls = [
        f"{quoted(gemma4.CALL + function.name)} {rules.schema(function.place, function.parameters)}"
        for function in rules.functions
        if _may_be_header(function.name, rules)
    ]
    if calls:
        rules.openings.append((gemma4.OPEN,))
        rules.rule("function", *calls)
        rules.several("calls", rules.rule("call", f"{rules.mark(gemma4.OPEN)} function {rules.mark(gemma4.CLOSE)}"))


def _openai(rules: CallRules) -> None:
    begin = f"{rules.mark(harmony.CHANNEL)} "
    constrain, message = rules.mark(harmony.CONSTRAIN), rules.mark(harmony.MESSAGE)
    calls = [
        f"{quoted('commentary to=functions.' + function.name)} {constrain} {quoted('json')} {message} "
        + rules.schema(function.place, function.parameters)
        for function in rules.functions
        if _may_be_header(function.name, rules)
    ]
    if calls:
        rules.openings.append((harmony.CHANNEL,))
        rules.rule("call", begin + f"({' | '.join(calls)})")
        # `<|call|>` ends a completion
        between = f'{rules.mark(harmony.END)} {rules.mark(harmony.START)} "assistant"'
        rules.several("calls", "call", between)


def required_calls(rules: CallRules) -> None:
    """Write the rules of the list that `forced.RequiredParser` reads: `[{"name": ..., "parameters": {...}}]`."""
    call = rules.json_calls("parameters")
    assert call is not None
    rules.several("listed", call, '","')
    rules.rule("calls", '"[" listed "]"')


CALL_GRAMMARS: dict[str, Callable[[CallRules], None]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "gemma4": _gemma4,
    "glm45": partial(_tagged, GLM45Parser.tags),
    "hermes": _hermes,
    "kimi_k2": _kimi_k2,
    "lfm2": _lfm2,
    "llama3_json": _llama3_json,
    "minimax_m2": partial(_tagged, MiniMaxM2Parser.tags, joint=True),
    "mistral": _mistral,
    "openai": _openai,
    "pythonic": _pythonic,
    "qwen3_coder": partial(_tagged, Qwen3CoderParser.tags),
    "step3": partial(_tagged, Step3Parser.tags, joint=True),
}
"""For each tool parser, the function that writes the rules of its calls. If it adds no `openings`, it could write
none."""


def _properties(rules: CallRules, function: Function) -> list[tuple[str, dict[str, Any], bool]] | None:
    """Return the arguments that are written one by one, each as (name, schema as its own document, required).

    Only `properties`, `required` and `additionalProperties` at the top of the parameters are read. Other keywords
    there, such as `anyOf`, are not enforced. Adds `function` to `rules.sources`, and to `rules.malformed` if a part of
    its parameters is not a schema.

    None if `patternProperties` may apply to a required name; then no call is written.
    """
    rules.sources.append(function)
    parameters = function.parameters
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        rules.malformed.add(function.place)
        return []
    more = dict.fromkeys(name for name in required if isinstance(name, str) and name not in properties)
    if more and parameters.get("patternProperties"):
        return None
    additional = additional_schema(parameters)
    if not all(isinstance(name, str) for name in required) or (more and additional is False):
        rules.malformed.add(function.place)
    found = []
    for name, schema in [*properties.items(), *((name, additional) for name in more)]:
        try:
            alone = property_schema(parameters, name)
        except ValueError:
            alone, schema = {}, None
        if not isinstance(schema, (dict, bool)):
            rules.malformed.add(function.place)
        found.append((name, alone, name in required))
    return found


def _is_word(name: str) -> bool:
    """Return True if `name` can be written in a format that ends names with a blank or bracket."""
    marks = ("{", mistral.ARGS, mistral.CALL_ID)
    return name.split() == [name] and not any(mark in name for mark in marks)


def _is_identifier(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def _is_json(schema: dict[str, Any]) -> bool:
    """Return True if formats with tags write the values of a parameter as JSON."""
    return is_json(types_of(schema, schema))


def _raw_texts(rules: CallRules, function: Function, schema: dict[str, Any], tags: Tags) -> Iterator[str]:
    """Yield terminals for the texts of a parameter that is written without quotes; none if no text can be its value.

    The texts follow `type`, `enum`, `const` and lengths, also through references, `allOf` and `anyOf`. Null may be
    written where the schema allows it. `pattern` and `format` are not enforced: the grammar library has them for quoted
    strings only. Adds what is not enforced to `rules.not_enforced`, and to `rules.malformed` what the compiler has to
    check.
    """
    ends = "|".join(re.escape(tag).replace("/", "\\/") for tag in tags.of_values)
    if any(_is_malformed(inner) or not _UNREAD.isdisjoint(inner) for inner in subschemas(schema)):
        rules.malformed.add(function.place)
    for part in alternatives(schema, schema):
        words, kinds, bounds = words_of(part), named_types(part), lengths_of(part)
        if words is not None:
            _left_out(rules, function, (_OF_TEXTS | _OF_NUMBERS).intersection(part))
            texts = [word if isinstance(word, str) else quote(word) for word in words]
            # the parser would end the value at the tag
            yield from (quoted(text) for text in texts if not any(tag in text for tag in tags.of_values))
            continue
        if not kinds or "string" in kinds:
            low, high = bounds
            names = ("minLength", "maxLength")
            long = {name for name, n in zip(names, bounds, strict=True) if n and n > MAX_LENGTH_BOUND}
            _left_out(rules, function, _OF_TEXTS.intersection(part) | long)
            if high is None or low <= high:
                least, most = 0 if "minLength" in long else low, "" if high is None or "maxLength" in long else high
                yield f"(/(?s:.){{{least},{most}}}/ & ~/(?s:.*)({ends})(?s:.*)/)"
        if "null" in kinds:
            yield quoted("null")


_OF_TEXTS = frozenset({"pattern", "format"})
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_UNREAD = frozenset({"not", "if", "oneOf", "$dynamicRef", "$recursiveRef"})
"""Keywords that exclude values and that `alternatives` does not evaluate. A schema with one of them is rejected if its
constraint cannot be enforced otherwise."""


def _left_out(rules: CallRules, function: Function, keywords: set[str] | frozenset[str]) -> None:
    if keywords:
        rules.not_enforced.setdefault(function.place, set()).update(keywords)


def _is_malformed(schema: dict[str, Any]) -> bool:
    """Return True if a keyword that unquoted texts depend on has a value of the wrong type, or if the lengths
    contradict each other."""
    kinds = schema.get("type", "string")
    names = kinds if isinstance(kinds, list) else [kinds]
    bounds = [schema[name] for name in ("minLength", "maxLength") if name in schema]
    lists = [schema[name] for name in ("enum", "anyOf", "oneOf", "allOf") if name in schema]
    return (
        not all(isinstance(name, str) for name in names)
        or not isinstance(schema.get("$ref", ""), str)
        or not all(type(n) is int and n >= 0 for n in bounds)
        or not all(isinstance(items, list) for items in lists)
        or (len(bounds) == 2 and bounds[0] > bounds[1])
    )

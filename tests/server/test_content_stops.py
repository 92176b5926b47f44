"""Stop strings end a chat if its content has them, and not if its reasoning or its calls do."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.engine.request import FinishReason
from specrs.server.content_stops import ContentStops
from specrs.server.parsers.base import Arguments, CallStart, Content, Event
from specrs.server.tools import ToolSettings
from specrs.tokenizer import Tokenizer

from .scripted import Script, ask
from .test_tools import joined

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "STOP"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look"}}]
BOTH = ToolSettings(auto_choice=True, tool_parser="hermes", reasoning_parser="qwen3")
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "max_tokens": 200}


def told(tokenizer: Tokenizer, text: str, settings: ToolSettings = BOTH, **fields: Any) -> tuple[dict[str, Any], int]:
    """Return the answer of a chat whose model generates `text`, and its number of tokens. Checks that a stream gives
    the same answer."""
    body = {**BODY, **fields}
    engine = Script(tokenizer, text)
    answer = ask(engine, tokenizer, "chat", body, settings).answer
    (choice,) = answer["choices"]
    message = choice["message"]
    wanted = {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning") or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "calls": [[one["function"]["name"], one["function"]["arguments"]] for one in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
    }
    *chunks, last = ask(
        Script(tokenizer, text),
        tokenizer,
        "chat",
        {**body, "stream": True, "stream_options": {"include_usage": True}},
        settings,
    ).events
    assert joined(chunks) == wanted
    ends = [one["stop_reason"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
    assert ends == [choice["stop_reason"]]
    assert last["usage"] == answer["usage"]
    return {**wanted, "stop_reason": choice["stop_reason"]}, answer["usage"]["completion_tokens"]


def tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def test_reasoning_and_arguments_may_hold_stop_strings(tokenizer: Tokenizer) -> None:
    text = f"<think>STOP?\nNo.</think>I look.\n{CALL}"
    found, count = told(tokenizer, text, stop=["STOP"])
    assert found == {
        "content": "I look.",
        "reasoning": "STOP?\nNo.",
        "reasoning_content": "STOP?\nNo.",
        "calls": [["look", '{"at": "STOP"}']],
        "finish_reason": "tool_calls",
        "stop_reason": None,
    }
    assert count == tokens(tokenizer, text) + 1  # and EOS


@pytest.mark.parametrize("settings", [BOTH, ToolSettings(reasoning_parser="qwen3")])
def test_content_ends_before_a_stop_string(tokenizer: Tokenizer, settings: ToolSettings) -> None:
    text = "<think>a STOP</think>Well then STOP and on and on and on"
    tools = TOOLS if settings.tool_parser else None
    found, count = told(tokenizer, text, settings, stop="STOP", tools=tools)
    assert (found["content"], found["finish_reason"], found["stop_reason"]) == ("Well then ", "stop", "STOP")
    upto = text[: text.rindex("STOP") + 4]
    assert tokens(tokenizer, upto) <= count <= tokens(tokenizer, upto) + 1
    kept, _ = told(tokenizer, text, settings, stop="STOP", tools=tools, include_stop_str_in_output=True)
    assert kept["content"] == "Well then STOP"


def test_a_call_before_the_stop_string_is_reported(tokenizer: Tokenizer) -> None:
    found, _ = told(tokenizer, f"{CALL}\nDone. STOP {CALL}", stop="STOP")
    assert (found["calls"], found["content"]) == ([["look", '{"at": "STOP"}']], "\nDone. ")
    assert (found["finish_reason"], found["stop_reason"]) == ("tool_calls", "STOP")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_demanded_calls_may_hold_stop_strings(tokenizer: Tokenizer, choice: Any) -> None:
    arguments = '{"at": "STOP"}'
    text = arguments if isinstance(choice, dict) else f'[{{"name": "look", "parameters": {arguments}}}]'
    found, count = told(tokenizer, text, stop=["STOP", '"'], tool_choice=choice)
    assert (found["calls"], found["stop_reason"]) == ([["look", arguments]], None)
    assert count == tokens(tokenizer, text) + 1


def test_the_engine_ends_what_a_stop_string_ended(tokenizer: Tokenizer) -> None:
    """A request ended by a stop string counts as stopped, not as aborted, and generates nothing more."""
    engine = Script(tokenizer, "a STOP" + " b" * 500, "c" * 20)
    answer = ask(engine, tokenizer, "chat", {**BODY, "stop": "STOP", "n": 2, "max_tokens": 1000}, BOTH)
    first, second = answer.answer["choices"]
    assert (first["message"]["content"], second["message"]["content"]) == ("a ", "c" * 20)
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "stop")
    assert engine.ended_by_caller == [FinishReason.STOP]
    assert len(engine.seen[0].output_token_ids) < 400
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0' in answer.metrics
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 0.0' in answer.metrics


def test_tokens_and_log_probabilities_end_with_the_stop_string(tokenizer: Tokenizer) -> None:
    body = {**BODY, "stop": "\n", "logprobs": True, "return_token_ids": True}
    (choice,) = ask(Script(tokenizer, "a\nb c d e f"), tokenizer, "chat", body, BOTH).answer["choices"]
    assert choice["message"]["content"] == "a"
    # the parser holds the line break back until it knows that no call follows; the text has ended with it all the same
    assert tokenizer.decode(choice["token_ids"]) == "a\n"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


def test_before_min_tokens_no_stop_string_counts(tokenizer: Tokenizer) -> None:
    text = "a STOP b STOP c"
    first = tokens(tokenizer, "a STOP")
    found, count = told(tokenizer, text, stop="STOP", min_tokens=first + 1)
    assert (found["content"], found["stop_reason"]) == ("a STOP b ", "STOP")
    assert tokens(tokenizer, "a STOP b STOP") == count
    assert told(tokenizer, text, stop="STOP", min_tokens=first - 1)[0]["content"] == "a "


def test_a_stop_string_at_the_limit_is_the_reason(tokenizer: Tokenizer) -> None:
    """Check that a stop string in the last token before the limit is the finish reason, although the engine ended the
    text by its length."""
    count = tokens(tokenizer, "a STOP")
    found, used = told(tokenizer, "a STOP b", stop="STOP", max_tokens=count)
    assert (found["content"], found["finish_reason"], found["stop_reason"], used) == ("a ", "stop", "STOP", count)


def test_stop_tokens_end_the_text_wherever_they_are(tokenizer: Tokenizer) -> None:
    (dot,) = tokenizer.encode(".", add_special_tokens=False)
    found, _ = told(tokenizer, "<think>Hm. And</think>b", stop="STOP", stop_token_ids=[dot])
    assert (found["reasoning_content"], found["content"]) == ("Hm", "")
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", dot)


def test_stops_at_the_very_end(tokenizer: Tokenizer) -> None:
    """Check stop strings at the very end: text that a parser holds back is content once the text has ended."""
    assert told(tokenizer, "a b\n", stop="\n")[0]["content"] == "a b"
    found, _ = told(tokenizer, "a <tool", stop="<tool")
    assert (found["content"], found["stop_reason"]) == ("a ", "<tool")


def test_what_may_become_a_stop_string_is_held_back() -> None:
    """Check that a possible beginning of a stop string is held back, unless stop strings are part of the output."""
    assert ContentStops(["ab"], include=False).filter([Content("ca")], final=False) == [Content("c")]
    assert ContentStops(["ab"], include=True).filter([Content("ca")], final=False) == [Content("ca")]


def search(contents: Sequence[str], stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Return the contents up to the first stop string, by trying every end in turn."""
    whole = ""
    for content in contents:
        run = ""
        for letter in content:
            run += letter
            found = [stop for stop in stops if run.endswith(stop)]
            if found:
                longest = max(found, key=len)
                return whole + (run if include else run.removesuffix(longest)), longest
        whole += run
    return whole, None


@settings(max_examples=300)
@given(
    runs=st.lists(st.lists(st.text("abc", min_size=1, max_size=3), max_size=4), max_size=3),
    stops=st.lists(st.sampled_from(["ab", "a", "bca", "cc", "abcabc"]), min_size=1, max_size=3, unique=True),
    include=st.booleans(),
)
def test_content_up_to_the_first_stop_string(runs: list[list[str]], stops: list[str], include: bool) -> None:
    """Check that contents separated by a call are searched separately, in any pieces, and that nothing sent is taken
    back."""
    stopped = ContentStops(stops, include=include)
    events: list[Event] = []
    for i, pieces in enumerate(runs):
        for piece in pieces:
            events += stopped.filter([Content(piece)], final=False)
        if i + 1 < len(runs):
            events += stopped.filter([CallStart("f"), Arguments("{a}")], final=False)
    events += stopped.filter([], final=True)
    told = "".join(event.text for event in events if isinstance(event, Content))
    assert (told, stopped.found) == search(["".join(pieces) for pieces in runs], stops, include)

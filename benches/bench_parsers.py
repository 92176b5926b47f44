"""Cost of the parsers of tool calls and reasoning in a server's step: microseconds for many streams at once.

    python benches/bench_parsers.py [--streams 256] [--rounds 5] [--formats hermes qwen3_coder] [--out FILE]

Every stream has a parser of its own and reads the same text. A step gives each of them the next piece, about a token:
a word with the space before it, at most six letters, or a sign.

- content: a text without calls, by a tool parser
- call: a call of a function with the code of a file, by a tool parser
- reader: a text without calls, by the server's `MessageReader` with a reasoning parser and the tool parser
- reasoning: reasoning, by a reasoning parser

The reader of the parser "none" has no parsers: what a reader of another name takes longer is the cost of its parsers.

Figures are medians over rounds: processor time of a step, and of one piece of one stream.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import specrs
from specrs.server.messages import MessageReader
from specrs.server.parsers.table import REASONING_PARSERS, TOOL_PARSERS, new_reasoning_parser

CODE = """def tide(level, hour):
    \"\"\"Height of the tide at an hour of the day, in centimetres.\"\"\"
    name = "high" if hour % 12 < 6 else 'low'
    heights = {"high": level + 120, "low": level - 80}
    return [heights[name], (hour < 24) and not level > 500]
"""
ARGUMENTS: dict[str, Any] = {"path": "harbour/tides/model.py", "content": CODE, "limit": 20}
JSON = json.dumps(ARGUMENTS)
CONTENT = "The harbour's model has one function too many, so I read the file first and then change what you asked for. "
NAME = "write_file"


def tagged(before: str, key: str, end_key: str, end_value: str, after: str) -> str:
    """Return a call whose arguments stand between tags."""
    values = "".join(f"{key}{name}{end_key}{value}{end_value}\n" for name, value in ARGUMENTS.items())
    return f"{before}\n{values}{after}"


CALLS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    f"{NAME}\n```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{JSON}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma4": f"<|tool_call>call:{NAME}{{"
    + ",".join(f'{key}:<|"|>{value}<|"|>' for key, value in ARGUMENTS.items())
    + "}<tool_call|>",
    "glm45": tagged(f"<tool_call>{NAME}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
    "hermes": f'<tool_call>\n{{"name": "{NAME}", "arguments": {JSON}}}\n</tool_call>',
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{JSON}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": f'<|python_tag|>{{"name": "{NAME}", "parameters": {JSON}}}',
    "minimax_m2": tagged(
        f'<minimax:tool_call>\n<invoke name="{NAME}">',
        '<parameter name="',
        '">',
        "</parameter>",
        "</invoke>\n</minimax:tool_call>",
    ),
    "mistral": f"[TOOL_CALLS]{NAME}[ARGS]{JSON}",
    "openai": f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{JSON}<|call|>",
    "lfm2": f"<|tool_call_start|>[{NAME}({', '.join(f'{key}={value!r}' for key, value in ARGUMENTS.items())})]"
    "<|tool_call_end|>",
    "pythonic": f"[{NAME}({', '.join(f'{key}={value!r}' for key, value in ARGUMENTS.items())})]",
    "qwen3_coder": tagged(
        f"<tool_call>\n<function={NAME}>", "<parameter=", ">\n", "\n</parameter>", "</function>\n</tool_call>"
    ),
    "step3": tagged(
        f'<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{NAME}">',
        '<steptml:parameter name="',
        '">',
        "</steptml:parameter>",
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    ),
}
"""A call by the name of its tool parser."""
OPENED = {"openai_gptoss": "<|channel|>analysis<|message|>"}
"""Beginning of reasoning, for parsers whose reasoning does not begin in the prompt."""
PIECE = re.compile(r" ?\w{1,6}|\s+|.")

Feed = Callable[[str], Any]


def tool_feed(parser: str) -> Feed:
    """Return the function that reads a piece of an answer."""
    return TOOL_PARSERS[parser]().feed


def reader_feed(parser: str) -> Feed:
    """Return the function that reads a piece of a message as the server does for a stream."""
    parsers = (
        (None, None) if parser == "none" else (new_reasoning_parser("qwen3", opened=False), TOOL_PARSERS[parser]())
    )
    reader = MessageReader(*parsers, parallel=True, include_reasoning=True, named=False, new_call_id=lambda *_: "call")

    def feed(piece: str) -> Any:
        reader.feed(piece, final=False)
        return reader.take()

    return feed


def reasoning_feed(parser: str) -> Feed:
    """Return the function that reads a piece of a reasoning."""
    reasoning = new_reasoning_parser(parser, opened=True)
    return lambda piece: reasoning.feed(piece, final=False)


def workloads(formats: list[str]) -> dict[tuple[str, str], tuple[Callable[[], Feed], str]]:
    """Return, by parser and kind of text, a function that makes a parser for a new stream, and the text that the parser
    reads."""
    found: dict[tuple[str, str], tuple[Callable[[], Feed], str]] = {}
    for name in formats:
        if name in TOOL_PARSERS:
            found[name, "content"] = (partial(tool_feed, name), CONTENT * 3)
            found[name, "call"] = (partial(tool_feed, name), CALLS[name])
        if name in TOOL_PARSERS or name == "none":
            found[name, "reader"] = (partial(reader_feed, name), CONTENT * 3)
        if name in REASONING_PARSERS:
            found[name, "reasoning"] = (partial(reasoning_feed, name), OPENED.get(name, "") + CONTENT * 3)
    return found


def step_microseconds(new_feed: Callable[[], Feed], text: str, streams: int) -> float:
    """Return the mean processor time of a step in which each stream reads a piece."""
    pieces = PIECE.findall(text)
    feeds = [new_feed() for _ in range(streams)]
    begun = time.process_time()
    for piece in pieces:
        for feed in feeds:
            feed(piece)
    return (time.process_time() - begun) / len(pieces) * 1e6


def main() -> None:
    names = ["none", *sorted({*TOOL_PARSERS, *REASONING_PARSERS})]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for (name, kind), (new_feed, text) in workloads(args.formats).items():
        times = [step_microseconds(new_feed, text, args.streams) for _ in range(args.rounds)]
        median = statistics.median(times)
        nanoseconds = round(median * 1e3 / args.streams)
        rows.append({"parser": name, "text": kind, "us_per_step": round(median, 1), "ns_per_piece": nanoseconds})
        print(f"{name:14} {kind:9} {median:8.1f} us/step {nanoseconds:6} ns/piece", flush=True)
    if args.out is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        report = {
            "machine": platform.processor() or platform.machine(),
            "versions": {
                "specrs": specrs.__version__, "python": platform.python_version(), "commit": commit.stdout.strip(),
            },
            "streams": args.streams,
            "rounds": args.rounds,
            "rows": rows,
        }  # fmt: skip
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

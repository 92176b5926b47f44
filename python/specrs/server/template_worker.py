"""Child process that renders chat templates, one after another, until its input ends. It is run by path.

It reads and writes JSON lines. The first line is `{"memory", "seconds"}`, its answer `{}`. Each further line has the
`Tokenizer.chat_arguments` of one chat; its answer is `{"text", "warnings"}` or `{"error"}`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import specrs.chat_template.sandbox  # noqa: F401  not when the first request waits for it
from specrs.chat_template import render
from specrs.errors import InvalidRequestError
from specrs.processes.limits import alarm, restrain


def main() -> None:
    """Answer each line of standard input with a line, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches every process; the server ends this one
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    setup = json.loads(sys.stdin.buffer.readline())
    restrain(setup["memory"], niceness=0)  # the first token of an answer waits for this

    answer: dict[str, Any] = {}
    while True:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        with alarm(setup["seconds"]):
            answer = _render(json.loads(line))


def _render(arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        rendered = render(arguments)
        return {"text": rendered.text, "warnings": rendered.warnings}
    except InvalidRequestError as fault:
        return {"error": str(fault)}


if __name__ == "__main__":
    main()

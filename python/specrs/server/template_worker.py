"""A process that renders chat templates, one after another, until its input ends. Runs by path; loads no torch.

A line in, a line out, each JSON: `{"source", "chat_template", "memory", "seconds"}` gives `{}`, then each
`{"messages", "options"}` gives `{"text"}` or `{"error", "unsupported"}`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from specrs.errors import InvalidRequestError, UnsupportedRequestError
from specrs.structured.worker import alarm, restrain
from specrs.tokenizer import Tokenizer


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches every process; the server ends this one
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    setup = json.loads(sys.stdin.buffer.readline())
    restrain(setup["memory"])
    tokenizer = Tokenizer(setup["source"])
    answer: dict[str, Any] = {}
    while True:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        with alarm(setup["seconds"]):
            answer = _render(tokenizer, setup["chat_template"], json.loads(line))


def _render(tokenizer: Tokenizer, chat_template: str | None, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": tokenizer.render_chat(asked["messages"], chat_template=chat_template, **asked["options"])}
    except InvalidRequestError as fault:
        return {"error": str(fault), "unsupported": isinstance(fault, UnsupportedRequestError)}


if __name__ == "__main__":
    main()

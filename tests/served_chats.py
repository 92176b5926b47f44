"""Chats streamed from a server at the same time, and the texts of an `LLM` for the same chats. Holds no tests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from server.harness import Server
from specrs.llm import LLM
from specrs.sampling import SamplingParams

INTERPRETED = (
    "import sys; import specrs.engine.plan as plan; from specrs.backends.table import BACKENDS; "
    "plan.backend_of = lambda device: BACKENDS['cuda']; from specrs.cli import main; sys.exit(main())"
)
"""Source of a server whose engine has the CUDA runner on a CPU, where Triton's interpreter runs the kernels."""
Chat = list[dict[str, str]]


def chats(*texts: str) -> list[Chat]:
    """Return a chat of one message for each text."""
    return [[{"role": "user", "content": text}] for text in texts]


def streamed(server: Server, given: Sequence[Chat], max_tokens: int) -> list[str]:
    """Return the greedy answers to chats that are streamed at the same time. Checks each stream's form: a role first,
    one reason to finish, and as many tokens in its usage as were asked for."""

    def answer(messages: Chat) -> str:
        options = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        usage = {"stream_options": {"include_usage": True}}
        chunks = server.stream("/v1/chat/completions", messages=messages, **options, **usage)
        *chunks, last = chunks
        assert last.get("choices") == [], last
        assert last["usage"]["completion_tokens"] == max_tokens
        choices: list[dict[str, Any]] = [choice for chunk in chunks for choice in chunk["choices"]]
        assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(answer, given))


def answered(given: Sequence[Chat], max_tokens: int, model: Path, **settings: Any) -> list[str]:
    """Return the greedy answers of an `LLM` of `model` with these settings."""
    llm = LLM(model=str(model), **settings)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [output.outputs[0].text for output in llm.chat(list(given), params, use_tqdm=False)]


def share_of_equal(mine: Sequence[str], theirs: Sequence[str]) -> float:
    """Return the share of characters before the first difference of each text."""
    same = 0
    for ours, reference in zip(mine, theirs, strict=True):
        pairs = enumerate(zip(ours, reference, strict=False))
        same += next((i for i, (a, b) in pairs if a != b), min(len(ours), len(reference)))
    return same / sum(map(len, theirs))

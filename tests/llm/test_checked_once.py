"""A request is checked in one place: where its prompt and parameters meet the limits of an engine."""

from collections.abc import Callable
from typing import Any

import pytest
from server.scripted import Script, ask
from specrs import LLM, SamplingParams
from specrs.engine import engine, intake
from specrs.engine.request import Request
from specrs.errors import InvalidRequestError
from specrs.sampling import validate_request
from specrs.server import endpoints, responses
from specrs.server.tools import ToolSettings
from specrs.tokenizer import Tokenizer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the names of the checks that have run, in order."""
    ran: list[str] = []

    def noted(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return check(*args, **kwargs)

        return call

    for module in (intake, engine):
        monkeypatch.setattr(module, "validate_request", noted("limits", validate_request))
    check_size = noted("size", endpoints.check_size)
    for place in (endpoints, responses):
        monkeypatch.setattr(place, "check_size", check_size)
    monkeypatch.setattr(SamplingParams, "__post_init__", noted("values", SamplingParams.__post_init__))
    return ran


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=128, max_num_seqs=2)


def test_prompts_of_an_llm(llm: LLM, calls: list[str]) -> None:
    """Check that several completions of a prompt are checked as one request."""
    params = SamplingParams(n=3, max_tokens=2, prompt_logprobs=1, stop="x")
    outputs = llm.generate([[5, 6], [7]], params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [3, 3]
    assert calls == ["values", "limits", "limits"]


def test_a_request_that_was_not_checked_is_checked_by_the_engine(llm: LLM, calls: list[str]) -> None:
    job = Request(10**6, [5, 6], SamplingParams(max_tokens=2), num_speculative_tokens=llm.engine.num_speculative_tokens)
    llm.engine.add_request(job)
    while llm.engine.has_unfinished():
        llm.engine.step()
    assert job.num_output_tokens == 2
    assert calls == ["values", "limits"]
    with pytest.raises(InvalidRequestError, match=r"^prompt_token_ids\[0\]="):
        llm.engine.add_request(Request(10**6 + 1, [10**6], SamplingParams()))


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("completions", {"prompt": "a", "stop": "q", "max_tokens": 4}),
        ("chat", {"messages": [{"role": "user", "content": "a"}], "stop": "q", "max_tokens": 4}),
        ("responses", {"input": "a", "max_output_tokens": 4}),
    ],
)
def test_bodies_of_a_server(tokenizer: Tokenizer, calls: list[str], endpoint: str, body: dict[str, Any]) -> None:
    """Check that a server checks each body once, also if stop strings are searched in the content of messages instead
    of by the engine."""
    said = ask(Script(tokenizer, "b c d"), tokenizer, endpoint, body, ToolSettings(reasoning_parser="qwen3"))
    assert said.answer
    assert sorted(name for name in calls if name != "limits") == ["size", "values"]
    assert calls.count("limits") == 1  # a scripted engine checks by a function of its own


def test_fields_go_back_to_their_defaults() -> None:
    params = SamplingParams(stop=["a"], prompt_logprobs=2, temperature=0.5, min_tokens=1)
    assert params.without("stop", "prompt_logprobs") == SamplingParams(temperature=0.5, min_tokens=1)
    assert params.stop_strings == ("a",)
    assert params.without("stop").stop_strings == ()

"""Constraints on logits in native passes at default settings: drafts change no text."""

import re
from typing import Any

import pytest
from specrs import LLM, SamplingParams
from specrs.outputs import RequestOutput
from specrs.pair.prompts import PROMPTS

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
REGEX = "[a-z]{2,9}( [a-z]{1,7}){3}[.][0-9]{2}"
ASKED: list[dict[str, Any]] = [
    {},
    {"structured_outputs": {"regex": REGEX}, "logprobs": 2},
    {"structured_outputs": {"choice": ["return", "yield from", "raise"]}, "min_tokens": 9},
    {"structured_outputs": {"json_object": True}, "min_tokens": 12, "repetition_penalty": 1.2},
    {"bad_words": ["return", "self"], "frequency_penalty": 0.4, "prompt_logprobs": 1},
    {"allowed_token_ids": list(range(40, 400)), "logprobs": 0},
]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 384, "max_num_seqs": 4, "threads": 1}

pytestmark = pytest.mark.usefixtures("one_thread")


def served(k: int, asked: dict[str, Any]) -> list[RequestOutput]:
    speculative = {"num_speculative_tokens": k, "rejection_sample_method": "coupled"} if k else None
    llm = LLM(speculative_config=speculative, **SETTINGS)
    params = [GREEDY.replace(**one, **asked) for one in ASKED]
    outputs = llm.generate(list(PROMPTS[: len(ASKED)]), params, use_tqdm=False)
    assert k == 0 or llm.stats().accepted_tokens > 0
    return outputs


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "coupled"])
def test_drafts_change_nothing(asked: dict[str, Any]) -> None:
    plain, drafted = served(0, asked), served(4, asked)
    for one, other in zip(plain, drafted, strict=True):
        assert one.error is other.error is None
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.prompt_logprobs == other.prompt_logprobs
    texts = [output.outputs[0].text for output in plain]
    assert re.match("[a-z]{2,9} [a-z]", texts[1])
    assert texts[2] in ("return", "yield from", "raise")
    assert "return" not in texts[4]


def test_log_probabilities_of_a_long_prompt() -> None:
    """Check log probabilities of a long prompt: they are computed in pieces; torch's pass gives the same but for
    rounding."""
    prompt, params = "\n".join(PROMPTS[:5])[:900], GREEDY.replace(max_tokens=1, prompt_logprobs=3)
    found = []
    for enforce_eager in (False, True):
        llm = LLM(**SETTINGS, enforce_eager=enforce_eager)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        found.append((output.prompt_token_ids, output.prompt_logprobs))
    (ids, native), (_, by_torch) = found
    assert native is not None
    assert by_torch is not None
    assert len(native) == len(by_torch) == len(ids) > 3 * 64
    assert native[0] is by_torch[0] is None
    for token, one, other in zip(ids[1:], native[1:], by_torch[1:], strict=True):
        assert one is not None
        assert other is not None
        assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)
        assert sum(entry.rank <= 3 for entry in one.values()) == 3

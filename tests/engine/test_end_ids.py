"""Ids that end a request: those of the checkpoint's configuration, and the tokenizer's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_checkpoint
from specrs import LLM, AsyncLLM, SamplingParams
from specrs.tokenizer import Tokenizer, end_ids


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose generation_config.json names end id 5, and whose tokenizer names id 0."""
    return make_checkpoint(tmp_path_factory.mktemp("ends"), vocab=400, layers=1, eos_token_id=5)


def drawing(token_id: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=4, logit_bias={token_id: 100.0}, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("token_id", [0, 5])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_folder_ends_on_its_configuration_s_id_and_on_its_tokenizer_s(
    drafts: bool, token_id: int, source: Path
) -> None:
    speculative = {"model": str(source), "num_speculative_tokens": 2} if drafts else None
    llm = LLM(str(source), max_model_len=32, speculative_config=speculative)
    (ended,) = llm.generate([[7, 8]], drawing(token_id))
    assert (ended.outputs[0].finish_reason, ended.outputs[0].token_ids) == ("stop", [token_id])
    (ignored,) = llm.generate([[7, 8]], drawing(token_id, ignore_eos=True))
    assert ignored.outputs[0].finish_reason == "length"
    (later,) = llm.generate([[7, 8]], drawing(token_id, min_tokens=2))
    assert token_id not in later.outputs[0].token_ids[:2]


def test_without_a_tokenizer_the_configuration_s_id_ends_alone(source: Path) -> None:
    llm = LLM(str(source), max_model_len=32, skip_tokenizer_init=True)
    assert llm.generate([[7, 8]], drawing(0))[0].outputs[0].finish_reason == "length"
    assert llm.generate([[7, 8]], drawing(5))[0].outputs[0].finish_reason == "stop"


def test_async_requests_end_on_both(source: Path) -> None:
    async def reasons() -> list[str | None]:
        llm, found = AsyncLLM(str(source), max_model_len=32), []
        for token_id in (0, 5):
            async for output in llm.generate([7, 8], drawing(token_id)):
                last = output
            found.append(last.outputs[0].finish_reason)
        llm.shutdown()
        return found

    assert asyncio.run(reasons()) == ["stop", "stop"]


def test_an_end_that_the_model_cannot_emit_is_left_out(source: Path) -> None:
    tokenizer = Tokenizer(str(source))
    assert end_ids((5, 7), tokenizer, 400) == (5, 7, 0)
    for own, ends in ((5, (5, 7)), (399, (5, 7, 399)), (400, (5, 7)), (None, (5, 7))):
        named: Any = SimpleNamespace(eos_token_id=own)
        assert end_ids((5, 7), named, 400) == ends
    assert end_ids((5, 7), None, 400) == (5, 7)

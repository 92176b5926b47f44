"""Log probabilities of a prompt are converted to their output form chunk by chunk, while the prompt is computed."""

import asyncio

import pytest
from specrs import AsyncLLM, RequestOutput, SamplingParams
from specrs.engine.output_builder import OutputBuilder

CHUNK = 48


@pytest.mark.parametrize("ends", ["whole", "aborted"])
def test_no_step_takes_in_more_than_its_chunk(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    taken: list[int] = []
    take = OutputBuilder.take_prompt

    def counted(self: OutputBuilder) -> None:
        before = len(self._prompt_logprobs)
        take(self)
        taken.append(len(self._prompt_logprobs) - before)

    monkeypatch.setattr(OutputBuilder, "take_prompt", counted)
    llm = AsyncLLM(max_model_len=512, max_num_batched_tokens=CHUNK, max_num_seqs=2)
    prompt = [5 + i % 400 for i in range(400)]

    async def ask() -> RequestOutput | None:
        last = None
        async for output in llm.generate(prompt, SamplingParams(max_tokens=3, prompt_logprobs=2)):
            last = output
            if ends == "aborted":
                break
        return last

    try:
        output = asyncio.run(asyncio.wait_for(ask(), 60))
    finally:
        assert llm.shutdown(timeout=30)
    assert output is not None
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == sum(taken) == 400
    assert max(taken) <= CHUNK + 1  # and the first token, which nothing predicts
    assert llm._loop._prompt_builders == {}

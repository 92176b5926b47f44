"""`LLM` on the real engine and the bundled pair: what the scripted engine cannot show."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import specrs
from checkpoints import write_tokenizer
from specrs import LLM, InvalidConfigError, SamplingParams, TokenizerMismatchError
from specrs.outputs import RequestOutput
from specrs.pair import DRAFT
from specrs.pair.prompts import PROMPTS

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SPECULATIVE = {"num_speculative_tokens": 4}
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[1, 2])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM(speculative_config=SPECULATIVE, max_steps_in_flight=request.param, **SETTINGS)
    yield llm
    # whatever the tests did, nothing is held at the end
    while llm.engine.has_unfinished():
        llm.engine.step()
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.num_free_blocks == llm.engine.scheduler.num_blocks


@pytest.fixture(scope="module")
def vanilla() -> list[RequestOutput]:
    """The bundled target without speculation, one request at a time."""
    llm = LLM(**SETTINGS)
    return [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS[:6]]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_text_is_that_without_speculation(llm: LLM, vanilla: list[RequestOutput]) -> None:
    outputs = llm.generate(list(PROMPTS[:6]), GREEDY, use_tqdm=False)
    assert texts(outputs) == texts(vanilla)
    for output in outputs:
        completion = output.outputs[0]
        assert len(completion.token_ids) == 24
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=True)


def test_figures_of_requests_add_up(llm: LLM) -> None:
    llm.reset_stats()
    params = [GREEDY.replace(num_speculative_tokens=k) for k in (0, 1, 4, None)]
    outputs = llm.generate(list(PROMPTS[:4]), params, use_tqdm=False)
    stats = llm.stats()
    metrics = [output.metrics for output in outputs]
    assert metrics[0].drafts == 0
    assert metrics[1].draft_tokens == metrics[1].drafts > 0
    assert stats.drafts == sum(one.drafts for one in metrics)
    assert stats.draft_tokens == sum(one.draft_tokens for one in metrics)
    assert stats.accepted_tokens == sum(one.accepted_tokens for one in metrics)
    assert stats.acceptance_histogram == [
        sum(counts) for counts in zip(*(one.acceptance_histogram for one in metrics), strict=True)
    ]
    assert stats.generation_tokens == sum(one.num_generated_tokens for one in metrics) == 96
    assert stats.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
    assert stats.num_cached_tokens == sum(one.num_cached_tokens for one in metrics)
    for one in metrics:
        assert one.time_to_first_token is not None
        assert one.latency is not None
        assert 0 < one.time_to_first_token <= one.latency
        assert None not in (one.arrival_time, one.scheduled_time, one.first_token_time)
        assert one.arrival_time <= one.scheduled_time <= one.first_token_time


def test_eight_samples_of_a_prompt_compute_it_once(llm: LLM) -> None:
    llm.reset_stats()
    prompt = {"prompt_token_ids": [3 + i % 1000 for i in range(0, 1400, 7)]}
    params = SamplingParams(n=8, max_tokens=4, ignore_eos=True, seed=1)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    stats = llm.stats()
    assert len(output.outputs) == 8
    # 200 tokens: 12 blocks of 16 and 8 tokens that each sample computes.
    assert stats.prompt_tokens - stats.num_cached_tokens == 200 + 7 * 8


def test_a_request_can_ask_for_no_drafts(llm: LLM) -> None:
    llm.reset_stats()
    llm.generate(list(PROMPTS[:2]), GREEDY.replace(num_speculative_tokens=0), use_tqdm=False)
    assert (llm.stats().draft_passes, llm.stats().acceptance_length) == (0, 1.0)


def test_bad_requests_leave_their_neighbours_alone(llm: LLM, vanilla: list[RequestOutput]) -> None:
    prompts = [PROMPTS[0], "", PROMPTS[1], [5, 2048], [1] * 256, PROMPTS[2], PROMPTS[3]]
    params = [GREEDY] * 6 + [GREEDY.replace(num_speculative_tokens=5)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [texts(outputs)[i] for i in (0, 2, 5)] == texts(vanilla)[:3]
    assert [str(outputs[i].error).split(":")[0] for i in (1, 3, 4, 6)] == [
        "prompt=[]",
        "prompt_token_ids[1]=2048",
        "prompt",
        "num_speculative_tokens=5",
    ]


@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings(llm: LLM, vanilla: list[RequestOutput], keep: bool) -> None:
    for whole in vanilla[:3]:
        text = whole.outputs[0].text
        stop = text[len(text) // 2 :][:3]
        end = text.index(stop) + (len(stop) if keep else 0)
        params = GREEDY.replace(stop=["never", stop], include_stop_str_in_output=keep)
        (output,) = llm.generate(whole.prompt, params, use_tqdm=False)
        completion = output.outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (text[:end], "stop", stop)
        assert completion.token_ids == whole.outputs[0].token_ids[: len(completion.token_ids)]
        *_, last = llm.stream(whole.prompt, params)
        assert last.outputs[0].text == text[:end]


def test_stop_token_ids(llm: LLM, vanilla: list[RequestOutput]) -> None:
    ids = vanilla[0].outputs[0].token_ids
    stop = ids[10]
    (output,) = llm.generate(vanilla[0].prompt, GREEDY.replace(stop_token_ids=[stop]), use_tqdm=False)
    completion = output.outputs[0]
    first = ids.index(stop)
    assert (completion.token_ids, completion.stop_reason) == (ids[: first + 1], stop)
    assert completion.text == llm.get_tokenizer().decode(ids[:first])


def test_stream_equals_generate(llm: LLM, vanilla: list[RequestOutput]) -> None:
    streams = [llm.stream(output.prompt, GREEDY) for output in vanilla[:3]]
    shown = [""] * 3
    live = dict(enumerate(streams))
    while live:  # in turn, so that they share steps
        for i, stream in list(live.items()):
            output = next(stream, None)
            if output is None:
                del live[i]
            else:
                shown[i] += output.outputs[0].delta
                assert output.outputs[0].text == shown[i]
    assert shown == texts(vanilla[:3])


def test_closing_a_stream_frees_what_it_held(llm: LLM, vanilla: list[RequestOutput]) -> None:
    stream: Any = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    assert llm.stats().num_running == llm.stats().num_waiting == 0
    assert texts(llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)) == texts(vanilla[1:2])


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_leaves_a_usable_engine(
    llm: LLM, vanilla: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    execute, calls = llm.engine.runner.execute, 0

    def interrupted(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise fault
        execute(*args, **kwargs)

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    with pytest.raises(fault):
        llm.generate(list(PROMPTS[:6]), GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert llm.stats().num_running == llm.stats().num_waiting == 0
    assert texts(llm.generate(list(PROMPTS[:6]), GREEDY, use_tqdm=False)) == texts(vanilla)


def test_no_limit_but_the_context(llm: LLM) -> None:
    (output,) = llm.generate([7] * 250, GREEDY.replace(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")


def test_chat(llm: LLM) -> None:
    messages = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def read(path):"}]
    (chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
    (plain,) = llm.generate("import os\ndef read(path):", GREEDY, use_tqdm=False)
    assert chat.prompt_token_ids == plain.prompt_token_ids
    assert texts([chat]) == texts([plain])


def test_without_a_tokenizer(vanilla: list[RequestOutput]) -> None:
    llm = LLM(skip_tokenizer_init=True, **SETTINGS)
    (output,) = llm.generate(vanilla[0].prompt_token_ids, GREEDY, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", vanilla[0].outputs[0].token_ids)


def test_too_few_blocks_for_one_request() -> None:
    words = r"^num_gpu_blocks_override=6: 6 KV blocks fit, one request of max_model_len=256 needs 16; "
    with pytest.raises(InvalidConfigError, match=words):
        LLM(num_gpu_blocks_override=6, speculative_config=SPECULATIVE, **SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 4096}, "^max_model_len=4096: must be at most 2048, the max_position_embeddings of "),
        ({"dtype": "float16"}, "^dtype='float16': not implemented on device cpu; allowed: float32, float64, bfloat16"),
        (
            {"speculative_config": {"num_speculative_tokens": 17}},
            "num_speculative_tokens=17: must be an integer from 0",
        ),
        (
            {"speculative_config": {"num_speculative_tokens": 2, "max-model-len": 4096}},
            "^speculative_config.max_model_len=4096: must be at most 2048",
        ),
        ({"kv_cache_memory_bytes": 1000}, "^kv_cache_memory_bytes=1000: 0 KV blocks fit"),
        ({"tensor_parallel_size": 3}, "^tensor_parallel_size=3: .* has num_attention_heads=4; allowed: its divisors$"),
        ({"revision": "main"}, "^revision='main': must be None, because .* is a folder"),
    ],
)
def test_settings_that_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        LLM(**settings)


def test_draft_with_another_tokenizer(tmp_path: Path) -> None:
    draft = shutil.copytree(DRAFT, tmp_path / "draft")
    write_tokenizer(draft, 400)
    with pytest.raises(TokenizerMismatchError, match=r"^speculative_config.model=.*: its tokenizer differs"):
        LLM(speculative_config={"model": str(draft), "num_speculative_tokens": 2})


def test_the_readme_example_has_these_names() -> None:
    assert {"LLM", "SamplingParams", "InvalidRequestError", "__version__"} <= set(specrs.__all__)

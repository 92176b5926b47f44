"""Embeddings and scores of `LLM` and `AsyncLLM`, against hidden states and logits that transformers computes alone."""

import asyncio
import functools
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, make_checkpoint, make_overflowing, perturb_checkpoint, write_tokenizer
from engine.harness import make_engine
from gguf_files import write_metadata
from hf_reference import load
from hypothesis import given
from hypothesis import strategies as st
from pooling_checkpoints import VOCAB, as_embedding, make_reranker, question, with_answers
from safetensors.torch import load_file, save_file
from specrs import (
    LLM,
    AsyncLLM,
    CheckpointError,
    InvalidRequestError,
    PoolingParams,
    SamplingParams,
    UnsupportedRequestError,
)
from specrs.errors import SpecrsError
from specrs.models.sentence_transformers import pools_last_token
from sweep import sweep

TEXTS = ["the cat sat", "on the mat", "one two three four five six seven", "a"]
pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def unit_states(folder: Path, prompts: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    """Return the final hidden states of the last tokens, scaled to length 1, in float64, each prompt alone."""
    model, found = load(folder), []
    with torch.inference_mode():
        for prompt in prompts:
            state = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
            found.append((state / state.norm()).numpy())
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random checkpoint of each family that stores KV differently, and a draft for the first one."""
    root = tmp_path_factory.mktemp("pooling")
    made = {
        family: make_checkpoint(root / family, family, seed=i, vocab=VOCAB)
        for i, family in enumerate(("qwen3", "gemma3_text", "qwen3_moe"))
    }
    return made | {"draft": perturb_checkpoint(made["qwen3"], root / "draft", noise=0.1, seed=9)}


def embeddings(llm: LLM, prompts: Any, **params: Any) -> list[np.ndarray]:
    outputs = llm.embed(prompts, use_tqdm=False, pooling_params=PoolingParams(**params))
    return [np.array(output.outputs.embedding) for output in outputs]


def make_llm(folder: Path, draft: Path | None = None, *, k: int = 0, **fields: Any) -> LLM:
    return LLM.from_engine(make_engine(folder, draft, k=k, **fields))


PROMPTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=60).map(tuple), min_size=1, max_size=7)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3", {}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("qwen3", {"quantization": "int8", "cpu_activations": "int16"}),
        ("gemma3_text", {}),
        ("qwen3_moe", {}),
    ],
    ids=["qwen3", "bfloat16", "int8", "windows", "experts"],
)
@sweep(18)
@given(data=st.data())
def test_bits_depend_on_the_text_alone(
    folders: dict[str, Path], family: str, fields: dict[str, Any], data: st.DataObject
) -> None:
    """Check that an embedding's bits depend on its text alone: not on batch, chunks, blocks, prefix hits, or texts
    generated in the same steps."""
    fields = {"dtype": "float32", **fields}
    prompts = data.draw(PROMPTS)
    prefix = data.draw(st.sampled_from([(), tuple(range(1, 41))]))
    prompts = [prefix + prompt for prompt in prompts]
    alone = make_llm(folders[family], max_num_batched_tokens=256, enable_prefix_caching=False, **fields)
    expected = [embeddings(alone, list(prompt))[0] for prompt in prompts]
    k = data.draw(st.sampled_from([0, 3])) if family == "qwen3" and "quantization" not in fields else 0
    llm = make_llm(
        folders[family],
        folders["draft"] if k else None,
        k=k,
        max_num_batched_tokens=data.draw(st.sampled_from([16, 33, 64, 256])),
        max_num_seqs=data.draw(st.integers(1, 8)),
        block_size=data.draw(st.sampled_from([8, 16])),
        num_gpu_blocks_override=data.draw(st.sampled_from([None, 40])),
        **fields,
    )
    if data.draw(st.booleans()):
        text = llm.stream([3, 1, 4], SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))
        next(text)
    for _ in range(2):  # the second time with prefix hits
        found = embeddings(llm, [list(prompt) for prompt in prompts])
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    if "quantization" not in fields:
        rounding = 2e-5 if fields["dtype"] == "float32" else 0.05
        for one, other in zip(expected, unit_states(folders[family], tuple(prompts)), strict=True):
            np.testing.assert_allclose(one, other, atol=rounding)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_models_of_torch_embed_the_same_texts(folders: dict[str, Path], dtype: str) -> None:
    """Check embeddings of a torch decoder, whose passes Python computes."""
    prompts = [[7, 3, 5] * 20, [1], [7, 3, 5]]
    llm = make_llm(folders["qwen3"], dtype=dtype, enforce_eager=True, max_num_batched_tokens=16)
    assert not llm.engine.runner.is_native
    expected = unit_states(folders["qwen3"], tuple(map(tuple, prompts)))
    for one, other in zip(embeddings(llm, prompts), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_generated_text_is_the_same_next_to_embeddings(folders: dict[str, Path]) -> None:
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    llm = make_llm(folders["qwen3"], folders["draft"], k=3, dtype="float32")
    (alone,) = llm.generate([prompt], params, use_tqdm=False)
    outputs = llm.stream(prompt, params)
    next(outputs)
    before = llm.stats()
    embeddings(llm, [[i, 2, 3] for i in range(1, 12)])
    *_, last = outputs
    assert last.outputs[0].token_ids == alone.outputs[0].token_ids
    stats = llm.stats()
    assert stats.prompt_tokens - before.prompt_tokens == 33
    assert stats.generation_tokens == 80, "an embedding generates no token"


@given(st.integers(1, 96), st.booleans())
@sweep(12)
def test_dimensions_are_cut_before_the_length_becomes_1(folders: dict[str, Path], size: int, scaled: bool) -> None:
    llm = make_llm(folders["qwen3"], dtype="float64")
    (state,) = unit_states(folders["qwen3"], ((4, 5, 6),))
    (raw,) = embeddings(llm, [4, 5, 6], use_activation=False)
    (found,) = embeddings(llm, [4, 5, 6], dimensions=size, use_activation=scaled)
    assert len(found) == size
    expected = state[:size] / np.linalg.norm(state[:size]) if scaled else raw[:size]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_wrong_prompt_embeds_nothing(folders: dict[str, Path]) -> None:
    llm = make_llm(folders["qwen3"], dtype="float32")
    for prompts, message in (
        ([[1], []], "prompt=[]: must have at least one token"),
        ([[1], [VOCAB]], f"prompt_token_ids[0]={VOCAB}: must be an integer from 0 to {VOCAB - 1}"),
        ([[1] * 128], "prompt: 128 tokens; must be at most 127"),
        (["text"], "prompt='text': text needs a tokenizer"),
    ):
        with pytest.raises(InvalidRequestError, match=re.escape(message)):
            llm.embed(prompts, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=re.escape("dimensions=97: must be from 1 to 96")):
        embeddings(llm, [[1]], dimensions=97)
    with pytest.raises(InvalidRequestError, match="pooling_params=4: must be a PoolingParams or None"):
        llm.embed([[1]], pooling_params=4)  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished()
    assert embeddings(llm, []) == []


def test_a_state_that_is_not_finite_ends_its_request_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    broken = make_overflowing(tmp_path / "broken", marker=9)
    llm = make_llm(broken, dtype="float32")
    with pytest.raises(SpecrsError, match="not finite"):
        llm.embed([[1, 2], [1, 9, 2]], use_tqdm=False)
    (fine,) = embeddings(llm, [[1, 2]])
    assert np.isfinite(fine).all()


def test_an_embedding_model_makes_no_decoder_of_text(folders: dict[str, Path], tmp_path: Path) -> None:
    """Check that loading a model whose files say that it embeds leaves the tokenizer's decoder to the first text."""
    embedding = as_embedding(folders["qwen3"], tmp_path / "embedding")
    for folder, is_made in ((folders["qwen3"], True), (embedding, False)):
        llm = LLM(str(folder), max_model_len=32, num_gpu_blocks_override=8)
        assert llm.tokenizer is not None
        assert ("decoder" in vars(llm.tokenizer)) == is_made
    llm.embed("the cat sat", use_tqdm=False)
    assert "decoder" not in vars(llm.tokenizer)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("reranker") / "model")


def probability(model: Any, llm: LLM, text: str) -> float:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    answers = [tokenizer.backend.token_to_id(answer) for answer in ("no", "yes")]
    return float(torch.softmax(logits[answers], 0)[1])


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["native", "torch"])
def test_a_score_is_the_probability_of_yes(reranker: Path, enforce_eager: bool) -> None:
    llm, model = LLM(str(reranker), dtype="float32", enforce_eager=enforce_eager), load(reranker)
    outputs = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    expected = [probability(model, llm, question(TEXTS[0], text)) for text in TEXTS]
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01, "texts that the model tells apart"
    assert llm.stats().generation_tokens == 0
    (one,) = llm.score(TEXTS[1], TEXTS[2], instruction="Find songs", use_tqdm=False)
    assert one.outputs.score == pytest.approx(
        probability(model, llm, question(TEXTS[1], TEXTS[2], "Find songs")), abs=1e-5
    )
    pairs = llm.score(TEXTS[:2], TEXTS[2:], use_tqdm=False)
    for output, query, document in zip(pairs, TEXTS[:2], TEXTS[2:], strict=True):
        text = question(query, document)
        assert output.outputs.score == pytest.approx(probability(model, llm, text), abs=1e-5)
        assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)  # type: ignore[union-attr]


def test_a_score_of_an_embedding_model_is_the_cosine(reranker: Path, tmp_path: Path) -> None:
    folder = as_embedding(reranker, tmp_path / "embedding")
    llm = LLM(str(folder), dtype="float32")
    vectors = embeddings(llm, TEXTS)
    scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    assert scores == pytest.approx([vectors[0] @ vector for vector in vectors], abs=1e-6)
    assert scores[0] == pytest.approx(1.0)
    (pair,) = llm.score(TEXTS[1], TEXTS[2], use_tqdm=False)
    assert pair.outputs.score == pytest.approx(vectors[1] @ vectors[2], abs=1e-6)
    pairs = [output.outputs.score for output in llm.score(TEXTS[:2], TEXTS[2:], use_tqdm=False)]
    assert pairs == pytest.approx([vectors[0] @ vectors[2], vectors[1] @ vectors[3]], abs=1e-6)
    with pytest.raises(
        InvalidRequestError, match="instruction='x': an embedding model reads it as a part of the query"
    ):
        llm.score("a", "b", instruction="x", use_tqdm=False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"mode": "mean_tokens"},
            "model: it pools by mean_tokens, which is not implemented; use a model that pools by lasttoken",
        ),
        (
            {"last": "Dense"},
            "model: the module Dense in its modules.json is not implemented; use a model whose modules are ",
        ),
    ],
)
def test_embedding_models_that_pool_otherwise_are_rejected(
    reranker: Path, tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    llm = LLM(str(as_embedding(reranker, tmp_path / "other", **changed)), dtype="float32")
    for work in (lambda: llm.embed("a", use_tqdm=False), lambda: llm.score("a", "b", use_tqdm=False)):
        with pytest.raises(UnsupportedRequestError, match=re.escape(message)):
            work()


def test_other_models_are_asked_through_their_chat_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    folder = make_checkpoint(tmp_path / "model", vocab=VOCAB, seed=4, max_position_embeddings=2048)
    write_tokenizer(folder, VOCAB, padding=0, chat_template=template)
    with_answers(folder, chatml=False)
    llm, model = LLM(str(folder), dtype="float32"), load(folder)
    (output,) = llm.score("q", "d", use_tqdm=False)
    system, _, user = question("q", "d").partition("<|im_end|>\n<|im_start|>user\n")
    system, user = system.removeprefix("<|im_start|>system\n"), user.partition("<|im_end|>")[0]
    text = f"[system]{system}[user]{user}[assistant]"
    assert output.outputs.score == pytest.approx(probability(model, llm, text), abs=1e-5)


def test_wrong_pairs_are_rejected(reranker: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    llm = LLM(str(reranker), dtype="float32", max_model_len=512)
    long = "the cat " * 300
    for given_data, message in (
        (("a", []), "data_2=[]: must be a string or a list of strings, not empty"),
        ((1, "a"), "data_1=1: must be a string or a list of strings, not empty"),
        ((["a", "b"], ["c"]), "data_1: 2 texts for 1 in data_2; must be one for all, or one each"),
        (("a", ["b", long]), "data_2[1]: "),
    ):
        with pytest.raises(InvalidRequestError, match=re.escape(message)):
            llm.score(*given_data, use_tqdm=False)  # type: ignore[arg-type]
    bare = make_checkpoint(tmp_path / "bare", vocab=VOCAB)
    write_tokenizer(bare, VOCAB, padding=0)
    with pytest.raises(
        UnsupportedRequestError, match="model: it has no chat template to ask it for a score with; use a"
    ):
        LLM(str(with_answers(bare, chatml=False)), dtype="float32").score("a", "b", use_tqdm=False)
    plain = LLM(str(folders["qwen3"]), dtype="float32")
    with pytest.raises(UnsupportedRequestError, match=r"its tokenizer writes 'no' as 2 tokens, .* use a reranker"):
        plain.score("a", "b", use_tqdm=False)
    with pytest.raises(UnsupportedRequestError, match="skip_tokenizer_init=True: scores need a tokenizer"):
        make_llm(folders["qwen3"], dtype="float32").score("a", "b", use_tqdm=False)


def test_a_runner_without_hidden_states_is_named(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(folders["qwen3"], dtype="float32")
    monkeypatch.setattr(type(llm.engine.runner), "supports_pooling", False)
    message = "device='cpu': embeddings and scores are not implemented on a GPU; start the engine with device='cpu'"
    with pytest.raises(UnsupportedRequestError, match=re.escape(message)):
        llm.embed([[1]], use_tqdm=False)


@pytest.mark.parametrize(("pooling", "embeds"), [(None, False), (0, False), (3, True)])
def test_a_gguf_file_says_whether_it_embeds(tmp_path: Path, pooling: int | None, embeds: bool) -> None:
    path = write_metadata(tmp_path / "model.gguf", {"llama.pooling_type": pooling})
    assert pools_last_token(path) is embeds


@pytest.mark.parametrize("content", ["{", "{}", "[1]"])
def test_a_broken_list_of_modules_is_named(reranker: Path, tmp_path: Path, content: str) -> None:
    folder = as_embedding(reranker, tmp_path / "broken")
    (folder / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"modules\.json: (could not be read as JSON|must hold a list)"):
        LLM(str(folder), dtype="float32").embed("a", use_tqdm=False)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["native", "torch"])
def test_a_base_model_embeds(tmp_path: Path, tie: bool, architecture: str, enforce_eager: bool) -> None:
    """Check that a base model embeds: a checkpoint as sentence-transformers writes it, with names without `model.` and
    no LM head."""
    whole = make_checkpoint(tmp_path / "whole", vocab=VOCAB, seed=2, tie=tie)
    (expected,) = embeddings(make_llm(whole, dtype="float32", enforce_eager=enforce_eager), [[3, 1, 4]])
    folder = shutil.copytree(whole, tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    base = {name.removeprefix("model."): value for name, value in tensors.items() if name != "lm_head.weight"}
    save_file(base, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", architectures=[architecture])
    llm = make_llm(folder, dtype="float32", enforce_eager=enforce_eager)
    np.testing.assert_array_equal(embeddings(llm, [[3, 1, 4]])[0], expected)
    if not tie:
        with pytest.raises(UnsupportedRequestError, match="model: its checkpoint has no LM head, so it only embeds"):
            llm.generate([1], use_tqdm=False)


def test_async(reranker: Path) -> None:
    sync = LLM(str(reranker), dtype="float32")

    async def work() -> tuple[Any, Any]:
        llm = AsyncLLM(str(reranker), dtype="float32")
        try:
            several = await asyncio.gather(*(llm.embed(text) for text in TEXTS))
            with pytest.raises(InvalidRequestError, match="dimensions=97"):
                await llm.embed("a", PoolingParams(dimensions=97))
            with pytest.raises(InvalidRequestError, match="must have at least one token"):
                await llm.embed([])
            assert llm.num_unfinished == 0
            return several, await llm.score(TEXTS[0], TEXTS)
        finally:
            llm.shutdown()

    found, scores = asyncio.run(work())
    assert [output.outputs for output in found] == [output.outputs for output in sync.embed(TEXTS, use_tqdm=False)]
    assert [one.outputs for one in scores] == [one.outputs for one in sync.score(TEXTS[0], TEXTS, use_tqdm=False)]

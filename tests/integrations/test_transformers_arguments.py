"""Arguments of transformers' `generate` next to `custom_generate`: streamers get every token, the rest is rejected."""

from __future__ import annotations

import functools
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, perturb_checkpoint
from hf_reference import load
from specrs.errors import UnsupportedRequestError
from specrs.integrations.transformers import generate
from transformers import AutoTokenizer, DynamicCache, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = torch.tensor([[5, 9, 100, 33]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target") / "target", "llama", seed=1)


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Any, Any]:
    draft = perturb_checkpoint(folder, folder.with_name("draft"), noise=0.1, seed=2)
    return load(folder), load(draft)


class Recorder(BaseStreamer):
    """Streamer that records what it gets."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.told.append(value.tolist())

    def end(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("wrapped", [False, True], ids=["function", "partial"])
def test_a_streamer_is_told_what_transformers_tells_it(k: int, wrapped: bool, pair: tuple[Any, Any]) -> None:
    model, draft = pair
    theirs, ours = Recorder(), Recorder()
    model.generate(IDS, streamer=theirs, **SETTINGS)
    custom = functools.partial(generate, draft_model=draft, num_speculative_tokens=k) if wrapped else generate
    extra = {} if wrapped else {"draft_model": draft, "num_speculative_tokens": k}
    model.generate(IDS, streamer=ours, **SETTINGS, custom_generate=custom, **extra)
    assert ours.told == theirs.told
    assert len(ours.told) == 14


def test_rows_of_a_batch_are_padded_as_in_transformers(pair: tuple[Any, Any]) -> None:
    """Check that rows of a batch are padded as in transformers. Rows end at different positions, also because of
    drafts."""
    model, draft = pair
    ids = torch.tensor([[5, 9, 100], [44, 3, 8], [8, 150, 2]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    settings = SETTINGS | {"max_new_tokens": 24, "eos_token_id": list(range(1, 211, 13))}
    theirs, ours = Recorder(), Recorder()
    expected = model.generate(**batch, streamer=theirs, **settings)
    found = model.generate(**batch, streamer=ours, **settings, custom_generate=generate, draft_model=draft)
    assert found.equal(expected)
    assert (expected == 0).any(), "a row ends before the others"
    assert ours.told == theirs.told


def test_an_iterator_over_text_ends(folder: Path, pair: tuple[Any, Any]) -> None:
    """Check that an iterator over text ends; the caller's thread waits for the end of the stream."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {"inputs": IDS, "streamer": streamer, "custom_generate": generate} | SETTINGS
    thread = Thread(target=pair[0].generate, kwargs=arguments)
    thread.start()
    text = "".join(streamer)
    thread.join()
    expected = pair[0].generate(IDS, **SETTINGS)[0, IDS.shape[1] :]
    assert text == tokenizer.decode(expected)


def test_no_streamer_of_an_outer_call_is_taken(pair: tuple[Any, Any]) -> None:
    """Check that a `generate` without a streamer, called inside a `generate` with a streamer, does not use the outer
    call's streamer."""
    model, _ = pair

    class Calling(Recorder):
        def end(self) -> None:
            super().end()
            model.generate(IDS, **SETTINGS, custom_generate=generate)

    outer = Calling()
    model.generate(IDS, streamer=outer, **SETTINGS, custom_generate=generate)
    assert outer.told.count("end") == 1
    assert len(outer.told) == 14


def cache_of_another_text(model: Any) -> DynamicCache:
    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([[7, 8]]), past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: {"inputs_embeds": model.get_input_embeddings()(IDS)},
            r"^inputs_embeds='a tensor of shape \(1, 4, 96\)': not implemented; pass input_ids instead$",
        ),
        (
            lambda model: {"inputs_embeds": model.get_input_embeddings()(IDS), "input_ids": IDS},
            "^inputs_embeds=.*pass input_ids instead$",
        ),
        (
            lambda _: {"input_ids": IDS, "position_ids": torch.tensor([[0, 5, 7, 9]])},
            r"^position_ids='a tensor of shape \(1, 4\)': not implemented; leave it out: positions count the tokens",
        ),
        (
            lambda model: {"input_ids": IDS, "past_key_values": cache_of_another_text(model)},
            "^past_key_values='2 tokens': not implemented; leave it out$",
        ),
        (lambda model: {"input_ids": IDS, "assistant_model": model}, "^assistant_model=.*pass draft_model instead$"),
        (lambda _: {"input_ids": IDS, "labels": IDS}, "^labels=.*not implemented; leave it out$"),
        (lambda _: {"input_ids": IDS, "penalty_alpha": 0.6, "top_k": 4}, "^penalty_alpha=0.6: not implemented"),
        (lambda _: {"input_ids": IDS, "dola_layers": "high"}, "^dola_layers='high': not implemented"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_the_text_is_rejected(make: Any, message: str, pair: tuple[Any, Any]) -> None:
    with pytest.raises(UnsupportedRequestError, match=message):
        pair[0].generate(**make(pair[0]), **SETTINGS, custom_generate=generate)


@pytest.mark.parametrize(
    "arguments",
    [
        {"position_ids": torch.arange(4)[None]},
        {"attention_mask": torch.tensor([[0, 1, 1, 1]]), "position_ids": torch.tensor([[0, 0, 1, 2]])},
        {"past_key_values": DynamicCache()},
        {"use_cache": False},
        {"inputs_embeds": None},
        {"logits_to_keep": 1},
    ],
    ids=str,
)
def test_what_changes_nothing_is_taken(arguments: dict[str, Any], pair: tuple[Any, Any]) -> None:
    plain = {name: value for name, value in arguments.items() if name == "attention_mask"}
    expected = pair[0].generate(IDS, **plain, **SETTINGS)
    assert pair[0].generate(IDS, **arguments, **SETTINGS, custom_generate=generate).equal(expected)

"""specrs as transformers' decoding loop (`custom_generate`): the text of transformers alone, for every family without
experts, with and without drafts."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import specrs.integrations.transformers as integration
import torch
from checkpoints import FAMILIES, make_checkpoint, perturb_checkpoint
from hf_reference import generate as generate_alone
from hf_reference import load
from specrs.errors import UnsupportedModelError, UnsupportedRequestError
from specrs.integrations.transformers import generate
from sweep import some
from transformers import LogitsProcessor, LogitsProcessorList

PAD = 0


EXPERTS = ["qwen3_moe", "mixtral", "gpt_oss", "llama4_text"]


@pytest.fixture(scope="module", params=[family for family in FAMILIES if family not in EXPERTS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    target = make_checkpoint(folder / "target", request.param, seed=1)
    draft = perturb_checkpoint(target, folder / "draft", noise=0.1, seed=2)
    return load(target), load(draft)


def batch() -> dict[str, torch.Tensor]:
    """Return three prompts of unequal length, padded on the left for transformers."""
    prompts = [[5, 9, 100, 33, 7], [44], [8, 8, 150, 2, 9, 10, 11, 12]]
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


@pytest.mark.parametrize("k", [None, 1, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 24, "eos_token_id": None},
        {"max_new_tokens": 24, "eos_token_id": [3, 7, 11, 30, 45], "min_new_tokens": 4},
        {"max_length": 30, "eos_token_id": 7, "repetition_penalty": 1.4},
    ],
)
def test_greedy_text_is_that_of_transformers(pair: tuple[Any, Any], k: int | None, settings: dict[str, Any]) -> None:
    model, draft = pair
    common = batch() | settings | {"do_sample": False, "pad_token_id": PAD}
    expected = model.generate(**common)
    extra = {} if k is None else {"draft_model": draft, "num_speculative_tokens": k}
    assert model.generate(**common, custom_generate=generate, **extra).equal(expected)


@pytest.mark.parametrize("k", [None, 3])
def test_llama4_without_experts(k: int | None, tmp_path: Path) -> None:
    """Check a family whose tensors have other names here. Prompts have no padding, which transformers counts among the
    positions by which queries grow."""
    target = make_checkpoint(tmp_path / "target", "llama4_text", seed=1, moe_layers=[])
    model, draft = load(target), load(perturb_checkpoint(target, tmp_path / "draft", noise=0.1, seed=2))
    extra = {} if k is None else {"draft_model": draft, "num_speculative_tokens": k}
    for prompt in ([44], [8, 8, 150, 2, 9, 10, 11, 12, 3, 7, 5, 9]):
        found = generate_alone(model, prompt, 24, custom_generate=generate, **extra)
        assert found == generate_alone(model, prompt, 24)


def add_to_data(model: Any, name: str) -> None:
    weight = model.get_parameter(name)
    weight.data += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5), dtype=weight.dtype)


def swap_two_rows(model: Any) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]]


def step_of_an_optimizer(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    model(torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[1, 2, 3, 4]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def load_a_state_dict(model: Any) -> None:
    model.load_state_dict(
        {name: value + 0.05 * value.std() * value.sign() for name, value in model.state_dict().items()}
    )


def replace_a_parameter(model: Any) -> None:
    mlp = model.model.layers[1].mlp.up_proj
    mlp.weight = torch.nn.Parameter(mlp.weight.detach().flip(0))


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.neg_()


CHANGES: dict[str, Callable[[Any], None]] = {
    **{
        f"data of {name}": functools.partial(add_to_data, name=name)
        for name in (
            "model.embed_tokens.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.1.mlp.gate_proj.weight",
            "model.layers.1.input_layernorm.weight",
            "model.norm.weight",
        )
    },
    "data, rows swapped": swap_two_rows,
    "optimizer": step_of_an_optimizer,
    "state dict": load_a_state_dict,
    "parameter": replace_a_parameter,
    "in place": write_in_place,
}


# Families whose modules have these names, and whose random models do not repeat one token whatever their weights.
@pytest.mark.parametrize(
    ("pair", "change"),
    some(3, ["qwen3", "llama", "qwen2", "mistral", "granite", "smollm3"], CHANGES.values()),
    indirect=["pair"],
)
def test_text_is_that_of_the_weights_as_they_are(pair: tuple[Any, Any], change: Callable[[Any], None]) -> None:
    """Check that changed weights are laid out anew, for each kind of change, with earlier prefixes dropped; and not if
    nothing has changed."""
    model, draft = (copy.deepcopy(one) for one in pair)
    settings = {"do_sample": False, "pad_token_id": PAD, "max_new_tokens": 12, "eos_token_id": None}
    # Full blocks, which the prefix cache keeps.
    ids = torch.arange(40)[None] * 5 % 200
    common = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | settings

    def text() -> torch.Tensor:
        return model.generate(**common, custom_generate=generate, draft_model=draft, num_speculative_tokens=3)

    before = text()
    kept = integration._decoders[model].decoder
    assert text().equal(before)
    assert integration._decoders[model].decoder is kept
    change(draft)
    assert text().equal(before)
    change(model)
    after = text()
    assert after.equal(model.generate(**common))
    assert not after.equal(before)


def test_a_changed_draft_drafts_as_it_is(pair: tuple[Any, Any]) -> None:
    target, draft = pair[0], copy.deepcopy(pair[1])
    common = batch() | {"do_sample": False, "pad_token_id": PAD, "max_new_tokens": 25, "eos_token_id": None}

    def acceptance() -> float:
        target.generate(**common, custom_generate=generate, draft_model=draft, num_speculative_tokens=3)
        (engine,) = integration._engines[target].values()
        return engine.stats().acceptance_length

    assert acceptance() < 4
    for mine, its in zip(draft.parameters(), target.parameters(), strict=True):
        mine.data.copy_(its)
    assert acceptance() == 4


def test_sampling_follows_torchs_seed(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    settings = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "max_new_tokens": 16, "pad_token_id": PAD}

    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        out = model.generate(
            **batch(), **settings, custom_generate=generate, draft_model=draft, return_dict_in_generate=True
        )
        return out.sequences

    assert sample(1).equal(sample(1))
    assert not sample(1).equal(sample(2))


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_rejected(tmp_path: Path, family: str) -> None:
    """Check that models with experts are rejected: transformers holds all experts of a layer as one tensor, unlike
    checkpoints."""
    model = load(make_checkpoint(tmp_path / "target", family, seed=1))
    words = rf"architectures=\['{type(model).__name__}'\]: not implemented; allowed: .* without experts"
    with pytest.raises(UnsupportedModelError, match=words):
        model.generate(**batch(), max_new_tokens=2, pad_token_id=PAD, custom_generate=generate)


class Doubled(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return 2 * scores


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "^num_beams=2: not implemented; allowed: None or 1$"),
        ({"logits_processor": LogitsProcessorList([Doubled()])}, "^logits_processor='Doubled': not implemented"),
        ({"typical_p": 0.5, "do_sample": True}, "^typical_p=0.5: not implemented"),
        ({"output_scores": True, "return_dict_in_generate": True}, "^output_scores=True: not implemented"),
        ({"num_speculative_tokens": 17}, "^num_speculative_tokens=17: must be an integer from 0 to 16"),
    ],
)
def test_what_is_not_supported_is_named(pair: tuple[Any, Any], settings: dict[str, Any], message: str) -> None:
    model, draft = pair
    with pytest.raises(UnsupportedRequestError, match=message):
        model.generate(
            **batch(), max_new_tokens=4, pad_token_id=PAD, custom_generate=generate, draft_model=draft, **settings
        )

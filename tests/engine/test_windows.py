"""Models whose layers all have windows: their text is that of transformers, for any drafts."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from specrs.backends.blueprint import Blueprint
from specrs.errors import InvalidConfigError
from sweep import sweep

from engine.harness import (
    LONGEST,
    Bank,
    greedy_jobs,
    make_bank,
    make_engine,
    native_bank,
    poison,
    request,
    run,
    run_greedy,
    submit,
    weights,
)
from engine.test_equivalence import engine_settings


@pytest.fixture(scope="module")
def window_bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """A target in which every layer has a window of 9, with drafts; one draft has full attention."""
    return make_bank(tmp_path_factory.mktemp("windows"), "mistral", tie=False, sliding_window=9)


@pytest.fixture(scope="module")
def banks(window_bank: Bank) -> dict[str, Bank]:
    """Banks by dtype, float64 for torch and the others for native passes."""
    native = {dtype: native_bank(window_bank, dtype) for dtype in ("float32", "bfloat16")}
    return {"float64": window_bank} | native


@pytest.fixture(params=["float64", "float32"])
def either(request: pytest.FixtureRequest, banks: dict[str, Bank]) -> Bank:
    """Each runner (torch, native) in turn."""
    return banks[request.param]


@sweep(16)
@given(data=st.data())
def test_greedy_text(data: st.DataObject, banks: dict[str, Bank]) -> None:
    bank = banks[data.draw(st.sampled_from(sorted(banks)), label="dtype")]
    fields = data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(0, 8), label="K")
    draft = data.draw(st.sampled_from(sorted(bank.drafts)), label="draft")
    if draft != "small":  # blocks outside the window are freed, so no request needs more than three of 8 positions
        fields["num_gpu_blocks_override"] = data.draw(st.sampled_from([3, 5, 9, 64]), label="blocks")
    engine = make_engine(bank.target, bank.drafts[draft], k=k, dtype=bank.dtype, **fields)
    poison(engine)
    run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k)


def test_native_text_is_transformers_own(banks: dict[str, Bank]) -> None:
    assert banks["float32"].continuations == banks["float64"].continuations


@pytest.mark.parametrize(("draft", "windowed"), [(None, True), ("equal", True), ("close", True), ("small", False)])
def test_blocks_outside_the_window_come_back(either: Bank, draft: str | None, windowed: bool) -> None:
    bank, k = either, 0 if draft is None else 3
    folder = None if draft is None else bank.drafts[draft]
    engine = make_engine(bank.target, folder, k=k, dtype=bank.dtype, block_size=8, num_gpu_blocks_override=32)
    poison(engine)
    longest = max(range(len(bank.prompts)), key=lambda i: len(bank.prompts[i]))
    (made,) = submit(engine, bank, [(longest, k, LONGEST, 0)], k, ignore_eos=True)
    scheduler, held = engine.scheduler, []
    while engine.has_unfinished():
        engine.step()
        held.append(scheduler.num_blocks - scheduler.num_free_blocks)
    assert made.output_token_ids == bank.continuations[longest][:LONGEST]
    # Behind the prompt 9 positions, 2 for the draft's first pass and 4 ahead, in blocks of 8 cut at both ends.
    assert (max(held[1:-1]) <= 4) == windowed, held


@pytest.mark.parametrize("draft", [None, "equal", "small"])
def test_memory_for_a_window_is_enough(banks: dict[str, Bank], draft: str | None) -> None:
    """Check that a pool sized for a window is enough: a request needs memory for what it holds, not for all of its
    positions. A draft with full attention also needs that of the target's layers in its group."""
    bank, k, size = banks["float64"], 0 if draft is None else 3, 8
    folder = None if draft is None else bank.drafts[draft]
    one = make_engine(bank.target, folder, k=k, block_size=size, num_gpu_blocks_override=64)
    whole, least = 128 // size, one.scheduler.least_blocks(128)
    assert (least <= 4) == (draft != "small")
    in_one_group = Blueprint(one.config, weights(bank.target, folder, "float64"))
    blueprint = in_one_group.with_kv_groups()
    given = least * blueprint.bytes_per_block
    assert given <= whole * in_one_group.bytes_per_block
    engine = make_engine(bank.target, folder, k=k, block_size=size, kv_cache_memory_bytes=given)
    assert engine.scheduler.num_blocks == least
    longest = max(range(len(bank.prompts)), key=lambda i: len(bank.prompts[i]))
    (made,) = submit(engine, bank, [(longest, k, LONGEST, 0)], k, ignore_eos=True)
    run(engine)
    assert made.output_token_ids == bank.continuations[longest][:LONGEST]
    with pytest.raises(InvalidConfigError, match=rf"{least - 1} KV blocks fit, .* needs {least}; .* least {given} "):
        make_engine(bank.target, folder, k=k, block_size=size, kv_cache_memory_bytes=given - 1)


@pytest.mark.parametrize("place", [0, 30, 59])
def test_a_fault_anywhere_in_a_chunk_is_seen(either: Bank, place: int, tmp_path: Path) -> None:
    """Check that a fault anywhere in a chunk is seen. With two layers of window 9, the last row of a chunk of 60
    depends on 17 positions only, but other requests could find the chunk's blocks."""
    folder = shutil.copytree(either.target, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine = make_engine(folder, None, k=0, dtype=either.dtype)
    prompt = [20 + i for i in range(60)]
    prompt[place] = 7
    made = request(0, prompt, k=0, max_tokens=5, engine_k=0)
    engine.add_request(made)
    run(engine)
    assert made.finish_reason == "error"
    assert not made.output_token_ids


def test_the_folder_of_another_window_is_another_model(window_bank: Bank, tmp_path: Path) -> None:
    """Check that a folder with another window is another model, so that the tests above would notice a missing
    window."""
    other = make_bank(tmp_path, "mistral", tie=False)
    assert other.continuations != window_bank.continuations

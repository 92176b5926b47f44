"""Drafts whose layers have other windows than the target's: the text is that of the target alone, and unneeded blocks
are freed."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from checkpoints import first_layers, make_checkpoint, make_eagle3
from hf_reference import generate_all, load
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.blueprint import Blueprint
from sweep import sweep

from engine.harness import (
    VOCAB,
    Bank,
    config,
    greedy_jobs,
    make_engine,
    make_prompts,
    native_bank,
    poison,
    run,
    run_greedy,
    submit,
    weights,
)
from engine.test_equivalence import engine_settings

Windows = tuple[int | None, ...]
"""Windows of some layers, None where a layer sees all positions. All windows of a model are equal."""
MakeBank = Callable[[Windows, Windows, str], Bank]


def fields_of(windows: Windows) -> dict[str, object]:
    """Return the fields of config.json for these windows."""
    sizes = [window for window in windows if window is not None]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"use_sliding_window": bool(sizes), "sliding_window": sizes[0] if sizes else None, "layer_types": kinds}


@pytest.fixture(scope="module")
def bank_of(tmp_path_factory: pytest.TempPathFactory) -> MakeBank:
    """Return a function that makes a target with the given windows, and a draft of its first layers with other
    windows."""
    folder = tmp_path_factory.mktemp("windows")

    @functools.cache
    def target(windows: Windows) -> Bank:
        path = make_checkpoint(
            folder / f"{windows}", "qwen3", seed=1, vocab=VOCAB, layers=len(windows), **fields_of(windows)
        )
        model, prompts = load(path), make_prompts()[3:12]
        return Bank(path, {}, prompts, generate_all(model, prompts, 24), [])

    @functools.cache
    def native(windows: Windows) -> Bank:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Blueprint, "with_kv_groups", lambda made: made)
            return native_bank(target(windows), "float32")

    @functools.cache
    def with_draft(windows: Windows, drafts: Windows, dtype: str) -> Bank:
        bank = target(windows) if dtype == "float64" else native(windows)
        path = folder / f"{windows} {drafts}"
        if not path.exists():
            first_layers(bank.target, path, len(drafts), **fields_of(drafts))
        return Bank(bank.target, {"draft": path}, bank.prompts, bank.continuations, [], dtype)

    return with_draft


def windows_of(layers: st.SearchStrategy[int], sizes: Sequence[int]) -> st.SearchStrategy[Windows]:
    """Draw layers with one window or none."""

    def of(count: int) -> st.SearchStrategy[Windows]:
        each = st.sampled_from(sizes).flatmap(lambda size: st.tuples(*[st.sampled_from((None, size))] * count))
        return each | st.sampled_from(sizes).map(lambda size: (size,) * count)

    return layers.flatmap(of)


@sweep(36)
@given(data=st.data())
def test_greedy_text(data: st.DataObject, bank_of: MakeBank) -> None:
    target = data.draw(windows_of(st.just(3), (5, 12)), label="target's windows")
    draft = data.draw(windows_of(st.integers(1, 2), (5, 12, 40)), label="draft's windows")
    bank = bank_of(target, draft, data.draw(st.sampled_from(["float64", "float32"]), label="dtype"))
    fields = data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(0, 5), label="K")
    fields["block_size"] = data.draw(st.sampled_from([4, 8]), label="block size")
    least = blueprint(bank, k=k, block_size=fields["block_size"]).least_blocks
    # From a pool that one long request fills to one that never runs short.
    times = data.draw(st.sampled_from([1.0, 1.1, 2.0, 8.0]), label="blocks")
    fields["num_gpu_blocks_override"] = int(times * least)
    engine = make_engine(bank.target, bank.drafts["draft"], k=k, dtype=bank.dtype, **fields)
    assert engine.runner.is_native == (bank.dtype != "float64")
    poison(engine)
    jobs = [
        (i % len(bank.prompts), own_k, min(length, 24), steps)
        for i, own_k, length, steps in data.draw(greedy_jobs(bank, k), label="requests")
    ]
    run_greedy(engine, bank, jobs, k)


def blueprint(bank: Bank, **fields: object) -> Blueprint:
    made = config(bank.target, bank.drafts["draft"], dtype=bank.dtype, **fields)  # type: ignore[arg-type]
    return Blueprint(made, weights(bank.target, bank.drafts["draft"], bank.dtype)).with_kv_groups()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("target", "draft", "first", "further"),
    [
        ((5, 5, 5), (None,), None, (5, 5)),
        ((5, 5, 5), (40,), 40, (5, 5)),
        ((5, None, 5), (12,), None, (5, 5)),
        ((12, 12, 12), (5,), 12, ()),
        ((None, None, None), (5,), None, ()),
    ],
)
def test_what_comes_back(
    target: Windows, draft: Windows, first: int | None, further: Windows, dtype: str, bank_of: MakeBank
) -> None:
    """Check which blocks are freed, by KV group. The draft is in the first group, which has the longest window."""
    bank, size, k = bank_of(target, draft, dtype), 4, 2
    made = blueprint(bank, k=k, block_size=size)
    assert (made.sliding_window, made.window_groups) == (first, further)
    engine = make_engine(bank.target, bank.drafts["draft"], k=k, dtype=dtype, block_size=size)
    poison(engine)
    (request,) = submit(engine, bank, [(3, k, 24, 0)], k, ignore_eos=True)
    scheduler, held = engine.scheduler, []
    while engine.has_unfinished():
        engine.step()
        held.append(scheduler.num_blocks - scheduler.num_free_blocks)
    run(engine)
    assert request.output_token_ids == bank.continuations[3][:24]
    # All positions, or those of a window, of the draft's first pass and of an iteration, cut at both ends.
    whole = -(-(len(bank.prompts[3]) + 22) // size)
    bounds = [whole if window is None else (window + 2 + k) // size + 2 for window in (first, *further)]
    assert max(held[-6:-1]) <= sum(bounds), held
    assert sum(bounds) < (1 + len(further)) * whole or (first is None and not further), "blocks did come back"


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("windows", [(5, 5, 5), (5, None, 5)])
def test_a_head_over_windows(windows: Windows, dtype: str, bank_of: MakeBank, tmp_path: Path) -> None:
    """Check an EAGLE-3 head over a target with sliding windows. The head has full attention, in the first KV group.
    Prompts run twice, so that the second run finds cached prefixes."""
    bank, k, size = bank_of(windows, (None,), dtype), 3, 4
    head = make_eagle3(tmp_path / "head", bank.target, seed=4, layer_ids=[1, 2])
    settings = {"k": k, "dtype": dtype, "method": "eagle3", "block_size": size, "num_gpu_blocks_override": 90}
    engine = make_engine(bank.target, head, **settings)  # type: ignore[arg-type]
    assert engine.scheduler.num_groups == 3
    poison(engine)
    for _ in range(2):
        run_greedy(engine, bank, [(i, k, 24, i % 3) for i in range(len(bank.prompts))], k)
    assert engine.scheduler.num_cached_tokens > 0
    assert engine.scheduler.acceptance().drafts > 0


def test_events_of_one_group(bank_of: MakeBank) -> None:
    """Check that a target in which every layer has the same window is not split into KV groups if KV events are on.
    Without events it is."""
    bank, fields = bank_of((5, 5, 5), (None,), "float64"), {"k": 2, "block_size": 4}
    assert blueprint(bank, **fields).window_groups != ()
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    assert blueprint(bank, kv_events_config=events, **fields).window_groups == ()

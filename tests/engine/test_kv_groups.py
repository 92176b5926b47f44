"""Models some of whose layers see the last positions only: KV groups change the memory that a text takes, not the
text."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from specrs.core import FINISH_LENGTH, HEADER_FIELDS, PLAN_LAUNCH
from specrs.engine.blueprint import Blueprint
from specrs.models.dense import Dense
from sweep import sweep

from engine.harness import (
    LONGEST,
    Bank,
    config,
    greedy_jobs,
    make_bank,
    make_engine,
    poison,
    run,
    run_greedy,
    submit,
    weights,
)
from engine.test_equivalence import engine_settings

MIXED: dict[str, dict[str, object]] = {
    # windows 9, 9, all, 9, 9, all: two layers in each of three groups
    "gemma3_text": {"layers": 6, "sliding_window_pattern": 3},
    # all, then twice 11: a group each
    "qwen2": {"layers": 3, "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
}


@pytest.fixture(scope="module", params=MIXED)
def mixed_bank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Targets with layers of both kinds."""
    return make_bank(tmp_path_factory.mktemp(request.param), request.param, **MIXED[request.param])


def blueprint(bank: Bank, draft: str | None = None, **fields: object) -> Blueprint:
    """In KV groups where the engine's would be."""
    folder, k = (None, 0) if draft is None else (bank.drafts[draft], 3)
    made = config(bank.target, folder, k=k, **fields)
    return Blueprint(made, weights(bank.target, folder, "float64")).with_kv_groups()


@sweep(12)
@given(data=st.data())
def test_greedy_text(data: st.DataObject, mixed_bank: Bank) -> None:
    bank, fields = mixed_bank, data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(0, 8), label="K")
    draft = data.draw(st.sampled_from(sorted(bank.drafts)), label="draft")
    fields["block_size"] = data.draw(st.sampled_from([4, 8]), label="block size")
    least = blueprint(bank, draft, block_size=fields["block_size"]).least_blocks
    # From a pool that one long request fills to one that never runs short.
    times = data.draw(st.sampled_from([1.0, 1.1, 2.0, 8.0]), label="blocks")
    fields["num_gpu_blocks_override"] = int(times * least)
    engine = make_engine(bank.target, bank.drafts[draft], k=k, **fields)
    assert engine.scheduler.num_groups == 3
    poison(engine)
    run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k)


@pytest.mark.parametrize("draft", [None, "close"])
def test_a_prefix_is_found_in_all_groups(mixed_bank: Bank, draft: str | None) -> None:
    bank, k = mixed_bank, 0 if draft is None else 3
    engine = make_engine(bank.target, draft and bank.drafts[draft], k=k, block_size=8, num_gpu_blocks_override=256)
    poison(engine)
    longest = max(range(len(bank.prompts)), key=lambda i: len(bank.prompts[i]))
    for cached in (0, (len(bank.prompts[longest]) - 1) // 8 * 8):
        before = engine.scheduler.num_cached_tokens
        (made,) = submit(engine, bank, [(longest, k, LONGEST, 0)], k, ignore_eos=True)
        run(engine)
        assert made.output_token_ids == bank.continuations[longest][:LONGEST]
        assert engine.scheduler.num_cached_tokens - before == cached


def test_memory_for_what_is_held_is_enough(mixed_bank: Bank) -> None:
    made = blueprint(mixed_bank, block_size=8)
    given = made.least_blocks * made.bytes_per_block
    fields = {"k": 0, "block_size": 8, "kv_cache_memory_bytes": given}
    engine = make_engine(mixed_bank.target, None, **fields)  # type: ignore[arg-type]
    longest = max(range(len(mixed_bank.prompts)), key=lambda i: len(mixed_bank.prompts[i]))
    (request,) = submit(engine, mixed_bank, [(longest, 0, LONGEST, 0)], 0, ignore_eos=True)
    run(engine)
    assert request.output_token_ids == mixed_bank.continuations[longest][:LONGEST]
    cache = engine.runner.kv_cache
    tensors = {layer.data_ptr(): layer for layer in cache.layers}.values()
    assert sum(layer[:-1].numel() * layer.element_size() for layer in tensors) == given
    assert len(tensors) == (made.weights.target.num_layers + 2) // 3


def test_a_quarter_of_the_memory_for_32k_positions(tmp_path: Path) -> None:
    """Five of six layers with windows of 1,024, by what a request holds at most, a launch of 2,048 tokens and all."""
    length = 1 << 15
    small = {"kv_heads": 1, "group": 1, "head_dim": 16, "hidden": 32, "intermediate": 32}
    fields = {"layers": 6, "sliding_window_pattern": 6, "sliding_window": 1024, "max_position_embeddings": length}
    target = make_checkpoint(tmp_path, "gemma3_text", vocab=64, **small, **fields)  # type: ignore[arg-type]
    made = config(target, None, k=0, max_model_len=length, max_num_seqs=1, max_num_batched_tokens=2048, block_size=16)
    one = Blueprint(made, weights(target, None, "float64"))
    several = one.with_kv_groups()
    assert isinstance(several.weights.target, Dense)
    assert len(several.window_groups) == 5
    grouped, whole = (peak_blocks(each, length) * each.bytes_per_block for each in (several, one))
    assert grouped <= 0.25 * whole, grouped / whole


def peak_blocks(made: Blueprint, length: int) -> int:
    """The most blocks that a request holds whose prompt is all but two of `length` tokens; no model runs."""
    scheduler, peak, launch = made.scheduler(length), 0, 0
    scheduler.add_request(0, np.ones(length - 2, np.int64), limit=length)
    record, settled = np.zeros(scheduler.record_size, np.int64), np.zeros(scheduler.settled_size, np.int64)
    sections, layout = scheduler.results_layout(), scheduler.record_layout()
    while scheduler.plan(record) == PLAN_LAUNCH:
        peak = max(peak, scheduler.num_blocks - scheduler.num_free_blocks)
        emits = record[HEADER_FIELDS.index("num_decode")] or record[layout["chunk_is_last"][0]]
        results = np.zeros(scheduler.results_size, np.int64)
        results[sections["num_emitted"][0]] = emits
        if emits and record[layout["entry_n_upper"][0]] == length - 1:
            results[sections["finish_reason"][0]] = FINISH_LENGTH
        scheduler.settle(launch, results, settled)
        launch += 1
    assert not scheduler.has_unfinished()
    return peak


def test_one_group_where_several_save_nothing(mixed_bank: Bank) -> None:
    """A context within the windows; a draft as large as the target, which has its KV in every block, in large ones."""
    assert blueprint(mixed_bank, block_size=8).window_groups != ()
    assert blueprint(mixed_bank, block_size=8, max_model_len=10).window_groups == ()
    assert blueprint(mixed_bank, "equal", block_size=32).window_groups == ()

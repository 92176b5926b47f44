"""Models in which some layers have windows: KV groups change the memory that a text takes, not the text."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from models.native_passes import tensors_of
from numpy.typing import NDArray
from specrs.backends.blueprint import Blueprint
from specrs.core import FINISH_LENGTH, HEADER_FIELDS, PLAN_STEP
from specrs.engine.engine import Engine
from specrs.models.torch_decoder import TorchDecoder
from sweep import sweep

from engine.harness import (
    LONGEST,
    VOCAB,
    Bank,
    config,
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

MIXED: dict[str, dict[str, object]] = {
    # windows 9, 9, all, 9, 9, all: two layers in each of three groups
    "gemma3_text": {"layers": 6, "sliding_window_pattern": 3},
    # all, then twice 11: a group each
    "qwen2": {"layers": 3, "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
}


@pytest.fixture(scope="module", params=MIXED)
def mixed_bank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Targets with windowed and full layers. One draft has full attention in all layers."""
    folder = tmp_path_factory.mktemp(request.param)
    bank = make_bank(folder, request.param, **MIXED[request.param])
    return replace(
        bank, drafts=bank.drafts | {"plain": make_checkpoint(folder / "plain", "qwen3", seed=4, vocab=VOCAB)}
    )


@pytest.fixture(scope="module")
def banks(mixed_bank: Bank) -> dict[str, Bank]:
    """Banks by dtype. The native runner's texts come from an engine with all layers in one group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blueprint, "with_kv_groups", lambda made: made)
        native = {dtype: native_bank(mixed_bank, dtype) for dtype in ("float32", "bfloat16")}
    assert native["float32"].continuations == mixed_bank.continuations, "transformers' own"
    return {"float64": mixed_bank} | native


@pytest.fixture(params=["float64", "float32"])
def either(request: pytest.FixtureRequest, banks: dict[str, Bank]) -> Bank:
    """Each runner (torch, native) in turn."""
    return banks[request.param]


def blueprint(bank: Bank, draft: str | None = None, **fields: object) -> Blueprint:
    """Return a blueprint with KV groups exactly if the engine would have them."""
    folder, k = (None, 0) if draft is None else (bank.drafts[draft], 3)
    made = config(bank.target, folder, k=k, dtype=bank.dtype, **fields)
    return Blueprint(made, weights(bank.target, folder, bank.dtype)).with_kv_groups()


@sweep(36)
@given(data=st.data())
def test_greedy_text(data: st.DataObject, banks: dict[str, Bank]) -> None:
    bank = banks[data.draw(st.sampled_from(sorted(banks)), label="dtype")]
    fields = data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(0, 8), label="K")
    draft = data.draw(st.sampled_from(sorted(bank.drafts)), label="draft")
    fields["block_size"] = data.draw(st.sampled_from([4, 8]), label="block size")
    least = blueprint(bank, draft, block_size=fields["block_size"]).least_blocks
    # From a pool that one long request fills to one that never runs short.
    times = data.draw(st.sampled_from([1.0, 1.1, 2.0, 8.0]), label="blocks")
    fields["num_gpu_blocks_override"] = int(times * least)
    engine = make_engine(bank.target, bank.drafts[draft], k=k, dtype=bank.dtype, **fields)
    assert engine.scheduler.num_groups == 3
    assert engine.runner.is_native == (bank.dtype != "float64")
    poison(engine)
    more = {"logprobs": 1} if data.draw(st.booleans(), label="log probabilities") else {}
    run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k, **more)


@pytest.mark.parametrize("draft", [None, "close", "plain"])
def test_a_prefix_is_found_in_all_groups(either: Bank, draft: str | None) -> None:
    bank, k = either, 0 if draft is None else 3
    fields = {"k": k, "dtype": bank.dtype, "block_size": 8, "num_gpu_blocks_override": 256}
    engine = make_engine(bank.target, draft and bank.drafts[draft], **fields)  # type: ignore[arg-type]
    assert engine.scheduler.num_groups == 3
    poison(engine)
    longest = max(range(len(bank.prompts)), key=lambda i: len(bank.prompts[i]))
    for cached in (0, (len(bank.prompts[longest]) - 1) // 8 * 8):
        before = engine.scheduler.num_cached_tokens
        (made,) = submit(engine, bank, [(longest, k, LONGEST, 0)], k, ignore_eos=True)
        run(engine)
        assert made.output_token_ids == bank.continuations[longest][:LONGEST]
        assert engine.scheduler.num_cached_tokens - before == cached


def kv_bytes(engine: Engine) -> int:
    """Bytes of the target's KV cache without the scratch block."""
    tensors = {layer.data_ptr(): layer for layer in tensors_of(engine.runner.kv_cache).layers}.values()
    return sum(layer[:-1].numel() * layer.element_size() for layer in tensors)


def test_memory_for_what_is_held_is_enough(either: Bank) -> None:
    made = blueprint(either, block_size=8)
    given = made.least_blocks * made.bytes_per_block
    fields = {"k": 0, "block_size": 8, "kv_cache_memory_bytes": given, "dtype": either.dtype}
    engine = make_engine(either.target, None, **fields)  # type: ignore[arg-type]
    longest = max(range(len(either.prompts)), key=lambda i: len(either.prompts[i]))
    (request,) = submit(engine, either, [(longest, 0, LONGEST, 0)], 0, ignore_eos=True)
    run(engine)
    assert request.output_token_ids == either.continuations[longest][:LONGEST]
    assert kv_bytes(engine) == given
    of_layers = {layer.data_ptr() for layer in tensors_of(engine.runner.kv_cache).layers}
    assert len(of_layers) == (made.weights.target.num_layers + 2) // 3


def make_long_target(folder: Path, length: int) -> Path:
    """Write a target in which five of six layers have a window of a 32nd of the context."""
    small = {"kv_heads": 1, "group": 1, "head_dim": 16, "hidden": 32, "intermediate": 32}
    fields = {"layers": 6, "sliding_window_pattern": 6, "sliding_window": length // 32}
    return make_checkpoint(folder, "gemma3_text", vocab=64, max_position_embeddings=length, **small, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def long_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in which five of six layers have a window of 1,024, in a context of 32,768."""
    return make_long_target(tmp_path_factory.mktemp("long"), 1 << 15)


LONG = {"max_model_len": 1 << 15, "max_num_seqs": 1, "max_num_batched_tokens": 2048, "block_size": 16}


@pytest.mark.parametrize(("depth", "chunk"), [(1, 2048), (2, 512), (2, 1024)])
def test_a_quarter_of_the_memory_for_32k_positions(long_target: Path, depth: int, chunk: int) -> None:
    """Check the peak memory of a request of 32k positions while steps of `chunk` tokens are in flight (two on a GPU).
    KV groups need at most a quarter of what a single group needs."""
    several, one = blueprints(long_target, depth, max_num_batched_tokens=chunk)
    assert several.depth == depth
    grouped, whole = (peak_blocks(made, 1 << 15) * made.bytes_per_block for made in (several, one))
    assert grouped <= 0.25 * whole, grouped / whole


def test_a_quarter_of_the_memory_is_enough_with_steps_in_flight(
    long_target: Path,
) -> None:
    """Check that a quarter of a single group's memory is enough with steps in flight: a row that is short of blocks
    waits for earlier steps to settle."""
    several, one = blueprints(long_target, 2)
    blocks = int(0.25 * one.least_blocks * one.bytes_per_block) // several.bytes_per_block
    assert peak_blocks(several, 1 << 15) > blocks
    assert peak_blocks(several, 1 << 15, blocks) <= blocks


def blueprints(target: Path, depth: int, **fields: object) -> tuple[Blueprint, Blueprint]:
    """Return the blueprint in KV groups, and that with all layers in one group."""
    made = config(target, None, k=0, **(LONG | fields))
    one = Blueprint(made, weights(target, None, "float64"), depth)
    several = one.with_kv_groups()
    assert isinstance(several.weights.target, TorchDecoder)
    assert len(several.window_groups) == 5
    return several, one


def test_the_native_runner_serves_a_whole_context_in_a_quarter_of_the_memory(tmp_path: Path) -> None:
    """Check that the native runner serves a whole context in a quarter of the memory, with the text of one group.

    The context, window and steps are an eighth of those of the test above, because attention then takes a sixtieth of
    the time.
    """
    length = 1 << 12
    target = make_long_target(tmp_path, length)
    sizes = LONG | {"max_model_len": length, "max_num_batched_tokens": 256}
    prompt = [3 + i * i % 61 for i in range(length - 24)]
    texts: list[list[int]] = []
    taken: list[int] = []
    for in_one_group in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if in_one_group:
                patch.setattr(Blueprint, "with_kv_groups", lambda made: made)
            made = config(target, None, k=0, dtype="float32", **sizes)
            least = Blueprint(made, weights(target, None, "float32")).with_kv_groups().least_blocks
            engine = make_engine(target, None, k=0, dtype="float32", num_gpu_blocks_override=least, **sizes)
        assert engine.runner.is_native
        poison(engine)
        job = request(0, prompt, k=0, max_tokens=24, engine_k=0, ignore_eos=True)
        engine.add_request(job)
        run(engine)
        assert engine.scheduler.num_preemptions == 0
        texts.append(job.output_token_ids)
        taken.append(kv_bytes(engine))
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 4
    assert taken[1] <= 0.25 * taken[0], taken[1] / taken[0]


def test_a_plain_target_with_a_draft_of_groups(banks: dict[str, Bank]) -> None:
    """Check a target with one KV group and a draft that would have several: the draft keeps its KV in the target's
    group."""
    for bank in banks.values():
        plain = bank.drafts["plain"]
        texts = []
        for k in (0, 5):
            engine = make_engine(plain, bank.target if k else None, k=k, dtype=bank.dtype, block_size=8)
            assert engine.scheduler.num_groups == 1
            poison(engine)
            jobs = submit(engine, bank, [(i, k, LONGEST, i % 3) for i in range(6)], k, ignore_eos=True)
            run(engine)
            texts.append([job.output_token_ids for job in jobs])
        assert texts[0] == texts[1]


def peak_blocks(made: Blueprint, length: int, blocks: int | None = None) -> int:
    """Return the maximum number of blocks that a request of `length` tokens holds, in a pool of `blocks`; None: a pool
    with enough. All but two tokens are its prompt.

    No model runs. As many steps are in flight as the engine has.
    """
    scheduler, peak, step_id = made.scheduler(blocks or length), 0, 0
    scheduler.add_request(0, np.ones(length - 2, np.int64), limit=length)
    record, settled = np.zeros(scheduler.record_size, np.int64), np.zeros(scheduler.settled_size, np.int64)
    sections, layout = scheduler.results_layout(), scheduler.record_layout()
    in_flight: list[NDArray[np.int64]] = []
    while scheduler.has_unfinished():
        while len(in_flight) < made.depth and scheduler.plan(record) == PLAN_STEP:
            peak = max(peak, scheduler.num_blocks - scheduler.num_free_blocks)
            emits = record[HEADER_FIELDS.index("num_decode")] or record[layout["chunk_is_last"][0]]
            results = np.zeros(scheduler.results_size, np.int64)
            results[sections["num_emitted"][0]] = emits
            if emits and record[layout["seq_n_upper"][0]] == length - 1:
                results[sections["finish_reason"][0]] = FINISH_LENGTH
            in_flight.append(results)
        scheduler.settle(step_id, in_flight.pop(0), settled)
        step_id += 1
    assert scheduler.num_preemptions == 0
    return peak


def test_one_group_where_several_save_nothing(mixed_bank: Bank) -> None:
    """Check that there is one group where several would save nothing: a context within the windows, or a draft as large
    as the target."""
    assert blueprint(mixed_bank, block_size=8).window_groups != ()
    assert blueprint(mixed_bank, block_size=8, max_model_len=10).window_groups == ()
    assert blueprint(mixed_bank, "equal", block_size=32).window_groups == ()

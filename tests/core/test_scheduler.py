"""The Python binding of the scheduler: buffers and errors. Its decisions are tested in Rust."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from specrs import core
from specrs.core import CachedDrafter, HiddenDrafter, Scheduler

CONFIG: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 32,
    "num_blocks": 16,
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "num_speculative_tokens": 3,
    "drafter": CachedDrafter(max_model_len=32),
}
PROMPT = np.arange(5)


def buffers(scheduler: Scheduler) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    sizes = scheduler.record_size, scheduler.results_size, scheduler.settled_size
    record, results, settled = (np.zeros(size, np.int64) for size in sizes)
    return record, results, settled


def section(buffer: NDArray[np.int64], layout: dict[str, tuple[int, int]], name: str) -> NDArray[np.int64]:
    offset, length = layout[name]
    return buffer[offset : offset + length]


def test_one_request_from_prompt_to_length() -> None:
    scheduler = Scheduler(**CONFIG)
    record, results, settled = buffers(scheduler)
    assert scheduler.plan(record) == core.PLAN_IDLE
    scheduler.add_request(7, PROMPT, limit=10, num_speculative_tokens=3)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.has_unfinished()) == (1, 0, True)
    text: list[int] = []
    reason = core.FINISH_NONE
    while reason == core.FINISH_NONE:
        assert scheduler.plan(record) == core.PLAN_STEP
        assert scheduler.num_in_flight == 1
        assert scheduler.plan(record.copy()) == core.PLAN_SETTLE_FIRST
        header = dict(zip(core.HEADER_FIELDS, record.tolist(), strict=False))
        if not text:
            assert (header["num_decode"], header["num_prefill"], header["num_prefill_tokens"]) == (0, 1, 5)
            assert (header["num_admitted"], header["num_upload_tokens"]) == (1, 5)
            assert section(record, scheduler.record_layout(), "upload_token")[:5].tolist() == PROMPT.tolist()
            assert section(record, scheduler.record_layout(), "prefill_slot")[:5].tolist() == [0, 1, 2, 3, 4]
        else:
            assert header["num_decode"] == 1
        results[:] = 0
        layout = scheduler.results_layout()
        drafted = min(int(section(record, scheduler.record_layout(), "seq_k")[0]), 10 - 5 - len(text) - 1)
        section(results, layout, "num_drafted")[0] = drafted
        section(results, layout, "num_emitted")[0] = 1
        section(results, layout, "tokens")[0] = 100 + len(text)
        section(results, layout, "finish_reason")[0] = core.FINISH_LENGTH if len(text) == 4 else core.FINISH_NONE
        scheduler.settle(header["step_id"], results, settled)
        scheduler.check_integrity()
        layout = scheduler.settled_layout()
        assert section(settled, layout, "request_id")[0] == 7
        assert section(settled, layout, "num_new")[0] == 1
        text.append(100 + len(text))
        reason = int(section(settled, layout, "finish_reason")[0])
    assert (text, reason) == ([100, 101, 102, 103, 104], core.FINISH_LENGTH)
    assert scheduler.plan(record) == core.PLAN_IDLE
    assert not scheduler.has_unfinished()
    assert scheduler.num_free_blocks == scheduler.num_blocks == 16
    statistics = scheduler.acceptance()
    assert statistics.drafts > 0
    assert statistics.acceptance_length == 1.0
    statistics.reset()
    assert scheduler.acceptance().drafts > 0, "acceptance() is a copy"
    assert scheduler.reset_prefix_cache()


def test_layouts_tile_their_buffers() -> None:
    scheduler = Scheduler(**CONFIG)
    for layout, size in [
        (scheduler.record_layout(), scheduler.record_size),
        (scheduler.results_layout(), scheduler.results_size),
        (scheduler.settled_layout(), scheduler.settled_size),
    ]:
        end = 0
        for offset, length in layout.values():
            assert offset == end
            end += length
        assert end == size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0: "),
        ({"max_num_seqs": -1}, "max_num_seqs=-1: "),
        ({"max_model_len": 1}, "max_model_len=1: "),
        ({"num_blocks": 0}, "num_blocks=0: "),
        ({"window_groups": [4, 1]}, "window_groups=1: "),
        ({"window_groups": [-1]}, "window_groups=-1: "),
        ({"block_size": 0}, "block_size=0: "),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0: "),
        ({"num_speculative_tokens": -5}, "num_speculative_tokens=-5: "),
        ({"drafter": CachedDrafter(max_model_len=0)}, "drafter.max_model_len=0: "),
        ({"drafter": CachedDrafter(max_model_len=9, max_draft_lag=0)}, "drafter.max_draft_lag=0: "),
        ({"drafter": CachedDrafter(max_model_len=9, cost_ratio=float("nan"))}, "drafter.cost_ratio=NaN: "),
        ({"drafter": CachedDrafter(max_model_len=9, cost_ratio=0.0)}, "drafter.cost_ratio=0: "),
        ({"drafter": HiddenDrafter(max_model_len=0, max_draft_lag=9)}, "drafter.max_model_len=0: "),
        ({"drafter": HiddenDrafter(max_model_len=9, max_draft_lag=2)}, "drafter.max_draft_lag=2: "),
        ({"max_in_flight": 0}, "max_in_flight=0: "),
        ({"hash_key": b"short"}, "hash_key=5 bytes"),
    ],
)
def test_config_errors_name_field_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(core.InvalidConfigError, match=message):
        Scheduler(**CONFIG | change)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"request_id": -1}, "request_id=-1: "),
        ({"token_ids": np.zeros(0, np.int64)}, "token_ids"),
        ({"token_ids": np.array([1, -4, 2])}, "-4 at index 1"),
        ({"stop_token_ids": np.array([-9])}, "stop_token_ids=-9"),
        ({"limit": 5}, "limit=5: must be at least 6"),
        ({"limit": -5}, "limit=-5: "),
        ({"limit": 33}, "limit=33: must be at most max_model_len=32"),
        ({"min_tokens": -1}, "min_tokens=-1: "),
        ({"num_speculative_tokens": 4}, "num_speculative_tokens=4: must be at most 3"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1: "),
    ],
)
def test_request_errors_name_field_and_value(parameters: dict[str, Any], message: str) -> None:
    scheduler = Scheduler(**CONFIG)
    arguments: dict[str, Any] = {"request_id": 1, "token_ids": PROMPT, "limit": 10} | parameters
    with pytest.raises(core.InvalidRequestError, match=message):
        scheduler.add_request(**arguments)
    assert not scheduler.has_unfinished()


def test_a_limit_beyond_the_pool_is_rejected() -> None:
    scheduler = Scheduler(**CONFIG | {"num_blocks": 3})
    scheduler.add_request(1, PROMPT, limit=12)
    with pytest.raises(core.InvalidRequestError, match="limit=13, which needs 4 blocks"):
        scheduler.add_request(2, PROMPT, limit=13)


def test_life_cycle_errors() -> None:
    scheduler = Scheduler(**CONFIG)
    record, results, settled = buffers(scheduler)
    with pytest.raises(core.UnknownRequestError, match="request_id=3: "):
        scheduler.abort(3)
    with pytest.raises(core.UnknownRequestError, match="request_id=3: "):
        scheduler.preempt(3)
    scheduler.add_request(3, PROMPT, limit=10)
    with pytest.raises(core.DuplicateRequestError, match="request_id=3: "):
        scheduler.add_request(3, PROMPT, limit=10)
    with pytest.raises(core.NotRunningError, match="request_id=3: "):
        scheduler.preempt(3)
    with pytest.raises(core.SettleOrderError, match="step_id=0: "):
        scheduler.settle(0, results, settled)
    assert scheduler.plan(record) == core.PLAN_STEP
    for wrong in (1, -1):
        with pytest.raises(core.SettleOrderError, match=f"step_id={wrong}: "):
            scheduler.settle(wrong, results, settled)
    scheduler.preempt(3)
    assert scheduler.num_preemptions == 1
    scheduler.abort(3)
    scheduler.settle(0, results, settled)
    assert section(settled, scheduler.settled_layout(), "request_id")[0] == -1
    assert not scheduler.has_unfinished()
    assert scheduler.num_free_blocks == 16


def test_impossible_results_change_nothing() -> None:
    scheduler = Scheduler(**CONFIG)
    record, results, settled = buffers(scheduler)
    scheduler.add_request(3, PROMPT, limit=10)
    scheduler.plan(record)
    section(results, scheduler.results_layout(), "num_emitted")[0] = 2
    with pytest.raises(core.InvalidResultsError, match="step 0, sequence 0: num_emitted=2: "):
        scheduler.settle(0, results, settled)
    assert scheduler.num_in_flight == 1
    section(results, scheduler.results_layout(), "num_emitted")[0] = 1
    scheduler.settle(0, results, settled)
    scheduler.check_integrity()


def readonly(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def misaligned(array: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.zeros(array.nbytes + 1, np.uint8)[1:].view(np.int64)


WRONG: list[tuple[Callable[[NDArray[np.int64]], Any], str]] = [
    (lambda a: a.tolist(), "is a list; must be a numpy array"),
    (lambda a: a.astype(np.int32), "dtype is int32; must be int64"),
    (lambda a: a.astype(np.uint64), "dtype is uint64; must be int64"),
    (lambda a: a.astype(np.float64), "dtype is float64; must be int64"),
    (lambda a: a.astype(">i8"), "dtype is >i8; must be int64"),
    (lambda a: a.reshape(1, -1), r"shape is \[1, \d+\]; must have 1 dimension"),
    (lambda a: np.repeat(a, 2)[::2], r"strides are \[16\] bytes"),
    (lambda a: a[::-1], r"strides are \[-8\] bytes"),
    (misaligned, r"must be a C-contiguous, aligned array"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG)
def test_wrong_buffers_change_nothing(spoil: Callable[[NDArray[np.int64]], Any], message: str) -> None:
    scheduler = Scheduler(**CONFIG)
    record, results, settled = buffers(scheduler)
    with pytest.raises(core.InvalidBufferError, match=f"token_ids: .*{message}"):
        scheduler.add_request(1, spoil(PROMPT), limit=10)
    with pytest.raises(core.InvalidBufferError, match=f"stop_token_ids: .*{message}"):
        scheduler.add_request(1, PROMPT, limit=10, stop_token_ids=spoil(PROMPT))
    assert not scheduler.has_unfinished()
    scheduler.add_request(1, PROMPT, limit=10)
    with pytest.raises(core.InvalidBufferError, match=f"record: .*{message}"):
        scheduler.plan(spoil(record))
    assert (scheduler.num_waiting, scheduler.num_in_flight) == (1, 0)
    scheduler.plan(record)
    with pytest.raises(core.InvalidBufferError, match=f"results: .*{message}"):
        scheduler.settle(0, spoil(results), settled)
    with pytest.raises(core.InvalidBufferError, match=f"settled: .*{message}"):
        scheduler.settle(0, results, spoil(settled))
    assert scheduler.num_in_flight == 1
    scheduler.check_integrity()


@pytest.mark.parametrize("off", [-1, 1])
def test_wrong_sizes_name_both_numbers(off: int) -> None:
    scheduler = Scheduler(**CONFIG)
    record, results, settled = buffers(scheduler)
    scheduler.add_request(1, PROMPT, limit=10)

    def resized(buffer: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.zeros(buffer.size + off, np.int64)

    with pytest.raises(core.InvalidBufferError, match=f"record={record.size + off} .*{record.size}"):
        scheduler.plan(resized(record))
    scheduler.plan(record)
    with pytest.raises(core.InvalidBufferError, match=f"results={results.size + off} .*{results.size}"):
        scheduler.settle(0, resized(results), settled)
    with pytest.raises(core.InvalidBufferError, match=f"settled={settled.size + off} .*{settled.size}"):
        scheduler.settle(0, results, resized(settled))
    assert scheduler.num_in_flight == 1


def test_outputs_must_be_writable_and_apart() -> None:
    scheduler = Scheduler(**CONFIG)
    record, results, settled = buffers(scheduler)
    scheduler.add_request(1, readonly(PROMPT.copy()), limit=10)
    with pytest.raises(core.InvalidBufferError, match="record: is read-only"):
        scheduler.plan(readonly(record.copy()))
    scheduler.plan(record)
    with pytest.raises(core.InvalidBufferError, match="settled: is read-only"):
        scheduler.settle(0, results, readonly(settled))
    both = np.zeros(scheduler.results_size, np.int64)
    with pytest.raises(core.InvalidBufferError, match="settled: shares memory"):
        scheduler.settle(0, both, both[: scheduler.settled_size])
    assert scheduler.num_in_flight == 1
    apart = np.zeros(scheduler.results_size + scheduler.settled_size, np.int64)
    results, settled = apart[: scheduler.results_size], apart[scheduler.results_size :]
    section(results, scheduler.results_layout(), "num_emitted")[0] = 1
    scheduler.settle(0, results, settled)
    assert section(settled, scheduler.settled_layout(), "request_id")[0] == 1


def test_prompts_are_copied() -> None:
    scheduler = Scheduler(**CONFIG)
    record, *_ = buffers(scheduler)
    prompt = PROMPT.copy()
    scheduler.add_request(1, prompt, limit=10)
    prompt[:] = 99
    scheduler.plan(record)
    assert section(record, scheduler.record_layout(), "upload_token")[:5].tolist() == PROMPT.tolist()


def run_alone(scheduler: Scheduler, request_id: int, prompt: NDArray[np.int64], **parameters: Any) -> list[Any]:
    """Run a request for one token. Return the KV events of its steps."""
    record, results, settled = buffers(scheduler)
    section(results, scheduler.results_layout(), "num_emitted")[0] = 1
    section(results, scheduler.results_layout(), "finish_reason")[0] = core.FINISH_LENGTH
    scheduler.add_request(request_id, prompt, limit=len(prompt) + 1, **parameters)
    events = []
    while scheduler.plan(record) == core.PLAN_STEP:
        events += scheduler.take_kv_events()
        scheduler.settle(int(record[core.HEADER_FIELDS.index("step_id")]), results, settled)
        events += scheduler.take_kv_events()
    return events


def test_a_request_by_its_id() -> None:
    scheduler = Scheduler(**CONFIG)
    record, _, _ = buffers(scheduler)
    for request_id in (7, 3):
        scheduler.add_request(request_id, PROMPT, limit=10, num_speculative_tokens=3)
    assert scheduler.request_ids() == [7, 3]
    view = scheduler.request(7)
    assert (view.state, view.row, view.num_tokens, view.limit) == ("waiting", None, 5, 10)
    assert view.block_table.tolist() == []
    assert scheduler.plan(record) == core.PLAN_STEP
    view = scheduler.request(7)
    assert (view.row, view.num_computed_tokens, view.num_draft_computed_tokens) == (0, 5, 0)
    assert (view.state, view.num_in_flight, view.num_speculative_tokens) == ("decode", 1, 3)
    assert view.block_table.dtype == np.int64
    assert view.block_table.tolist() == [0, 1]
    with pytest.raises(core.UnknownRequestError, match="request_id=8: "):
        scheduler.request(8)


def test_kv_events_and_extra_keys() -> None:
    scheduler = Scheduler(**(CONFIG | {"num_blocks": 4, "max_model_len": 16, "enable_kv_cache_events": True}))
    prompt = np.arange(9)
    (stored,) = run_alone(scheduler, 0, prompt, extra_keys=[(5, b"image")])
    assert isinstance(stored, core.BlockStored)
    assert stored.block_hashes == core.BlockHasher().hash_blocks(prompt, 4, extra_keys=[(5, b"image")])
    assert (stored.parent_block_hash, stored.block_size, stored.extra_keys) == (None, 4, [[], [(1, b"image")]])
    assert stored.token_ids.tolist() == prompt[:8].tolist()
    assert run_alone(scheduler, 1, prompt, extra_keys=[(5, b"image")]) == []
    assert scheduler.num_cached_tokens == 8
    (other,) = run_alone(scheduler, 2, prompt, extra_keys=[(5, b"other")])
    assert scheduler.num_cached_tokens == 8 + 4
    assert (other.parent_block_hash, other.token_ids.tolist()) == (stored.block_hashes[0], prompt[4:8].tolist())
    removed, *_ = run_alone(scheduler, 3, prompt + 50)
    assert isinstance(removed, core.BlockRemoved)
    assert set(removed.block_hashes) < {*stored.block_hashes, *other.block_hashes}
    assert removed.has_draft == [False] * len(removed.blocks)
    assert scheduler.reset_prefix_cache()
    (cleared,) = scheduler.take_kv_events()
    assert isinstance(cleared, core.AllBlocksCleared)


@pytest.mark.parametrize("keys", [[(9, b"x")], [(-1, b"x")], [(2, b"x"), (1, b"x")], [(0, b"")]])
def test_wrong_extra_keys_are_rejected(keys: list[tuple[int, bytes]]) -> None:
    scheduler = Scheduler(**CONFIG)
    with pytest.raises(core.InvalidRequestError, match="extra_keys"):
        scheduler.add_request(0, np.arange(9), limit=10, extra_keys=keys)
    assert not scheduler.has_unfinished()

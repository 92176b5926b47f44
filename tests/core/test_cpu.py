"""Arguments that the parts of the native pass reject: arrays with a wrong layout, and calls that do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from specrs import core
from specrs.core import InvalidBufferError, InvalidConfigError, PackedMatrix

from core.cpu_parts import HIDDEN, VOCAB, arrays, kv_layers, model, scheduler, state, weights


def misaligned(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Return an array whose first element is one byte off alignment."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.zeros(size + 1, np.uint8)[1:].view(dtype).reshape(shape)


def layer_with(field: str, value: object) -> list[dict[str, object]]:
    (layer,) = arrays()["layers"]  # type: ignore[misc]
    return [{**layer, field: value}]


FLOATS = "must be float32, or uint16 with the bits of bfloat16"
BAD_WEIGHTS: dict[str, tuple[dict[str, object], str]] = {
    "misaligned": (
        {"embedding": misaligned((VOCAB, HIDDEN))},
        r"^embedding: strides are \[32, 4\] bytes for shape \[11, 8\]; must be a C-contiguous, aligned array$",
    ),
    "transposed": (
        {"embedding": np.zeros((HIDDEN, VOCAB), np.float32).T},
        r"^embedding: strides are \[4, 44\] bytes for shape \[11, 8\]; must be a C-contiguous, aligned array$",
    ),
    "every second row": (
        {"lm_head": [(np.zeros((2 * VOCAB, HIDDEN), np.float32)[::2], None)]},
        r"^lm_head.parts\[0\].weight: strides are \[64, 4\]",
    ),
    "float64": ({"final_norm": np.ones(HIDDEN)}, rf"^final_norm: dtype is float64; {FLOATS}$"),
    "int16": ({"embedding": np.zeros((VOCAB, HIDDEN), np.int16)}, rf"^embedding: dtype is int16; {FLOATS}$"),
    "no array": ({"embedding": [[1.0]]}, r"^embedding: is a list; must be a numpy array$"),
    "rank": ({"embedding": np.zeros(VOCAB * HIDDEN, np.float32)}, r"^embedding: shape is \[88\]; must have 2 dim"),
    "rows": (
        {"embedding": np.zeros((VOCAB - 1, HIDDEN), np.float32)},
        r"^embedding=80 elements: must be 88$",
    ),
    "a rotation too few": (
        {"rotations": ([([1.0], 1.0)], [])},
        "^rotations of layers=0 elements: must be 1$",
    ),
    "a rotation of too many features": (
        {"rotations": ([([1.0, 2.0, 3.0], 1.0)], [0])},
        r"^rotations\[0\].frequencies=3 elements: must be from 1 to head_dim / 2 = 2 elements$",
    ),
    "a magnitude of 0": (
        {"rotations": ([([1.0], 0.0)], [0])},
        r"^rotations\[0\].magnitude=0: must be a finite number above 0$",
    ),
    "no such rotation": ({"rotations": ([([1.0], 1.0)], [1])}, "^rotation=1: must be less than 1$"),
    "a multiplier of NaN": (
        {"multipliers": (1.0, float("nan"), 1.0)},
        "^residual multiplier=NaN: must be a finite number above 0$",
    ),
    "a query scaling without a length": (
        {"query_scaling": (0.1, 0, 0, False)},
        "^query_scaling's length=0: must be at least 1$",
    ),
    "a layer's norm": (
        {"layers": layer_with("input_norm", np.ones(HIDDEN + 1, np.float32))},
        r"^layers\[0\].input_norm=9 elements: must be 8$",
    ),
    "a layer's sinks": (
        {"layers": layer_with("sinks", np.ones(3, np.float32))},
        r"^layers\[0\].sinks=3 elements: must be 2$",
    ),
    "an activation without a limit": (
        {"clamped_swiglu": (1.7, 0.0)},
        "^activation's limit=0: must be a finite number above 0$",
    ),
    "scales of other layers": (
        {"kv_scales": [(1.0, 1.0), (1.0, 1.0)]},
        "^kv_scales=2 elements: must be 1$",
    ),
    "a layer's bias": (
        {"layers": layer_with("o", [(np.zeros((HIDDEN, 8), np.float32), np.zeros(3, np.float32))])},
        r"^layers\[0\].o.parts\[0\].bias=3 elements: must be 8$",
    ),
    "too few features": (
        {"layers": layer_with("gate_up", [(np.zeros((12, HIDDEN), np.float32), None)])},
        r"^layers\[0\].gate_up's shape=\[12, 8\]: must be \[24, 8\]$",
    ),
    "integers and scales apart": (
        {"lm_head": [((np.zeros((VOCAB, HIDDEN), np.int8), np.zeros((VOCAB, 1), np.uint16)), None)]},
        r"^lm_head.parts\[0\].weight: is a tuple; must be a numpy array$",
    ),
    "a packed matrix of another shape": (
        {"lm_head": [(PackedMatrix("Q8_0", np.zeros((VOCAB, 34), np.uint8)), None)]},
        r"^lm_head.parts\[0\].weight's shape=\[11, 32\]: must be \[11, 8\]$",
    ),
    "frequencies": ({"frequencies": np.zeros(4, np.float32)}, r"^frequencies=4 elements: must be"),
    "heads": ({"num_kv_heads": 3}, r"^num_kv_heads=3: must be a divisor of num_heads=2$"),
    "no heads": ({"num_heads": 3}, r"^layers\[0\].o.parts\[0\].weight=64 elements: must be 96"),
}


@pytest.mark.parametrize(("others", "message"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_weights_that_cannot_be_read(others: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidBufferError, match=message):
        weights(**others)


def head(**fields: object) -> dict[str, object]:
    """Return what an EAGLE-3 head has in addition to a layer, with some of it replaced by `fields`."""
    made = {"hidden_layers": [0, 1], "fc_norm": None, "fc_norm_each": False, "target_ids": list(range(VOCAB))}
    made |= {"fc": [(np.zeros((HIDDEN, 2 * HIDDEN), np.float32), None)], "hidden_norm": np.ones(HIDDEN, np.float32)}
    return made | {"norm_before_residual": False, "norm_output": False} | fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_layers": [0, -1]}, r"^hidden_layers=-1: must be at least 0$"),
        ({"fc": [([[1.0]], None)]}, r"^fc.parts\[0\].weight: must be an array of 2 dimensions$"),
        ({"fc": [(np.zeros(HIDDEN, np.float32), None)]}, r"^fc.parts\[0\].weight: must be an array of 2 dimensions$"),
        (
            {"fc": [((np.zeros((HIDDEN, 2 * HIDDEN), np.int8), np.ones((HIDDEN, 1), np.float32)), None)]},
            r"^fc.parts\[0\].weight: must be an array of 2 dimensions$",
        ),
        ({"target_ids": [0]}, r"^target_ids=1 elements: must be 11$"),
    ],
)
def test_heads_that_cannot_be_read(fields: dict[str, object], message: str) -> None:
    wide = np.zeros((16, 2 * HIDDEN), np.float32)
    weights(layers=layer_with("qkv", [(wide, None)]), head=head())
    with pytest.raises(InvalidBufferError, match=message):
        weights(layers=layer_with("qkv", [(wide, None)]), head=head(**fields))


MTP = {"target_layers": 1, "fc": head()["fc"], "embedding_norm": np.ones(HIDDEN, np.float32)}
MTP |= {"hidden_norm": np.ones(HIDDEN, np.float32), "target_ids": list(range(VOCAB))}
ASSISTANT = {"target_layers": 1, "state_size": HIDDEN, "pre": head()["fc"], "target_ids": list(range(VOCAB))}
ASSISTANT |= {"post": [(np.zeros((HIDDEN, HIDDEN), np.float32), None)]}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"mtp": MTP, "layers": arrays()["layers"] * 2}, "^layers=2 layers: must be 1 in a head$"),
        ({"mtp": MTP, "layers": []}, "^layers=0 layers: must be 1 in a head$"),
        ({"assistant": ASSISTANT}, r"^layers\[0\].source=none: must be a layer of the target$"),
        (
            {"mtp": MTP, "assistant": ASSISTANT},
            "^head, mtp and assistant: two of them are given; leave out all but one$",
        ),
    ],
)
def test_layers_that_a_head_does_not_have(others: dict[str, object], message: str) -> None:
    weights(mtp=MTP)
    with pytest.raises(InvalidBufferError, match=message):
        weights(**others)


def test_an_eagle3_head_without_a_norm_of_embeddings() -> None:
    (layer,) = layer_with("qkv", [(np.zeros((16, 2 * HIDDEN), np.float32), None)])
    with pytest.raises(
        InvalidBufferError, match=r"^layers\[0\].input_norm=none: must be the norm of a head's embeddings$"
    ):
        weights(layers=[{**layer, "input_norm": None}], head=head())


def test_negative_sizes_and_missing_tensors() -> None:
    with pytest.raises(InvalidConfigError, match=r"^vocab_size=-1: must be"):
        weights(vocab_size=-1)
    (layer,) = arrays()["layers"]  # type: ignore[misc]
    with pytest.raises((KeyError, TypeError), match="qkv"):
        weights(layers=[{name: value for name, value in layer.items() if name != "qkv"}])
    with pytest.raises(InvalidBufferError, match=r"^layers\[0\].down's shape=\[0, 12\]: must be"):
        weights(layers=[{name: value for name, value in layer.items() if name != "down"}])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], r"^layers: 0 layers; must be at least 1$"),
        ([np.zeros((5, 3, 1, 4, 4), np.float32)], r"^layers\[0\]: shape is \[5, 3, 1, 4, 4\]; must be \[num_blocks"),
        (
            [*kv_layers(4), *kv_layers(5)],
            r"^layers\[1\]: shape is \[6, 2, 1, 4, 4\]; must be .*with the same blocks in all layers$",
        ),
        ([kv_layers()[0].astype(np.float64)], rf"^layers\[0\]: dtype is float64; {FLOATS}$"),
        ([misaligned((5, 2, 1, 4, 4))], r"^layers\[0\]: strides are"),
        ([np.zeros((5, 2, 1, 4, 8), np.float32)[..., ::2]], r"^layers\[0\]: strides are"),
        ([kv_layers()[0], kv_layers()[0].astype(np.uint16)], r"^kv_cache.layers\[1\]=another type"),
    ],
)
def test_kv_caches_that_cannot_be_written(layers: list[np.ndarray], message: str) -> None:
    with pytest.raises(InvalidBufferError, match=message):
        core.CpuKVCache(layers)


def test_quantized_kv_caches_that_cannot_be_written() -> None:
    with pytest.raises(InvalidConfigError, match=r"^codes=\"fp4\": must be 'fp8_e4m3' or 'fp8_e5m2'$"):
        core.CpuKVCache(kv_layers(), codes="fp4")
    with pytest.raises(InvalidBufferError, match=r"^layers\[0\]: dtype is float32; must be uint8$"):
        core.CpuKVCache(kv_layers(), codes="fp8_e4m3")
    with pytest.raises(InvalidBufferError, match=rf"^layers\[0\]: dtype is uint8; {FLOATS}$"):
        core.CpuKVCache([kv_layers()[0].astype(np.uint8)])


def test_a_read_only_kv_cache() -> None:
    (layer,) = kv_layers()
    layer.flags.writeable = False
    with pytest.raises(InvalidBufferError, match=r"^layers\[0\]: is read-only; must be a writable array$"):
        core.CpuKVCache([layer])


def feed(**others: object) -> np.ndarray:
    """Run a pass of three rows of two requests, with some arguments replaced by `others`, and return the hidden
    states."""
    decoder, cache = model()
    arguments: dict[str, object] = {
        "tokens": np.array([1, 2, 3]),
        "positions": np.array([0, 1, 0]),
        "slots": np.array([4, 5, 8]),
        "q_start": np.array([0, 2, 3]),
        "block_table": np.array([[1, 0], [2, 0]]),
        "kv_cache": cache,
        "hidden": np.full((3, HIDDEN), np.nan, np.float32),
    } | others
    decoder.forward(**arguments)  # type: ignore[arg-type]
    return arguments["hidden"]  # type: ignore[return-value]


def test_a_pass() -> None:
    assert np.isfinite(feed()).all()


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"tokens": np.array([1, VOCAB, 3])}, r"^tokens\[1\]=11: must be from 0 to vocab_size - 1 = 10$"),
        ({"tokens": np.array([1, 2, 3], np.int32)}, r"^tokens: dtype is int32; must be int64$"),
        ({"positions": np.array([0, 1])}, r"^positions=2 elements: must be 3$"),
        ({"positions": np.array([1, 1, 0])}, r"^positions\[1\]=1: must be above 1"),
        ({"positions": np.array([0, 8, 0])}, r"^positions\[1\]=8: must be from -1 to max_blocks"),
        ({"slots": np.array([4, 16, 8])}, r"^slots\[1\]=16: must be from -1 to 15$"),
        ({"block_table": np.array([[1, 0], [4, 0]])}, r"^block_table\[1, 0\]=4: must be from 0 to num_bl"),
        ({"q_start": np.array([0, 2])}, r"^q_start=2 elements: must be 3$"),
        ({"q_start": np.array([0, 3, 2])}, r"^q_start=\[0, 3, 2\]: must be ascending"),
        (
            {"q_start": np.array([0, 2, 4])},
            r"^q_start=\[0, 2, 4\]: must be ascending numbers .* to 3$",
        ),
        ({"hidden": np.zeros((3, HIDDEN + 1), np.float32)}, r"^hidden=27 elements: must be 24"),
        ({"kv_cache": core.CpuKVCache(kv_layers(count=2))}, r"^kv_cache's \[layers, .*=\[2, 1, 4\]: must be"),
        ({"group_slots": np.zeros((1, 3), np.int64)}, r"^group_slots=3 elements: must be 0"),
        ({"group_tables": np.zeros((1, 2, 2), np.int64)}, r"^group_tables=4 elements: must be 0"),
        ({"group_tables": np.zeros((2, 2), np.int64)}, r"^group_tables: "),
    ],
)
def test_passes_that_do_not_fit(others: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidBufferError, match=message):
        feed(**others)


def test_rows_after_the_last_request_are_masked() -> None:
    """Check that rows after the last request are masked: their tokens and slots have no effect if they are in range."""
    kept = feed()
    masked = feed(q_start=np.array([0, 2, 2]), slots=np.array([4, 5, -1]))
    assert np.array_equal(kept[:2], masked[:2])
    assert np.isfinite(masked).all()


def test_logits_and_argmax_check_their_arrays() -> None:
    decoder, hidden = model()[0], feed()
    logits = np.full((3, 7), np.nan, np.float32)
    decoder.logits(hidden, logits)
    ids, top = np.empty(3, np.int64), np.empty(3, np.float32)
    decoder.argmax(hidden, 7, ids, top)
    assert ids.tolist() == logits.argmax(axis=1).tolist()
    assert top.tolist() == logits.max(axis=1).tolist()
    for call, message in (
        (lambda: decoder.logits(hidden, np.empty((2, 7), np.float32)), "logits=14 elements: must be"),
        (lambda: decoder.logits(hidden, np.empty((3, 12), np.float32)), "num_ids=12: must be"),
        (lambda: decoder.logits(hidden[:, :7].copy(), logits), "hidden=21 elements: must be"),
        (lambda: decoder.argmax(hidden, 0, ids, top), "num_ids=0: must be from 1 to"),
        (lambda: decoder.argmax(hidden, 7, ids[:2], top), "ids=2 elements: must be"),
        (lambda: decoder.argmax(hidden, -1, ids, top), "num_ids=-1: must be"),
    ):
        with pytest.raises(InvalidBufferError, match=message):
            call()


@pytest.mark.parametrize("threads", [0, -1, 1000])
def test_pools_that_cannot_be(threads: int) -> None:
    with pytest.raises(InvalidConfigError, match=rf"^threads={threads}: must be "):
        core.CpuPool(threads)


BAD_STATES: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "missing": (lambda s: s.pop("limit"), 'state: has no "limit"; must have an array'),
    "dtype": (lambda s: s.update(seeds=np.zeros(2, np.int32)), "seeds: dtype is int32; must be int64"),
    "bytes for bools": (lambda s: s.update(active=np.zeros(2, np.uint8)), "active: dtype is uint8; must be bool"),
    "rows": (lambda s: s.update(num_tokens=np.zeros(3, np.int64)), "num_tokens: shape is [3]; must be [2]"),
    "context": (lambda s: s.update(tokens=np.zeros((2, 8), np.int64)), "tokens: shape is [2, 8]; must be [2, 9]"),
    "columns": (lambda s: s.update(params=np.zeros((2, 5), np.float32)), "params: shape is [2, 5]; must be [2, 8]"),
    "a view": (lambda s: s.update(tokens=np.zeros((2, 18), np.int64)[:, ::2]), "tokens: strides are"),
    "misaligned": (lambda s: s.update(limit=misaligned((2,), np.int64)), "limit: strides are"),
}


@pytest.mark.parametrize(("change", "message"), BAD_STATES.values(), ids=BAD_STATES)
def test_row_state_that_cannot_be(change: Callable[[dict[str, np.ndarray]], object], message: str) -> None:
    arrays = state()
    change(arrays)
    with pytest.raises(InvalidBufferError, match=re.escape(message)):
        core.CpuIteration(scheduler(), arrays, model())


def test_iterations_that_cannot_be() -> None:
    drafting = {"num_speculative_tokens": 2, "drafter": core.CachedDrafter(max_model_len=8)}
    target, other = model(), model()
    for fields, draft, settings, message in (
        ({}, None, {"rule": "greedy"}, "rule=\"greedy\": must be 'rejection' or 'coupled'"),
        ({}, other, {}, "draft=a model: must be None, as the scheduler's drafter needs"),
        (drafting, None, {}, "draft=None: must be a model, as the scheduler's drafter needs"),
        (drafting, target, {}, "draft=the target's decoder or KV cache: must be a decoder and KV cache of its own"),
        (drafting, (other[0], target[1]), {}, "draft=the target's decoder or KV cache: must be"),
        ({}, None, {"logprobs_mode": "raw"}, "logprobs_mode=\"raw\": must be 'raw_logprobs', "),
    ):
        with pytest.raises(InvalidConfigError, match=re.escape(message)):
            core.CpuIteration(scheduler(**fields), state(), target, draft, **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidBufferError, match=r"^rates=1 numbers: must be one for each of 2 dr"):
        core.CpuIteration(scheduler(**drafting), state(), target, other, rates=[0.5])
    with pytest.raises(InvalidBufferError, match=r'^state: has no "group_tables"; must have an array'):
        core.CpuIteration(scheduler(window_groups=[4]), state(), target)
    one = state() | {"group_tables": np.zeros((1, 2), np.int64)}
    with pytest.raises(InvalidBufferError, match=r"^group_tables: shape is \[1, 2\]; must be \[2, 2\]"):
        core.CpuIteration(scheduler(window_groups=[4]), one, target)


def test_steps_check_their_buffers() -> None:
    made = scheduler()
    iteration = core.CpuIteration(made, state(), model())
    record, results = np.zeros(made.record_size, np.int64), np.zeros(made.results_size, np.int64)
    assert iteration.run(record, results) == ((0, 0), None, [], [], [])
    for bad, message in (
        (
            (record[1:], results),
            f"record={made.record_size - 1} elements: must be {made.record_size}",
        ),
        ((record, results[1:]), f"results={made.results_size - 1} elements: must be"),
        ((record.astype(np.int32), results), "record: dtype is int32; must be int64"),
        ((results, results), "shares memory with another argument"),
    ):
        with pytest.raises(InvalidBufferError, match=message):
            iteration.run(*bad)
    with pytest.raises(InvalidConfigError, match=r"^rule=\"greedy\": must be"):
        iteration.set_rule("greedy")


def test_an_iteration_keeps_its_arrays() -> None:
    """Check that an iteration keeps its arrays alive: nothing else holds them, and a step still writes them."""
    made, prompt = scheduler(), np.array([3, 1, 4])
    iteration = core.CpuIteration(made, state(), model(), rule="coupled")
    record, results = np.zeros(made.record_size, np.int64), np.zeros(made.results_size, np.int64)
    settled = np.zeros(made.settled_size, np.int64)
    made.add_request(7, prompt, limit=8, sampling=core.RequestSampling(temperature=0.0))
    tokens = []
    while made.has_unfinished():
        assert made.plan(record) == core.PLAN_STEP
        assert iteration.run(record, results) == ((1, 0), None, [], [], [])
        made.settle(int(record[core.HEADER_FIELDS.index("step_id")]), results, settled)
        tokens.append(int(results[made.results_layout()["tokens"][0]]))
    assert len(tokens) == 5
    assert tokens == greedy(prompt.tolist(), 5)


def greedy(tokens: list[int], count: int) -> list[int]:
    """Continue `tokens` by `count` greedy tokens. Each token takes one pass over all tokens so far."""
    for _ in range(count):
        decoder, cache = model()
        n = len(tokens)
        hidden = np.empty((n, HIDDEN), np.float32)
        rows = np.arange(n)
        decoder.forward(np.array(tokens), rows, rows, np.array([0, n]), np.array([[0, 1]]), cache, hidden)
        logits = np.empty((1, VOCAB), np.float32)
        decoder.logits(hidden[-1:].copy(), logits)
        tokens = [*tokens, int(logits.argmax())]
    return tokens[-count:]

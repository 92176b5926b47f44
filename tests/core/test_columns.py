"""A row's parameter columns and steps, derived a second time from what the documentation says of each; names in Python
are those of the core, and ranges lie within the core's."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from module_files import load_file
from specrs import core
from specrs.backends.ring import Header
from specrs.options import Number, options_of
from specrs.sampling import SamplingParams
from specrs.verify.params import SamplingRows, Steps

ROOT = Path(__file__).parents[2]

ANY = st.floats(-2.0, 2.0)
NUMBERS = [name for name, declared in options_of(SamplingParams).items() if isinstance(declared.values, Number)]

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.one_of(st.sampled_from([0.0, 1e-6, core.GREEDY_BELOW, 1.0]), st.floats(0.0, 4.0)),
        "top_k": st.integers(0, 200_000),
        "top_p": st.one_of(st.sampled_from([1.0, 1.0 - 1e-12, 1e-60]), st.floats(1e-3, 1.0)),
        "min_p": st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0)),
        "repetition_penalty": st.one_of(st.just(1.0), st.floats(0.1, 3.0)),
        "presence_penalty": st.one_of(st.just(0.0), ANY),
        "frequency_penalty": st.one_of(st.just(0.0), ANY),
        "logprobs": st.sampled_from([None, -1, 0, 5]),
        "logit_bias": st.dictionaries(st.integers(0, 9), ANY, max_size=2),
        "allowed_token_ids": st.sampled_from([None, np.array([], dtype=np.int64), np.array([3], dtype=np.int64)]),
        "bad_words_token_ids": st.sampled_from([[], [[3]], [[1, 2], [4]]]),
        "has_extras": st.booleans(),
        "pooling": st.booleans(),
    },
)
"""Parameters of a request, drawn from everything that is allowed."""


@given(PARAMS, st.sampled_from([np.float32, np.float64]))
@example({"top_p": 1.0 - 1e-12}, np.float32)
@example({"top_p": 1e-60}, np.float32)
@example({"temperature": 0.0, "top_k": 4, "top_p": 0.5, "min_p": 0.5}, np.float64)
def test_columns(params: dict[str, object], dtype: type[np.floating]) -> None:
    values, bits = core.RequestSampling(**params).columns(np.dtype(dtype).name)  # type: ignore[arg-type]
    asked = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    greedy = asked["temperature"] < core.GREEDY_BELOW
    if greedy:
        asked |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    # The smallest normal number stands in for what rounds to nothing: the most likely token is always kept.
    share = max(dtype(asked["top_p"]), np.finfo(dtype).tiny)
    at_least = float(dtype(asked["min_p"]))
    expected = {
        "greedy": float(greedy),
        "temperature": asked["temperature"],
        "top_k": asked["top_k"] or math.inf,
        "top_p": share if share < 1 else math.inf,
        "log_min_p": math.log(at_least) if at_least else -math.inf,
        "repetition_penalty": asked.get("repetition_penalty", 1.0),
        "presence_penalty": asked.get("presence_penalty", 0.0),
        "frequency_penalty": asked.get("frequency_penalty", 0.0),
    }
    assert values == [float(dtype(expected[name])) for name in core.PARAM_COLUMNS]
    needed = {
        "greedy": greedy,
        "random": not greedy,
        "temperature": asked["temperature"] != 1.0,
        "top_k": asked["top_k"] > 0,
        "top_p": share < 1,
        "min_p": asked["min_p"] > 0,
        "repetition": expected["repetition_penalty"] != 1.0,
        "counts": bool(expected["presence_penalty"] or expected["frequency_penalty"]),
        "constraints": bool(params.get("logit_bias") or params.get("bad_words_token_ids"))
        or params.get("allowed_token_ids") is not None,
        "min_tokens": False,  # of a request, not of its sampling
        "logprobs": params.get("logprobs") is not None,
        "extras": params.get("has_extras", False),
        "pooling": params.get("pooling", False),
    }
    assert {name: bool(bits >> i & 1) for i, name in enumerate(core.SAMPLING_STEPS)} == needed
    assert not bits >> len(core.SAMPLING_STEPS)


def test_the_fields_in_python_are_generated_from_the_cores_names() -> None:
    made = load_file("record_fields", ROOT / "scripts/record_fields.py")
    assert (ROOT / "python/specrs/record_fields.py").read_text() == made.module(), "run `make generate`"


def test_fields_are_the_elements_and_bits_that_have_their_names() -> None:
    header = Header.of(np.arange(100, 100 + len(core.HEADER_FIELDS) + 3))
    assert {name: getattr(header, name) for name in core.HEADER_FIELDS} == {
        name: 100 + i for i, name in enumerate(core.HEADER_FIELDS)
    }
    rows = SamplingRows(torch.arange(2.0, 2.0 + len(core.PARAM_COLUMNS)).repeat(3, 1))
    for i, name in enumerate(core.PARAM_COLUMNS):
        assert getattr(rows, name).tolist() == [[True if name == "greedy" else 2.0 + i]] * 3
    for i, name in enumerate(core.SAMPLING_STEPS):
        assert Steps.of(1 << i) == Steps(**{name: True})
        assert Steps.of(1 << i) | Steps(greedy=True) == Steps(**{"greedy": True, name: True})


@pytest.mark.parametrize("name", NUMBERS)
def test_the_core_takes_every_number_that_users_may_give(name: str) -> None:
    """The core's guard is wider than the ranges that `SamplingParams` declares."""
    values = options_of(SamplingParams)[name].values
    assert isinstance(values, Number)
    least = math.nextafter(values.low, math.inf) if values.open_low else values.low
    scheduler = core.Scheduler(
        max_num_seqs=1, max_model_len=8, num_blocks=2, block_size=4, max_num_batched_tokens=8, num_speculative_tokens=0
    )
    for request_id, value in enumerate((least, values.high)):
        SamplingParams(**{name: value})
        sampling = core.RequestSampling(**{name: value})
        scheduler.add_request(request_id, np.array([1, 2]), limit=8, sampling=sampling)

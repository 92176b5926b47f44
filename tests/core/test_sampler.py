"""`Sampler` rejects what it cannot use with the argument's name, and then writes nothing."""

from typing import Any

import numpy as np
import pytest
from specrs import core

V, B, K, N = 8, 2, 3, 8
OFF = core.RequestSampling().columns("float32")[0]


def verify_arguments() -> dict[str, Any]:
    return {
        "logits": np.zeros((N, V), np.float32),
        "params": np.array([OFF] * 4, np.float32),
        "seeds": np.arange(4),
        "rows": np.array([3, 0]),
        "q_start": np.array([0, 4, 8]),
        "num_tokens": np.array([5, 6]),
        "num_drafts": np.array([3, 1]),
        "drafts": np.ones((B, K), np.int64),
        "q": np.full((B, K, V), 1 / V, np.float32),
        "num_accepted": np.full(B, -7),
        "tokens": np.full((B, K + 1), -7),
        "largest": np.full(N, -7, np.float32),
    }


def draw_arguments() -> dict[str, Any]:
    return {
        "logits": np.zeros((B, V), np.float32),
        "params": np.array([OFF] * 4, np.float32),
        "seeds": np.arange(4),
        "rows": np.array([3, 0]),
        "positions": np.array([5, 6]),
        "purpose": core.PURPOSE_DRAFT,
        "tokens": np.full(B, -7),
        "largest": np.full(B, -7, np.float32),
        "q": np.full((B, K, V), -7, np.float32),
        "column": 1,
    }


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logits", np.zeros((N, V)), "logits: dtype is float64; must be float32"),
        ("logits", np.zeros((N, V + 1), np.float32), "logits=72 elements: must be 64"),
        ("logits", np.zeros((V, N), np.float32).T[:, ::2], "logits: strides"),
        ("params", np.zeros((4, 4), np.float32), r"params: shape is \[4, 4\]; must have at least 8 columns"),
        ("seeds", np.arange(5), "seeds=5 elements: must be 4"),
        ("rows", np.array([4, 0]), "rows=4: must be from 0 to 3"),
        ("rows", np.array([-1, 0]), "rows=-1: must be from 0 to 3"),
        ("q_start", np.array([0, 4]), "q_start=2 elements: must be 3"),
        ("q_start", np.array([0, 4, 9]), "q_start: sequence 1 has rows 4 to 9; must be a range within 0 to 8"),
        ("q_start", np.array([0, 5, 4]), "q_start: sequence 1 has rows 5 to 4"),
        ("num_drafts", np.array([4, 1]), "num_drafts: sequence 0 has 4; must be from 0 to 3"),
        ("num_drafts", np.array([3, -1]), "num_drafts: sequence 1 has -1; must be from 0 to 3"),
        ("drafts", np.full((B, K), V), "drafts: sequence 0 has 8; must be ids from 0 to 7"),
        ("q", np.zeros((B, K, V - 1), np.float32), "q=42 elements: must be 48"),
        ("tokens", np.zeros((B, K), np.int64), "tokens=6 elements: must be 8"),
        ("tokens", read_only(np.zeros((B, K + 1), np.int64)), "tokens: is read-only"),
        ("largest", np.zeros(N), "largest: dtype is float64"),
    ],
)
def test_verify_refuses(field: str, value: Any, message: str) -> None:
    sampler, arguments = core.Sampler(V), verify_arguments()
    with pytest.raises(core.InvalidBufferError, match=message):
        sampler.verify(**arguments | {field: value})
    for name in ("num_accepted", "tokens", "largest"):
        assert (arguments[name] == -7).all()
    sampler.verify(**arguments)
    assert (arguments["tokens"] >= 0).all()


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("purpose", 4, core.InvalidConfigError, "purpose=4: must be"),
        ("positions", np.array([5]), core.InvalidBufferError, "positions=1 elements: must be 2"),
        ("rows", np.array([9, 0]), core.InvalidBufferError, "rows=9: must be from 0 to 3"),
        ("column", 3, core.InvalidBufferError, "more than column=3"),
        ("column", -1, core.InvalidBufferError, "column=-1: must be"),
        ("q", np.zeros((1, K, V), np.float32), core.InvalidBufferError, r"must be \[at least 2, more than"),
        ("q", np.zeros((B, K), np.float32), core.InvalidBufferError, "q: shape is"),
    ],
)
def test_draw_refuses(field: str, value: Any, error: type[Exception], message: str) -> None:
    sampler, arguments = core.Sampler(V), draw_arguments()
    with pytest.raises(error, match=message):
        sampler.draw(**arguments | {field: value})
    for name in ("tokens", "largest", "q"):
        assert (arguments[name] == -7).all()
    sampler.draw(**arguments)
    assert (arguments["tokens"] >= 0).all()
    np.testing.assert_allclose(arguments["q"][:, 1], 1 / V)
    assert (arguments["q"][:, [0, 2]] == -7).all()


def test_sizes() -> None:
    for size in (0, -1, 2**31 + 1):
        with pytest.raises(core.InvalidConfigError, match=f"vocab_size={size}: must be"):
            core.Sampler(size)
    with pytest.raises(core.InvalidBufferError, match="out=8 elements: must be 16"):
        core.Sampler(V).filter(
            np.zeros((2, V), np.float32),
            np.array([OFF], np.float32),
            np.zeros(2, np.int64),
            np.zeros((1, V), np.float32),
        )

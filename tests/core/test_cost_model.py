"""`CostModel` through Python: what the binding converts and refuses. Its arithmetic is tested in Rust."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.core import CostModel, InvalidConfigError

MODEL = CostModel([1, 8], [0, 1, 5], [[10.0, 11.0, 15.0], [12.0, 16.0, 40.0]])


def test_a_grid_is_kept_and_interpolated() -> None:
    assert (MODEL.batches, MODEL.ks) == ([1, 8], [0, 1, 5])
    assert MODEL.table == [[10.0, 11.0, 15.0], [12.0, 16.0, 40.0]]
    assert MODEL.ms(1, 3) == pytest.approx(13.0)
    assert MODEL.ms(8, 7) == pytest.approx(52.0)
    assert MODEL.ms(15, 0) == pytest.approx(14.0)
    assert MODEL.tpot(1, 1, 1.1) == pytest.approx(10.0)
    assert MODEL.speedup(1, 1, 1.1) == pytest.approx(1.0)
    lengths = [1.7, 2.2, 2.5, 2.7, 2.8]
    # 11 / 1.7, 12 / 2.2, 13 / 2.5, 14 / 2.7, 15 / 2.8
    assert MODEL.best_k(1, lengths) == 4
    # 12 without, then 16 / 1.7, 22 / 2.2, 28 / 2.5, 34 / 2.7
    assert MODEL.last_paying_k(8, lengths) == 3
    # at batch b: 11 + 5 (b - 1) / 7 over AL, against 10 + 2 (b - 1) / 7
    assert MODEL.break_even_batch([1.7]) is None
    assert MODEL.break_even_batch([1.2]) == 4
    assert repr(MODEL).startswith("CostModel(batches=[1, 8], ks=[0, 1, 5]")


def test_lines_and_what_they_imply() -> None:
    model = CostModel.lines([1, 2], [1.0, 2.0], [10.0, 12.0], [9.0, 11.0])
    assert [model.ms(b, k) for b, k in ((1, 0), (1, 4), (2, 0), (2, 3))] == pytest.approx([9.0, 14.0, 11.0, 18.0])
    assert CostModel.implied_draft_ms(7.0, 4, 2.0, 10.0) == pytest.approx(1.0)


def test_observing() -> None:
    model = CostModel([1], [0, 1, 2], [[10.0, 11.0, 12.0]])
    model.observe(1, 2, 20.0, 0.25)
    assert model.table == [[10.0, 11.0, pytest.approx(14.0)]]


@given(st.lists(st.floats(1, 50), min_size=3, max_size=3), st.integers(1, 30))
def test_a_line_through_a_table_is_the_line(times: list[float], k: int) -> None:
    draft, target, vanilla = times
    line = CostModel.lines([1], [draft], [target], [vanilla])
    assert line.ms(1, k) == pytest.approx(k * draft + target)
    assert line.speedup(1, k, 1.0) == pytest.approx(vanilla / (k * draft + target))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CostModel([1], [0, 1], []), "len(ms)=0: must be 1"),
        (lambda: CostModel([1, 2], [0, 1], [[1.0, 2.0], [1.0]]), "len(ms[1])=1: must be 2"),
        (lambda: CostModel([-1], [0], [[1.0]]), "batches=-1"),
        (lambda: CostModel([1], [-1], [[1.0]]), "ks=-1"),
        (lambda: CostModel([1], [0], [[0.0]]), "ms=0: must be"),
        (lambda: CostModel.lines([1], [1.0, 2.0], [1.0], [1.0]), "len(draft_ms)=2"),
        (lambda: CostModel.lines([1], [1.0], [], [1.0]), "len(target_ms)=0"),
        (lambda: CostModel.lines([1], [1.0], [1.0], []), "len(vanilla_ms)=0"),
        (lambda: CostModel.implied_draft_ms(1.0, 0, 1.0, 1.0), "k=0"),
        (lambda: MODEL.ms(-1, 0), "batch=-1"),
        (lambda: MODEL.ms(1, -1), "k=-1"),
        (
            lambda: MODEL.tpot(1, 1, 2.5),
            "acceptance_length=2.5: must be a number from 1 to 2 at K = 1",
        ),
        (lambda: MODEL.best_k(1, [0.5]), "acceptance_lengths=0.5"),
        (lambda: MODEL.observe(9, 0, 1.0, 0.5), "batch=9: must be from 1 to 8"),
    ],
)
def test_refusals_name_field_value_and_range(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        call()
    assert message in str(caught.value)

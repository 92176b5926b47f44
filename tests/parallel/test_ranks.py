"""Exchanges of ranks: sums in rank order, parts side by side, rows of a table; the same bits on every rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.errors import InvalidConfigError
from specrs.parallel.connection import ExchangeError
from specrs.parallel.ranks import Ranks
from specrs.parallel.start import lead
from torch import Tensor

from parallel.threads import on_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def parts(size: int, rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Return each rank's part of a sum. The elements are such that sums have to be rounded."""
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn((rows, columns), generator=generator).to(dtype) for _ in range(size)]


@settings(max_examples=25)
@given(size=st.integers(2, 4), rows=st.integers(0, 9), columns=st.integers(1, 33), dtype=st.sampled_from(DTYPES))
def test_exchanges(size: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    given_parts = parts(size, rows, columns, dtype)
    total = given_parts[0].clone()
    for part in given_parts[1:]:
        total = total + part
    table = torch.cat(given_parts)
    ids = torch.arange(0, max(1, size * rows), 2) if rows else torch.zeros(0, dtype=torch.int64)
    width = size * columns - min(columns - 1, size - 1)

    def exchange(ranks: Ranks) -> list[Tensor]:
        own = given_parts[ranks.rank]
        found = [ranks.gather(own), ranks.add_(own.clone()), ranks.side_by_side(own, width)]
        found.append(ranks.take_first(own.clone()))
        return [*found, ranks.look_up(own, ids.clone())] if rows else found

    expected = [torch.stack(given_parts), total, torch.cat(given_parts, dim=1)[:, :width], given_parts[0]]
    if rows:
        expected.append(table[ids])
    for found in on_ranks(size, exchange):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_rank_that_does_not_come_to_an_exchange() -> None:
    def exchange(ranks: Ranks) -> str:
        if ranks.rank:
            return ""
        with pytest.raises(ExchangeError, match="rank 0 waited for another one") as caught:
            ranks.add_(torch.zeros(3))
        return str(caught.value)

    assert on_ranks(2, exchange, timeout=0.5)[0]


def test_torchrun_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfigError, match=r"^tensor_parallel_size=2: must be 4, the processes that torchrun"):
        lead(2, 1.0, "nothing", {})

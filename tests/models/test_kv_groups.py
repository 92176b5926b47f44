"""Layers in groups by their windows: every layer in one group, no group longer than the first, memory for one group's
layers in a block."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.models.kv_groups import kv_groups


@given(windows=st.lists(st.sampled_from([None, 4, 9, 64]), min_size=1, max_size=40))
def test_every_layer_has_one_place(windows: list[int | None]) -> None:
    groups = kv_groups(windows)
    if len(set(windows)) == 1:
        assert groups is None
        return
    assert groups is not None
    assert [groups.windows[group] for group in groups.of_layer] == windows
    assert max(Counter(zip(groups.of_layer, groups.places, strict=True)).values()) == 1
    sizes = Counter(groups.of_layer)
    assert groups.layers_per_block == sizes[0] == max(sizes.values())
    assert sorted(sizes) == list(range(len(groups.windows)))
    # The first group keeps the most, and is alone in that.
    lengths = [1 << 30 if window is None else window for window in groups.windows]
    assert lengths[0] > max(lengths[1:])


def test_gemma() -> None:
    """26 layers, every sixth of which sees all: four in a group, two in the last."""
    groups = kv_groups([None if i % 6 == 5 else 512 for i in range(26)])
    assert groups is not None
    assert groups.windows == (None, *(512,) * 6)
    assert groups.layers_per_block == 4
    assert torch.tensor(groups.of_layer).bincount().tolist() == [4, 4, 4, 4, 4, 4, 2]

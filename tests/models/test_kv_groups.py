"""Layers in groups by their windows: every layer in one group, no group longer than the first, memory for one group's
layers in a block."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.models.kv_groups import group_sizes, kv_groups


@given(data=st.data(), windows=st.lists(st.sampled_from([None, 4, 9, 64]), min_size=1, max_size=40))
def test_every_layer_has_one_place(data: st.DataObject, windows: list[int | None]) -> None:
    sizes = group_sizes(windows)
    if set(windows) == {None}:
        assert sizes == []
        return
    if None in windows:
        assert sizes == [windows.count(None)], "what attends to everything is one group"
    assert sizes == sorted(set(sizes), reverse=True)
    size = data.draw(st.sampled_from(sizes))
    groups = kv_groups(windows, size)
    assert [groups.windows[group] for group in groups.of_layer] == windows
    assert max(Counter(zip(groups.of_layer, groups.places, strict=True)).values()) == 1
    layers = Counter(groups.of_layer)
    assert groups.layers_per_block == max(layers.values()) <= size
    assert sorted(layers) == list(range(len(groups.windows)))
    # No group behind the first keeps more, and none of them everything.
    lengths = [1 << 30 if window is None else window for window in groups.windows]
    assert lengths == sorted(lengths, reverse=True)
    assert None not in groups.windows[1:]


def test_gemma() -> None:
    """26 layers, every sixth of which sees all: four in a group, two in the last."""
    windows = [None if i % 6 == 5 else 512 for i in range(26)]
    assert group_sizes(windows) == [4]
    groups = kv_groups(windows, 4)
    assert groups.windows == (None, *(512,) * 6)
    assert groups.layers_per_block == 4
    assert torch.tensor(groups.of_layer).bincount().tolist() == [4, 4, 4, 4, 4, 4, 2]


def test_one_window() -> None:
    """32 layers in one group, or in 2 to 8."""
    assert group_sizes([512] * 32) == [32, 16, 11, 8, 7, 6, 5, 4]
    assert kv_groups([512] * 32, 11).windows == (512, 512, 512)

"""KV groups: every layer is in one group, no group is longer than the first, and a block has memory for one group's
layers."""

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
    # No group after the first keeps more, and none keeps everything.
    lengths = [1 << 30 if window is None else window for window in groups.windows]
    assert lengths == sorted(lengths, reverse=True)
    assert None not in groups.windows[1:]


def test_gemma() -> None:
    """Check Gemma's 26 layers, every sixth with full attention: four layers per group, two in the last."""
    windows = [None if i % 6 == 5 else 512 for i in range(26)]
    assert group_sizes(windows) == [4]
    groups = kv_groups(windows, 4)
    assert groups.windows == (None, *(512,) * 6)
    assert groups.layers_per_block == 4
    assert torch.tensor(groups.of_layer).bincount().tolist() == [4, 4, 4, 4, 4, 4, 2]


def test_one_window() -> None:
    """Check the group sizes for 32 layers with one window: these make one KV group, or 2 to 8."""
    assert group_sizes([512] * 32) == [32, 16, 11, 8, 7, 6, 5, 4]
    assert kv_groups([512] * 32, 11).windows == (512, 512, 512)

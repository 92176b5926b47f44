"""Freed memory goes back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from process_memory import status
from specrs.engine.heap import trim_heap

has_glibc = sys.platform == "linux" and "libc.so.6" in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not has_glibc, reason="another C library than glibc")
def test_freed_objects_below_a_used_one_are_given_back() -> None:
    """Check that most of 64 MB of small objects is given back although a later one is in use. glibc alone keeps it."""
    objects = [bytes([i % 256]) * 4000 for i in range(16_000)]
    last = objects[-1]
    before = status("RssAnon")
    del objects
    trim_heap()
    assert status("RssAnon") < before - (32 << 20)
    assert len(last) == 4000

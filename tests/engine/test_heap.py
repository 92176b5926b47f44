"""Freed memory goes back to the system, and an engine frees its memory when it ends."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import cast

import pytest
from process_memory import status
from specrs.engine.heap import trim_heap
from specrs.engine.load import make_decoder
from specrs.errors import CheckpointError
from specrs.tokenizer import Tokenizer

from engine.harness import Bank, make_engine, request, run

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


def test_the_decoder_is_made_by_the_end_of_loading() -> None:
    """Check that the first request finds the decoder, and that a tokenizer without one ends its loading as well."""

    class Counted:
        made = 0

        def __init__(self, fault: CheckpointError | None = None) -> None:
            self._fault = fault

        @property
        def decoder(self) -> object:
            self.made += 1
            if self._fault is not None:
                raise self._fault
            return object()

    for tokenizer in (Counted(), Counted(CheckpointError("no decoder"))):
        make_decoder(cast(Tokenizer, tokenizer))
        assert tokenizer.made == 1


@pytest.mark.parametrize("enable_lora", [False, True])
def test_an_engine_ends_with_its_last_reference(either: Bank, enable_lora: bool) -> None:
    """Check the runner, which has the KV cache, too. Python's collector sees no cycle through an object of the core."""
    engine = make_engine(either.target, either.drafts["small"], k=2, dtype=either.dtype, enable_lora=enable_lora)
    engine.add_request(request(0, either.prompts[3], k=2, max_tokens=4, engine_k=2))
    run(engine)
    held = [weakref.ref(part) for part in (engine, engine.runner)]
    del engine
    assert [ref() for ref in held] == [None, None]

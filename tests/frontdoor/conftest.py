"""Tokenizers, and an engine that plays scripts. Holds no tests."""

import pytest
from specrs.pair import TARGET
from specrs.tokenizer import Tokenizer

from .scripted import ScriptedEngine


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The bundled pair's: byte-level BPE of 2,048 tokens, `<|endoftext|>` is id 0."""
    return Tokenizer(str(TARGET))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()

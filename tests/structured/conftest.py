"""The bundled pair's tokenizer, once. Holds no tests."""

import pytest
from specrs.pair import TARGET
from specrs.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE of 2,048 tokens, `<|endoftext|>` is id 0."""
    return Tokenizer(str(TARGET))

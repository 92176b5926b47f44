"""A server shared by all tests that leave it as they found it, and an `LLM` to compare with. Holds no tests."""

from collections.abc import Iterator

import pytest
from specrs.llm import LLM

from .harness import Server, serving

K = 5
SETTINGS = ("--max-model-len", "512", "--max-num-seqs", "16", "--disable-uvicorn-access-log")


@pytest.fixture(scope="session")
def shared() -> Iterator[Server]:
    """A server with default settings, which many tests share. Native passes give a request the same text whatever other
    requests run."""
    with serving(*SETTINGS, "--spec-tokens", str(K)) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The shared server, idle before and after the test."""
    yield shared
    assert shared.process.poll() is None, "".join(shared.lines)
    shared.wait_until_idle()


@pytest.fixture(scope="session")
def llm() -> LLM:
    """An engine in this process with the settings of the server under test."""
    return LLM(
        max_model_len=512,
        max_num_seqs=16,
        speculative_config={"num_speculative_tokens": K, "rejection_sample_method": "coupled"},
    )

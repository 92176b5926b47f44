"""Checkpoints shared by the engine's tests, made once per run."""

from pathlib import Path

import pytest

from engine.harness import Bank, make_bank


@pytest.fixture(scope="session")
def qwen_bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Qwen3 with tied embeddings."""
    return make_bank(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def llama_bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Llama with untied embeddings and llama3 RoPE scaling."""
    from checkpoints import LLAMA3_ROPE

    return make_bank(tmp_path_factory.mktemp("llama"), "llama", tie=False, rope_parameters=LLAMA3_ROPE)


@pytest.fixture(params=["qwen_bank", "llama_bank"])
def bank(request: pytest.FixtureRequest) -> Path:
    """Each family in turn."""
    return request.getfixturevalue(request.param)

"""Checkpoints shared by the engine's tests, made once per run."""

import pytest

from engine.harness import Bank, make_bank, native_bank
from engine.heads import make_head_bank


@pytest.fixture(scope="session")
def qwen_bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Checkpoints of Qwen3 with tied embeddings, in float64."""
    return make_bank(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def llama_bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Checkpoints of Llama with untied embeddings and llama3 RoPE scaling."""
    from checkpoints import LLAMA3_ROPE

    return make_bank(tmp_path_factory.mktemp("llama"), "llama", tie=False, rope_parameters=LLAMA3_ROPE)


@pytest.fixture(scope="session")
def native_qwen_bank(qwen_bank: Bank) -> Bank:
    """The Qwen3 checkpoints for native passes, in fp32."""
    return native_bank(qwen_bank, "float32")


@pytest.fixture(scope="session")
def native_llama_bank(llama_bank: Bank) -> Bank:
    """The Llama checkpoints for native passes, in bf16."""
    return native_bank(llama_bank, "bfloat16")


@pytest.fixture(scope="session")
def more_banks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bank]:
    """Checkpoints for native passes: windows in one layer of two, norms around blocks and GELU, in bf16; experts, in
    fp32."""
    gemma = make_bank(tmp_path_factory.mktemp("gemma"), "gemma3_text")
    moe = make_bank(tmp_path_factory.mktemp("moe"), "qwen3_moe")
    return {"native_gemma_bank": native_bank(gemma, "bfloat16"), "native_moe_bank": native_bank(moe, "float32")}


@pytest.fixture(scope="session")
def head_bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Checkpoints of a target with EAGLE-3 heads."""
    return make_head_bank(tmp_path_factory.mktemp("heads"))


FAMILIES = ["qwen_bank", "llama_bank", "native_qwen_bank", "native_llama_bank"]


@pytest.fixture(params=FAMILIES)
def any_bank(request: pytest.FixtureRequest) -> Bank:
    """Each family in turn, with torch passes and with native passes."""
    found: Bank = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["qwen_bank", "llama_bank"])
def bank(request: pytest.FixtureRequest) -> Bank:
    """Checkpoints of each family in turn, with prompts and greedy texts that transformers generated in float64."""
    found: Bank = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["qwen_bank", "native_qwen_bank"])
def either(request: pytest.FixtureRequest) -> Bank:
    """Qwen3, with torch passes and with native passes."""
    found: Bank = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def request_bank(request: pytest.FixtureRequest) -> dict[str, Bank]:
    """All families by name, for hypothesis tests, which take no function-scoped fixtures."""
    return {name: request.getfixturevalue(name) for name in FAMILIES}

"""A server over a GPU engine, with graphs: chats streamed at the same time have the texts of an `LLM`, on the GPU and
on the CPU."""

import json
from typing import Any

import pytest
from served_chats import answered, chats, share_of_equal, streamed
from server.harness import serving
from specrs.pair import DRAFT, TARGET
from specrs.pair.prompts import PROMPTS

CHATS = chats(*PROMPTS[:6])
TOKENS = 48
SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 300,
    "dtype": "float32",
}
FLAGS = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize("num_drafts", [4, "auto"])
def test_streamed_chats_are_those_of_an_llm(num_drafts: int | str) -> None:
    """Check the bundled pair. Only near-ties may differ: sums on a GPU have other orders than on a CPU, and a prompt's
    last bits depend on its chunks."""
    drafts = {"model": str(DRAFT), "num_speculative_tokens": num_drafts}
    speculation = ["--speculative-config", json.dumps(drafts)]
    with serving("--model", str(TARGET), "--device", "cuda", *FLAGS, *speculation) as server:
        texts = streamed(server, CHATS, TOKENS)
        accepted = server.metrics().get("vllm:spec_decode_num_accepted_tokens_total", 0.0)
    assert accepted > 0 or num_drafts == "auto"
    own = answered(CHATS, TOKENS, TARGET, device="cuda", speculative_config=drafts, **SETTINGS)
    assert share_of_equal(texts, own) > 0.95
    assert share_of_equal(texts, answered(CHATS, TOKENS, TARGET, device="cpu", **SETTINGS)) > 0.95

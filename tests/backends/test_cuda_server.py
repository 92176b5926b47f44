"""A server whose engine has the CUDA runner, with interpreted kernels: streamed chats are those of an `LLM` on the CPU.

`tests/gpu/test_server.py` does the same on a GPU.
"""

import json
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint, perturb_checkpoint, write_tokenizer
from served_chats import INTERPRETED, answered, chats, share_of_equal, streamed
from server.harness import serving

SHAPE: dict[str, Any] = {"hidden": 32, "intermediate": 32, "kv_heads": 1, "head_dim": 16, "vocab": 97, "layers": 1}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CHATS = chats("a", "two words")
TOKENS = 4


def test_streamed_chats_are_those_of_the_cpu(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1, with_tokenizer=False, **SHAPE)
    draft = perturb_checkpoint(target, tmp_path / "draft", noise=0.1, seed=2)
    for folder in (target, draft):
        write_tokenizer(folder, SHAPE["vocab"], chat_template=TEMPLATE)
    settings = {"max_model_len": 32, "max_num_seqs": 2, "num_gpu_blocks_override": 8, "dtype": "float32"}
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    drafts = {"model": str(draft), "num_speculative_tokens": 2}
    speculation = ("--device", "cpu", "--enforce-eager", "--speculative-config", json.dumps(drafts))
    with serving("--model", str(target), *flags, *speculation, code=INTERPRETED) as server:
        texts = streamed(server, CHATS, TOKENS)
        accepted = server.metrics()["vllm:spec_decode_num_accepted_tokens_total"]
    assert texts == answered(CHATS, TOKENS, target, device="cpu", **settings)
    assert accepted > 0
    assert len(set(texts)) == len(CHATS)


def test_texts_are_compared_up_to_their_first_difference() -> None:
    assert share_of_equal(["abcd", "xy"], ["abcd", "xy"]) == 1.0
    assert share_of_equal(["abXd", "xyz"], ["abcd", "xy"]) == 4 / 6
    assert share_of_equal(["", ""], ["ab", "cd"]) == 0.0

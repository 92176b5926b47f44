"""SmolLM2-135M-Instruct from its GGUF file (Q4_1), which `make test-real` downloads: its text is transformers' for any
drafts, it serves chats, and the speed-up by drafts is printed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from server.harness import serving
from specrs.cli.demo.chats import CHATS
from specrs.llm import LLM
from specrs.outputs import RequestOutput
from specrs.sampling import SamplingParams
from specrs.speculative_config import for_repeats

ROOT = Path(__file__).parents[2]
NEW = 48
DRAFTERS = ("ngram", "suffix", "ngram,suffix")


@pytest.fixture(scope="module")
def path() -> Path:
    given = os.environ.get("SPECRS_REAL_MODEL")
    assert given, "SPECRS_REAL_MODEL is not set: run make test-real"
    return Path(given)


@pytest.fixture(scope="module")
def reference(path: Path) -> tuple[list[list[int]], list[list[int]], list[torch.Tensor]]:
    """Prompts, their greedy continuations and logits, by transformers alone in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    with pytest.MonkeyPatch.context() as patch:
        # It asks for the package accelerate, of which it uses nothing on a CPU.
        patch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    prompts, outputs, logits = [], [], []
    for chat in CHATS:
        messages = [{"role": "user", "content": chat}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        made: Any = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True
        )
        prompts.append(list(ids))
        outputs.append(made.sequences[0, len(ids) :].tolist())
        logits.append(torch.cat(made.logits))
    return prompts, outputs, logits


def engine(path: Path, dtype: str, method: str | None = None, k: int | str = 5) -> LLM:
    speculative = method and for_repeats({"method": method}) | {"num_speculative_tokens": k}
    return LLM(
        model=str(path), dtype=dtype, speculative_config=speculative, max_model_len=512, max_num_seqs=1,
        enable_prefix_caching=False,
    )  # fmt: skip


def generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW), use_tqdm=False)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.timeout(900)
def test_text_is_that_of_transformers(
    path: Path, reference: tuple[list[list[int]], list[list[int]], list[torch.Tensor]]
) -> None:
    """Check chats with the file's template: ten texts in fp32, with and without drafts."""
    prompts, expected, _ = reference
    plain = engine(path, "float32")
    assert plain.tokenizer is not None
    for chat, prompt in zip(CHATS, prompts, strict=True):
        text = plain.tokenizer.render_chat([{"role": "user", "content": chat}])
        assert plain.tokenizer.encode(text, add_special_tokens=False) == prompt
    assert ids(generate(plain, prompts)) == expected
    assert len({tuple(text) for text in expected}) > len(CHATS) // 2
    del plain
    drafted = generate(engine(path, "float32", "ngram,suffix"), prompts)
    assert ids(drafted) == expected
    assert sum(output.metrics.accepted_tokens for output in drafted) > NEW


@pytest.mark.timeout(900)
def test_packed_weights_and_what_drafts_are_worth(
    path: Path, reference: tuple[list[list[int]], list[list[int]], list[torch.Tensor]]
) -> None:
    """Check packed weights, as a CPU serves the file by default. Where a text differs from the fp32 one, two tokens
    were nearly tied.

    Drafts never change it; how fast they make it is printed, never judged.
    """
    prompts, expected, logits = reference
    plain = engine(path, "auto")
    started = time.perf_counter()
    texts = ids(generate(plain, prompts))
    seconds = {"vanilla": time.perf_counter() - started}
    same = 0
    for text, wanted, rows in zip(texts, expected, logits, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), None)
        same += at is None
        if at is not None:
            gap = rows[at, wanted[at]] - rows[at, text[at]]
            assert 0 <= gap < 0.01, f"at token {at} the fp32 model prefers its own by {gap}"
    print(f"\n{same} of {len(texts)} texts with packed blocks are those of fp32")
    del plain
    lengths = {}
    for method in DRAFTERS:
        llm = engine(path, "auto", method, "auto" if "," in method else 5)
        generate(llm, prompts[:1])
        llm.reset_stats()
        started = time.perf_counter()
        outputs = generate(llm, prompts)
        seconds[method] = time.perf_counter() - started
        assert ids(outputs) == texts, method
        stats = llm.stats()
        assert stats.accepted_tokens > 0
        lengths[method] = 1 + stats.accepted_tokens / stats.drafts
    tokens = sum(map(len, texts))
    for name, taken in seconds.items():
        length = f", acceptance length {lengths[name]:.2f}" if name in lengths else ""
        print(f"{name}: {tokens / taken:.1f} tokens/s, {seconds['vanilla'] / taken:.2f}x{length}")


@pytest.mark.timeout(900)
def test_served_and_asked_by_the_openai_client(path: Path, tmp_path: Path) -> None:
    python = ROOT / ".venv-clients/openai/bin/python"
    assert python.exists(), f"{python}: run make test-real"
    config = json.dumps({"method": "suffix", "num_speculative_tokens": 5})
    flags = ("--served-model-name", "smollm2", "--max-model-len", "512", "--speculative-config", config)
    with serving(str(path), *flags) as server:
        url = f"http://127.0.0.1:{server.port}"
        done = subprocess.run(
            [str(python), str(Path(__file__).with_name("openai_chat.py")), url, CHATS[0]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        said = json.loads(done.stdout)
        assert said["model"] == "smollm2"
        assert said["whole"] == said["streamed"]
        assert "Paris" in said["whole"]
        counted = server.get("/metrics").body.decode()
        assert "specrs:spec_decode_num_drafts_total{" in counted
        assert 'drafter="suffix"' in counted

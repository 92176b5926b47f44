"""Cases that a CPU serves by native passes, as functions of a folder of checkpoints. Imports nothing that needs torch.

`python native_cases.py FOLDER` runs all of them, and prints a line of JSON each: name, and result or traceback.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from specrs import LLM, AsyncLLM, LoRARequest, RequestOutput, SamplingParams
from specrs.pair import EAGLE3

TEXTS = ["def add(a, b):\n", "import os, sys\n\nclass Stack:"]
IDS = [[5, 7, 11, 13, 5, 7, 11, 13, 5, 7], [17, 3]]
FAMILIES = (
    "qwen3", "llama", "qwen2", "mistral", "olmo2", "phi3", "granite", "smollm3", "qwen3_moe", "mixtral", "gpt_oss",
    "gemma3_text", "ministral3", "llama4_text",
)  # fmt: skip
K = 3

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "seed": 7},
    "two completions": {"temperature": 1.0, "seed": 3, "n": 2},
    "stop string": {"stop": ["return"]},
    "log probabilities": {"logprobs": 3},
    "log probabilities, sampled": {"logprobs": 2, "temperature": 0.8, "seed": 5},
    "log probabilities of the prompt": {"prompt_logprobs": 2},
    "regex": {"structured_outputs": {"regex": "(ab|c)+d{3}"}},
    "JSON schema": {
        "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    },
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "logit_bias": {"logit_bias": {100: 5.0, 7: -100.0}},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False},
    "bad words": {"bad_words": ["return", " self"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(1, 90))},
}
"""Fields of `SamplingParams` by case, over the bundled pair with drafts."""


def engines(folder: Path) -> dict[str, dict[str, Any]]:
    """The arguments of `LLM` by case. `folder` is what `test_without_torch.write_checkpoints` has written."""

    def drafts(**fields: Any) -> dict[str, Any]:
        return {"speculative_config": {"num_speculative_tokens": K, **fields}}

    coupled = {"use_heterogeneous_vocab": True, "rejection_sample_method": "coupled"}
    other_ids = {"model": str(folder / "other_ids"), "use_heterogeneous_vocab": True}
    cases: dict[str, dict[str, Any]] = {
        "bundled": {},
        "bundled, bfloat16": {"dtype": "bfloat16"},
        "draft model": drafts(),
        "draft model, coupled": drafts(rejection_sample_method="coupled"),
        "EAGLE-3": drafts(method="eagle3", model=str(EAGLE3)),
        "n-gram": drafts(method="ngram", prompt_lookup_min=1),
        "suffix": drafts(method="suffix"),
        "suffix or draft model": drafts(method="suffix,draft_model"),
        "number of drafts by the engine": drafts(num_speculative_tokens="auto"),
        "shared-token drafts": {"model": str(folder / "qwen3"), **drafts(**other_ids)},
        "text drafts": {"model": str(folder / "qwen3"), **drafts(**other_ids | coupled)},
        "FP8 KV cache": {"kv_cache_dtype": "fp8", **drafts()},
        "FP8 KV cache, e5m2": {"kv_cache_dtype": "fp8_e5m2", **drafts()},
        "LoRA": {"model": str(folder / "qwen3"), "enable_lora": True},
        "GGUF": {"model": str(folder / "f16.gguf")},
        "GGUF, Q8_0": {"model": str(folder / "q8_0.gguf")},
        "GGUF, Q4_0, bfloat16": {"model": str(folder / "q4_0.gguf"), "dtype": "bfloat16"},
        "GGUF, Q4_1": {"model": str(folder / "q4_1.gguf")},
        "float16": {"model": str(folder / "float16")},
    }
    for kind in ("int8", "int4", "fp8"):
        cases[f"quantization={kind}"] = {"model": str(folder / "qwen3"), "quantization": kind}
    for name in ("gptq", "gptq, act-order", "awq", "fp8", "mxfp4", *COMPRESSED):
        cases[name] = {"model": str(folder / name)}
    for family in FAMILIES:
        cases[family] = {"model": str(folder / family), "dtype": "bfloat16"}
    return {name: {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4} | case for name, case in cases.items()}


COMPRESSED = ("ct-fp8", "ct-int8", "ct-int4", "ct-int4-asymmetric", "ct-nvfp4")
"""Checkpoints of compressed-tensors."""


def names(folder: Path) -> list[str]:
    """Return the names of all cases."""
    return [*engines(folder), *REQUESTS, "chat", "async"]


def run(name: str, folder: Path) -> Any:
    """Run a case. Return its result as JSON values."""
    if name in REQUESTS:
        return _outputs(_bundled().generate(TEXTS, _params(**REQUESTS[name]), use_tqdm=False))
    if name == "chat":
        llm = LLM(model=str(folder / "chat"), dtype="float32", max_model_len=256)
        return _outputs(llm.chat([{"role": "user", "content": "the cat"}], _params(), use_tqdm=False))
    if name == "async":
        return asyncio.run(_streamed())
    settings = engines(folder)[name]
    llm = LLM(**settings)
    prompts: Any = TEXTS if "model" not in settings else [{"prompt_token_ids": ids} for ids in IDS]
    found, sampled = [], {"temperature": 0.8, "seed": 1}
    # How many drafts an engine plans depends on what steps take, and under `rejection` sampled text on these.
    plans = name == "number of drafts by the engine"
    for fields in ({},) if plans else ({}, sampled):
        adapter = LoRARequest("a", 1, str(folder / "adapter")) if "enable_lora" in settings else None
        found.append(_outputs(llm.generate(prompts, _params(**fields), use_tqdm=False, lora_request=adapter)))
    if not plans:
        drafted = llm.stats().draft_tokens > 0
        assert drafted == ("speculative_config" in settings), "it drafts where it should"
    return found


@cache
def _bundled() -> LLM:
    return LLM(dtype="float32", max_model_len=256, speculative_config={"num_speculative_tokens": K})


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | fields)


async def _streamed() -> list[str]:
    llm = AsyncLLM(dtype="float32", max_model_len=256, speculative_config={"num_speculative_tokens": K})
    try:
        pieces = [output.outputs[0].delta async for output in llm.generate(TEXTS[0], _params(max_tokens=24))]
    finally:
        llm.shutdown()
    assert len(pieces) > 1
    return ["".join(pieces)]


def _outputs(outputs: list[RequestOutput]) -> list[Any]:
    """Return tokens, texts and log probabilities. `float.hex` keeps every bit."""
    found: list[Any] = []
    for output in outputs:
        assert output.error is None, output.error
        found.append([_entries(entry) for entry in output.prompt_logprobs or ()])
        for completion in output.outputs:
            logprobs = [_entries(entry) for entry in completion.logprobs or ()]
            found.append([list(completion.token_ids), completion.text, completion.finish_reason, logprobs])
    return found


def _entries(entry: Any) -> list[Any]:
    return [[token_id, one.logprob.hex(), one.rank] for token_id, one in (entry or {}).items()]


def lines(folder: Path) -> Iterator[str]:
    """Run all cases and yield a line of JSON for each."""
    for name in names(folder):
        try:
            yield json.dumps({"name": name, "result": run(name, folder)})
        except Exception:
            yield json.dumps({"name": name, "error": traceback.format_exc()})


if __name__ == "__main__":
    for line in lines(Path(sys.argv[1])):
        print(line, flush=True)

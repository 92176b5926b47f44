"""lm-eval, offline: log likelihoods of given continuations and generated text, as `LLM` has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from specrs.llm import LLM
from specrs.pair import TARGET
from specrs.sampling import SamplingParams

from .conftest import Client

DOCUMENTS = [
    {"q": "def add(a, b):\n    return", "choices": [" a + b", " a - b", " None"], "label": 0},
    {"q": "import", "choices": [" os", " sys", " numpy as np"], "label": 1},
    {"q": "class Stack:\n    def __init__(self", "choices": ["):", ", size):"], "label": 0},
]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: label
doc_to_choice: choices
target_delimiter: ""
metric_list: [{metric: acc}]
"""
GENERATE = """
task: local_generate
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "x"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))


def test_lm_eval(base_url: str, client: Client, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    (tmp_path / "choice.yaml").write_text(CHOICE)
    (tmp_path / "generate.yaml").write_text(GENERATE)
    model = (
        f"model=pair,base_url={base_url}/v1/completions,tokenizer={TARGET},tokenizer_backend=huggingface,"
        "num_concurrent=4,max_retries=1,max_length=512"
    )
    client(
        *("lm-eval", "lm_eval", "--model", "local-completions", "--model_args", model),
        *("--tasks", "local_choice,local_generate", "--include_path", ".", "--output_path", "out", "--log_samples"),
    )
    llm = LLM(dtype="float64", max_model_len=512)
    assert llm.tokenizer is not None
    for document, sample in zip(DOCUMENTS, samples(tmp_path / "out", "local_choice"), strict=True):
        context = llm.tokenizer.encode(str(document["q"]))
        for choice, response in zip(document["choices"], sample["resps"], strict=True):
            whole = llm.tokenizer.encode(str(document["q"]) + choice)
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            entries = llm.generate({"prompt_token_ids": whole}, params, use_tqdm=False)[0].prompt_logprobs
            assert entries is not None
            pairs = list(zip(whole, entries, strict=True))[len(context) :]
            wanted = sum(entry[token].logprob for token, entry in pairs if entry is not None)
            assert float(response[0][0]) == pytest.approx(wanted, abs=1e-3)
    for document, sample in zip(DOCUMENTS, samples(tmp_path / "out", "local_generate"), strict=True):
        params = SamplingParams(max_tokens=16, temperature=0.0, stop=["\n\n"])
        wanted_text = llm.generate(str(document["q"]), params, use_tqdm=False)[0].outputs[0].text
        assert sample["resps"][0][0] == wanted_text

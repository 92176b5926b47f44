"""Measures agents' requests with drafts that come with them (structured answers and edits), against no drafts.

    python benches/bench_agents.py [--model FILE.gguf] [--rounds 3] [--prompts 8] [--threads 2] [--k 7 15 auto]

- schema: answers that follow a JSON schema, drafted by the grammar and by suffix decoding
- tools: a call of one of two functions, as the server demands it with `tool_choice="required"` (hermes)
- edits: InstructCoder's tasks in the folder SPECRS_DATA, with the code that is to be edited as `prediction`

All engines run the same requests in turns, one at a time, greedily. Texts must be equal. Figures are medians of the
ratios of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import specrs
from specrs import LLM, SamplingParams
from specrs.pair import TARGET
from specrs.structured import StructuredOutputsParams

SUBJECTS = (
    "Marie Curie", "the city of Lisbon", "a bakery that opens on Monday", "the planet Mars", "an electric bicycle",
    "a novel about the sea", "Ada Lovelace", "a hotel in the mountains", "the river Danube", "a train to Vienna",
    "a cat named Tom", "the Eiffel Tower", "a recipe for soup", "a football match", "the moon", "an old piano",
)  # fmt: skip
TEXT, WORDS = {"type": "string", "maxLength": 60}, {"type": "array", "items": {"type": "string", "maxLength": 20}}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": TEXT,
        "category": {"enum": ["person", "place", "event", "product", "other"]},
        "description": {"type": "string", "maxLength": 120},
        "keywords": {**WORDS, "minItems": 2, "maxItems": 4},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
        "needs_review": {"type": "boolean"},
    },
    "required": ["title", "category", "description", "keywords", "confidence", "needs_review"],
    "additionalProperties": False,
}


def call_of(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool call in the format `hermes`."""
    arguments = {"type": "object", "properties": parameters, "required": [*parameters], "additionalProperties": False}
    fields = {"name": {"const": name}, "arguments": arguments}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


CALL = {
    "anyOf": [
        call_of("search_documents", {"query": TEXT, "maximum_results": {"type": "integer", "maximum": 50}}),
        call_of("create_reminder", {"reminder_text": TEXT, "repeat_every_day": {"type": "boolean"}}),
    ]
}
WORKLOADS = ("schema", "tools", "edits")


def requests(workload: str, count: int) -> list[tuple[list[dict[str, str]], SamplingParams]]:
    """Return up to `count` chats of a workload, each with its parameters; none for `edits` without SPECRS_DATA."""
    if workload == "edits":
        folder = os.environ.get("SPECRS_DATA")
        if folder is None:
            return []
        lines = (Path(folder) / "instructcoder_edit_eval.jsonl").read_text(encoding="utf-8").splitlines()
        tasks = [task for task in map(json.loads, lines) if 200 <= len(task["input"]) <= 1500][:count]
        return [
            (
                [{"role": "user", "content": f"{task['instruction']}\n\n```python\n{task['input']}\n```"}],
                SamplingParams(temperature=0, max_tokens=256, prediction=f"```python\n{task['input']}\n```"),
            )
            for task in tasks
        ]
    schema, demand = (SCHEMA, "Describe") if workload == "schema" else (CALL, "Find documents or set a reminder about")
    params = SamplingParams(temperature=0, max_tokens=256, structured_outputs=StructuredOutputsParams(json=schema))
    return [([{"role": "user", "content": f"{demand} {subject} in JSON."}], params) for subject in SUBJECTS[:count]]


def measure(engines: dict[str, LLM], asked: list[tuple[Any, SamplingParams]]) -> dict[str, float]:
    """Run the requests on every engine in turns, and return the seconds of each. The texts must be equal."""
    seconds, names = dict.fromkeys(engines, 0.0), list(engines)
    for i, (messages, params) in enumerate(asked):
        texts = set()
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            [output] = engines[name].chat(messages, params, use_tqdm=False)
            seconds[name] += time.perf_counter() - start
            texts.add(output.outputs[0].text)
        assert len(texts) == 1, texts
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TARGET))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="of each workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--k", nargs="+", default=["7", "15", "auto"])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings: dict[str, Any] = {"threads": args.threads, "max_num_seqs": 1, "enable_prefix_caching": False}
    settings["max_model_len"] = 2048
    engines = {"plain": LLM(args.model, **settings)}
    for k in args.k:
        number = k if k == "auto" else int(k)
        # Outputs of other requests are not kept: the same requests come again in each round.
        drafts = {"method": "suffix", "num_speculative_tokens": number, "suffix_decoding_max_cached_requests": 0}
        engines[f"K={k}"] = LLM(args.model, speculative_config=drafts, **settings)
    found: dict[str, Any] = {}
    for workload in args.workloads:
        asked = requests(workload, args.prompts)
        if not asked:
            continue
        measure(engines, asked[:1])
        for llm in engines.values():
            llm.reset_stats()
        rounds = [measure(engines, asked) for _ in range(args.rounds)]
        for name, llm in engines.items():
            ratios, stats = [seconds["plain"] / seconds[name] for seconds in rounds], llm.stats()
            drafters = {
                method: [figures.draft_tokens, figures.accepted_tokens]
                for method, figures in stats.drafters.items()
                if figures.draft_tokens
            }
            row = {"speedup": statistics.median(ratios), "speedups": ratios, "drafted_and_accepted": drafters}
            row["tokens_per_second"] = stats.generation_tokens / sum(seconds[name] for seconds in rounds)
            row["tokens_per_pass"] = stats.generation_tokens / stats.target_passes
            found.setdefault(workload, {})[name] = row
            print(f"{workload:8} {name:8} {row['tokens_per_second']:8.1f} tokens/s {row['speedup']:.2f}x {drafters}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "results": found,
        "settings": {
            **{key: value for key, value in vars(args).items() if key != "out"},
            "model": Path(args.model).name,
        },
        "machine": {"processor": platform.machine(), "threads": args.threads},
        "versions": {"specrs": specrs.__version__, "commit": commit.stdout.strip()},
    }
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

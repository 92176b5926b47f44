"""specrs against transformers on a CPU: the bundled pair, fp32, batch 1. Times whole generations, not kernels.

    python benches/bench_cpu_vs_transformers.py [--rounds 5] [--threads 2] [--out benches/results/...json]

16 prompts of 128 tokens cut from the bundled prompts (written for this project, so the pair was not trained on them),
128 new tokens each. Every round runs every contestant once, in turn; figures are medians over rounds.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import specrs
import torch
import transformers
from specrs import LLM, SamplingParams
from specrs.pair import DRAFT, TARGET
from specrs.pair.prompts import PROMPTS
from transformers import AutoModelForCausalLM

PROMPT_LEN, NEW_TOKENS, NUM_PROMPTS, K = 128, 128, 16, 5
SAMPLED = {"temperature": 0.8, "top_p": 0.9}


def make_prompts(llm: LLM) -> list[list[int]]:
    """Return windows of 128 tokens of the joined bundled prompts, evenly spread."""
    ids = llm.get_tokenizer().encode("\n\n\n".join(PROMPTS))
    ids = ids * (1 + NUM_PROMPTS * PROMPT_LEN // len(ids))
    step = (len(ids) - PROMPT_LEN) // NUM_PROMPTS
    return [ids[i * step : i * step + PROMPT_LEN] for i in range(NUM_PROMPTS)]


def specrs_runner(k: int, **params: Any) -> tuple[LLM, Callable[[list[int]], Any]]:
    """Return an engine at K = `k`, and a function that continues one prompt."""
    speculative = {"num_speculative_tokens": k} if k else None
    llm = LLM(
        speculative_config=speculative,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=1,
        enable_prefix_caching=False,  # every round prefills anew, as transformers does
    )
    llm_params = SamplingParams(
        max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, seed=0, **({"temperature": 0.0} | params)
    )
    return llm, lambda prompt: llm.generate({"prompt_token_ids": prompt}, llm_params, use_tqdm=False)[0]


def transformers_runner(assisted: bool) -> Callable[[list[int]], Any]:
    """Return a function that runs transformers' `generate`, without a draft model or assisted by one at a constant
    K."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    extra: dict[str, Any] = {}
    if assisted:
        draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32).eval()
        draft.generation_config.num_assistant_tokens = K
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        extra["assistant_model"] = draft

    def run(prompt: list[int]) -> Any:
        ids = torch.tensor([prompt])
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            **extra,
        )

    return run


def seconds(run: Callable[[list[int]], Any], prompts: list[list[int]]) -> float:
    """Return the wall time in seconds of all prompts, run one after the other."""
    start = time.perf_counter()
    for prompt in prompts:
        run(prompt)
    return time.perf_counter() - start


def peak_memory_mb() -> float:
    """Return the largest resident size, in MB, of a process that does nothing but run the engine."""
    code = (
        "import resource, torch; from specrs import LLM, SamplingParams; from specrs.pair.prompts import PROMPTS\n"
        "speculative = {'num_speculative_tokens': 5}\n"
        "llm = LLM(speculative_config=speculative, dtype='float32', max_model_len=512, max_num_seqs=1)\n"
        "llm.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=128), use_tqdm=False)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    vanilla_llm, vanilla = specrs_runner(0)
    spec_llm, spec = specrs_runner(K)
    sampled_llm, sampled = specrs_runner(K, **SAMPLED)
    prompts = make_prompts(vanilla_llm)
    contestants: dict[str, Callable[[list[int]], Any]] = {
        "transformers generate": transformers_runner(assisted=False),
        f"transformers assisted, K = {K}": transformers_runner(assisted=True),
        "specrs, no speculation": vanilla,
        f"specrs, K = {K}": spec,
        f"specrs, K = {K}, T = 0.8, top-p 0.9": sampled,
    }
    for run in contestants.values():
        run(prompts[0])
    llms = {"spec": spec_llm, "sampled": sampled_llm}
    for llm in llms.values():
        llm.reset_stats()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    first: dict[int, list[float]] = {0: [], K: []}
    turns = [(0, vanilla), (K, spec)]
    for _ in range(args.rounds):
        for name, run in contestants.items():
            times[name].append(seconds(run, prompts))
        for prompt in prompts:
            # Who goes first finds the caches as the other's generation left them: a few per cent, so they take turns.
            turns.reverse()
            for k, run in turns:
                first[k].append(1e3 * run(prompt).metrics.time_to_first_token)

    tokens = NUM_PROMPTS * NEW_TOKENS
    rate = {name: tokens / statistics.median(values) for name, values in times.items()}
    names = list(contestants)
    iterations = {key: (llm.stats().drafts) / args.rounds for key, llm in llms.items()}
    figures = {
        "tokens_per_second": {name: round(value, 1) for name, value in rate.items()},
        "vanilla_vs_transformers": round(rate[names[2]] / rate[names[0]], 3),
        "speculation_vs_vanilla": round(rate[names[3]] / rate[names[2]], 3),
        "speculation_vs_assisted": round(rate[names[3]] / rate[names[1]], 3),
        "acceptance_length": round(spec_llm.stats().acceptance_length, 3),
        "median_ttft_ms": {f"K = {k}": round(statistics.median(values), 3) for k, values in first.items()},
        "peak_memory_mb": round(peak_memory_mb(), 1),
    }
    # The greedy engine also ran the first-token rounds, so its iterations are counted per generation.
    per_iteration = {
        "greedy": 1e3 * statistics.median(times[names[3]]) / (iterations["spec"] / 2),
        "sampled": 1e3 * statistics.median(times[names[4]]) / iterations["sampled"],
    }
    figures["ms_per_iteration"] = {name: round(value, 3) for name, value in per_iteration.items()}
    figures["sampling_cost"] = round(per_iteration["sampled"] / per_iteration["greedy"] - 1, 4)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    report = {
        "what": " ".join(__doc__.split("\n")[0].split()),
        "command": "python " + " ".join(sys.argv),
        "machine": f"{platform.machine()}, {args.threads} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "specrs": specrs.__version__,
        },
        "commit": commit.stdout.strip(),
        "rounds": args.rounds,
        "figures": figures,
        "maxrss_of_this_process_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    print(json.dumps(report, indent=2))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

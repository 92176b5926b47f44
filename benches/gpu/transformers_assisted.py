"""Measures transformers' assisted generation at the same sizes, in a process of its own: milliseconds per iteration.

    python benches/gpu/transformers_assisted.py TARGET DRAFT K CONTEXT ITERATIONS

TARGET and DRAFT are folders with a config.json; weights are random, so nearly every draft is rejected, and an
iteration is K draft passes and one target pass over K + 1 rows whatever is accepted. Prints one JSON object.
"""

import json
import sys
import time

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM


def build(folder: str, device: torch.device) -> transformers.PreTrainedModel:
    """Return a model of random bf16 weights, made on the device."""
    with device:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()


def main() -> None:
    """Generate, and time the target's passes after the first few."""
    target_folder, draft_folder = sys.argv[1:3]
    k, context, iterations = map(int, sys.argv[3:6])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, draft = build(target_folder, device), build(draft_folder, device)
    draft.generation_config.num_assistant_tokens = k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    for model in (target, draft):
        model.generation_config.eos_token_id = None
    times: list[float] = []

    def mark(*_: object) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    target.register_forward_hook(mark)
    prompt = torch.randint(0, target.config.vocab_size, (1, context), device=device)
    target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=draft,
        max_new_tokens=iterations,
        do_sample=False,
    )
    steady = times[min(5, len(times) // 2) :]
    per_iteration = 1e3 * (steady[-1] - steady[0]) / (len(steady) - 1)
    print(json.dumps({"ms_per_iteration": per_iteration, "iterations": len(steady) - 1, "k": k}))


if __name__ == "__main__":
    main()

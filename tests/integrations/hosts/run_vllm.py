"""Generates with vLLM in an environment of its own, and prints what came as JSON. Holds no tests; imports no tests.

    PYTHONPATH=python ENVIRONMENT/bin/python tests/integrations/hosts/run_vllm.py < REQUEST

The request: `model`, `prompts` (token ids), `max_tokens`, `max_num_seqs`, `runs` (names and their `speculative_config`,
or None). vLLM takes one engine a process, so each run is one, in turn.
"""

import json
import os
import subprocess
import sys

VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def generate(request: dict, speculative: dict | None) -> dict:
    """Run one engine. Return the tokens of every prompt, and vLLM's counts of drafts."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=request["model"],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=request["max_num_seqs"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        async_scheduling=False,
        speculative_config=speculative,
        additional_config={"specrs": {"prompt_lookup_min": 1, "prompt_lookup_max": 4}},
    )
    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    counts = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    drafter = getattr(engine.llm_engine.model_executor.driver_worker.worker.model_runner, "drafter", None)
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": counts.get("vllm:spec_decode_num_drafts", 0),
        "draft_tokens": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted_tokens": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        "drafter": type(drafter).__module__ + "." + type(drafter).__name__,
        "cache": type(getattr(drafter, "suffix_cache", None)).__module__,
        "faults": getattr(drafter, "num_faults", 0),
    }


def main() -> None:
    """Run the jobs that standard input describes; with an argument, only the job of that name."""
    request = json.load(sys.stdin)
    if len(sys.argv) > 1:
        result = generate(request, request["runs"][sys.argv[1]])
        sys.stdout.write("RESULT " + json.dumps(result) + "\n")
        return
    results = {}
    for name in request["runs"]:
        done = subprocess.run(
            [sys.executable, __file__, name],
            input=json.dumps(request),
            env={**os.environ, **VARIABLES},
            capture_output=True,
            text=True,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode != 0 or not lines:
            sys.exit(done.stdout[-4000:] + done.stderr[-8000:])
        results[name] = json.loads(lines[0].removeprefix("RESULT "))
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()

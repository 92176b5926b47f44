"""Measurement of one process, and its result. Standard library only: every engine's environment has it.

A process is `python -m peers.run_ENGINE JOB RESULT`, both JSON files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

Ids = list[list[int]]
"""Token ids of some requests."""
NGRAM = 3
"""Number of last tokens that peers look up in the text; specrs looks up 5, its default."""


@dataclass(frozen=True)
class Job:
    """One engine at one setting.

    `model`, `draft`: what the engine loads, a folder or a file; `draft` is None with `k` 0 and with a `method` that
    drafts from the text, which is "" otherwise. `k`: drafts an iteration,
    or "auto". `dtype`: float32 or bfloat16, of the arithmetic and of the KV cache; otherwise the type of quantized
    weights, and engines choose the rest. `groups`: prompts of requests that
    run at once, at most `batch` of them; `warm` is the same, run before and not measured. `peers`: the folder of what
    was installed. `cpu_prefill`: of specrs.
    """

    model: str
    draft: str | None
    k: int | str
    dtype: str
    threads: int
    batch: int
    new_tokens: int
    sampled: bool
    peers: str
    cpu_prefill: str
    warm: list[Ids]
    groups: list[Ids]
    method: str = ""

    @property
    def is_quantized(self) -> bool:
        """True if weights are quantized, so that arithmetic and KV cache are the engine's own choice."""
        return self.dtype not in ("float32", "bfloat16")

    @property
    def drafts(self) -> bool:
        """True if the job drafts."""
        return self.draft is not None or self.method != ""

    @property
    def prompt_tokens(self) -> int:
        """Length of the longest prompt."""
        return max(len(prompt) for group in self.groups for prompt in group)

    @property
    def context(self) -> int:
        """Positions that a request may come to, with room for drafts."""
        return max(512, self.prompt_tokens + self.new_tokens + 32)


@dataclass(frozen=True)
class Group:
    """Results of requests that ran at once.

    `first_s`: seconds to the first token, the mean over the requests. `total_s`: seconds until all had ended.
    `first_tokens`: number of tokens at that moment; more than one per request if drafts are verified in the prompt's
    pass. `passes`: number of the target's passes after that moment, counted for each request; None without drafts,
    where every token takes one pass.
    """

    ids: Ids
    first_s: float
    total_s: float
    first_tokens: int
    passes: float | None = None


def read_job() -> Job:
    """Return the job that the command line names."""
    return Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


def peak_bytes(process: int | str = "self") -> int | None:
    """Largest resident memory of a process so far, mapped files included; None if the system does not say."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def measure(
    job: Job, run: Callable[[Ids], Group], versions: dict[str, str], load_s: float, process: int | str = "self"
) -> None:
    """Run every group once, after those that warm up, and write the result where the command line says.

    The peak memory is that of `process`, which runs the engine.
    """
    for prompts in job.warm:
        run(prompts)
    groups = [asdict(run(prompts)) for prompts in job.groups]
    result = {"versions": versions, "load_s": load_s, "groups": groups, "peak_bytes": peak_bytes(process)}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")

"""transformers' `generate` on a job, assisted by the draft at a constant K. Assisted generation takes batch 1 only."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from peers.job import Group, Ids, Job, measure, read_job


class FirstTokens(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion that records when the first tokens have come, and stops nothing."""

    def __init__(self) -> None:
        self.when: float | None = None
        self.length = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Record the time. `input_ids` is `[B, L]`; returns False `[B]`."""
        if self.when is None:
            self.when, self.length = time.perf_counter(), input_ids.shape[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load(folder: str, dtype: str) -> Any:
    """Load a model that never stops and masks no token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    return model


def main(job: Job) -> None:
    """Measure the job. Passes are calls of the target; the first is the prompt's, which verifies drafts already."""
    torch.set_num_threads(job.threads)
    transformers.logging.set_verbosity_error()
    began = time.perf_counter()
    model = load(job.model, job.dtype)
    extra: dict[str, Any] = {}
    if job.draft is not None:
        extra["assistant_model"] = draft = load(job.draft, job.dtype)
        draft.generation_config.num_assistant_tokens = job.k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
    load_s = time.perf_counter() - began
    calls = [0]
    model.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def run(prompts: Ids) -> Group:
        ids = torch.tensor(prompts)
        clock = FirstTokens()
        calls[0] = 0
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=job.new_tokens,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
                **extra,
            )
        total_s = time.perf_counter() - start
        assert clock.when is not None
        length = ids.shape[1]
        first_tokens = (clock.length - length) * len(prompts)
        passes = None if job.draft is None else calls[0] - 1
        return Group(output[:, length:].tolist(), clock.when - start, total_s, first_tokens, passes)

    measure(job, run, {"transformers": transformers.__version__, "torch": torch.__version__}, load_s)


if __name__ == "__main__":
    main(read_job())

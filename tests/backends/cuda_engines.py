"""Small requests for engines on the CUDA runner and on the CPU runner. Triton's interpreter runs the kernels. Holds no
tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from specrs.backends.cuda.context import sequences_of
from specrs.backends.cuda.graphs import tasks
from specrs.backends.cuda.runner import CudaRunner, Work
from specrs.backends.cuda.workspace import Workspace
from specrs.backends.table import BACKENDS
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.models.lora import LoRAAdapter
from specrs.sampling import SamplingParams
from torch import Tensor

K = 3
SMALL: dict[str, Any] = {
    "max_model_len": 32,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 12,
    "block_size": 4,
    "num_gpu_blocks_override": 20,
    "max_steps_in_flight": 2,
    "device": "cpu",  # also where there is a GPU, which then runs kernel by kernel (see `gpu_shuttle`)
}
"""Settings of engines whose requests are `PROMPTS`."""
CUDA = BACKENDS["cuda"]
PROMPTS = [[5, 9, 2, 33, 7, 7, 1, 12, 40, 3, 22], [5, 9, 2, 33, 7, 7, 1, 12], [60]]


def serve_by_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let the CUDA backend make the runners of engines on a CPU."""
    patch.setattr("specrs.engine.plan.backend_of", lambda _device: CUDA)


def written_tensors(workspace: Workspace) -> list[Tensor]:
    """Return the tensors of a workspace that a step must not read before it writes them. Counters stay zero."""
    found = {field.name: getattr(workspace, field.name) for field in dataclasses.fields(workspace)}
    return [value for name, value in found.items() if isinstance(value, Tensor) and name != "counters"]


def generate(
    engine: Engine,
    params: list[SamplingParams],
    num_tokens: int = 5,
    prompts: list[list[int]] = PROMPTS,
    loras: Sequence[LoRAAdapter | None] | None = None,
) -> list[Request]:
    """Run every prompt to its end, with its adapter. Return the requests: ids, log probabilities and statistics."""
    requests = [
        Request(
            i,
            prompt,
            own.replace(max_tokens=num_tokens, ignore_eos=True),
            num_speculative_tokens=K,
            seed=100 + i,
            prediction_token_ids=[int(token) for token in own.prediction or ()],
            lora=lora,
        )
        for i, (prompt, own, lora) in enumerate(zip(prompts, params, loras or [None] * len(prompts), strict=True))
    ]
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.num_free_blocks == engine.scheduler.num_blocks
    return requests


class Graphs:
    """Stands in for captured CUDA graphs: a replay calls the function again."""

    def __init__(self, work: dict[Hashable, Callable[[], None]]) -> None:
        self.work = work
        self.replayed: list[Hashable] = []

    def noted(self, key: Hashable, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `run` and notes `("plain", key)` in `replayed`. It stands for a graph of steps
        without LoRA adapters, so that tests can tell which steps used one."""

        def noting() -> None:
            self.replayed.append(("plain", key))
            run()

        return noting

    def __contains__(self, key: Hashable) -> bool:
        return key in self.work

    def __len__(self) -> int:
        return len(self.work)

    def replay(self, key: Hashable) -> None:
        self.replayed.append(key)
        self.work[key]()


@torch.inference_mode()
def give_graphs(engine: Engine) -> Graphs:
    """Let the engine run its steps as it does on a GPU with CUDA graphs."""
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    sequences = sequences_of(runner.ctx.record.views, "num_decode")
    work = runner.adapted
    graphs = Graphs(dict(tasks(work.ctx, runner.buckets, sequences)))
    plain = None
    if runner.plain is not None:
        own = Graphs({key: graphs.noted(key, run) for key, run in tasks(runner.plain.ctx, runner.buckets, sequences)})
        plain = Work(runner.plain.ctx, own)  # type: ignore[arg-type]
    engine.runner = CudaRunner(
        work.ctx,
        runner.sampling,
        runner.buckets,
        graphs,  # type: ignore[arg-type]
        logprobs_mode=runner.logprobs_mode,
        loras=runner.loras,
        plain=plain,
    )
    return graphs

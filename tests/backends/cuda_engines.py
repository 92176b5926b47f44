"""Small requests for engines on the CUDA runner and on the CPU runner. Triton's interpreter runs the kernels. Holds no
tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import strategies as st
from specrs.backends.cuda.context import sequences_of
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.drafters.head import HeadPasses
from specrs.backends.cuda.graphs import tasks
from specrs.backends.cuda.runner import CudaRunner, Work
from specrs.backends.cuda.workspace import Workspace
from specrs.backends.table import BACKENDS
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
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
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
PROMPTS = [[5, 9, 2, 33, 7, 7, 1, 12, 40, 3, 22], [5, 9, 2, 33, 7, 7, 1, 12], [60]]


def serve_by_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let the CUDA backend make the runners of engines on a CPU."""
    patch.setattr("specrs.engine.plan.backend_of", lambda _device: CUDA)


def engine_config(
    path: Path, speculative: dict[str, Any] | None = None, *, rule: str = "rejection", **fields: Any
) -> EngineConfig:
    """Return the configuration of a small engine for the target at `path`, without a prefix cache. `speculative` is its
    `speculative_config` without the rule, `K` drafts by default; None: no drafts."""
    if speculative is not None:
        speculative = {"num_speculative_tokens": K} | speculative | {"rejection_sample_method": rule}
        if speculative["method"] == "ngram":
            speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
        if any(host in speculative["method"] for host in ("ngram", "suffix")):
            fields["max_steps_in_flight"] = 1
    given = SMALL | {"enforce_eager": True, "enable_prefix_caching": False} | fields
    return EngineConfig(model=str(path), dtype="float32", speculative_config=speculative, **given)  # type: ignore[arg-type]


def make_engine(config: EngineConfig, weights: Weights, *, gpu: bool = True) -> Engine:
    """Return an engine on the CUDA runner, with NaN or invalid values in memory that a step must not read. Without
    `gpu`, it is on the CPU runner."""
    with pytest.MonkeyPatch.context() as patch:
        if gpu:
            serve_by_cuda(patch)
            config = dataclasses.replace(config, enforce_eager=False)
        made = build_engine(config, weights)
    assert isinstance(made.runner, CudaRunner) == gpu
    if isinstance(made.runner, CudaRunner):
        poison(made.runner)
    return made


def drafted_config(target: Path, drafter: str | None, draft: Path | None = None, **fields: Any) -> EngineConfig:
    """Return the `engine_config` with a method of drafting; None: no drafts. `draft` is the model of `draft_model`."""
    if drafter is None:
        return engine_config(target, **fields)
    return engine_config(target, {"method": drafter} | ({} if draft is None else {"model": str(draft)}), **fields)


class Engines:
    """Engines of one test module. Weights are loaded once for each target and drafter, and plain texts made once."""

    def __init__(
        self, config: Callable[..., EngineConfig], prompts: list[list[int]] = PROMPTS, num_tokens: int = 5
    ) -> None:
        """Prepare engines of `config(*names, **fields)`. `names` decide which weights are loaded, and `fields` do not.
        `prompts` and `num_tokens` are those of `plain`."""
        self.config = config
        self.weights = cache(self._weights)
        self.plain = cache(self._plain)
        self._prompts, self._num_tokens = prompts, num_tokens

    def engine(self, *names: str | int | None, gpu: bool = True, **fields: Any) -> Engine:
        """Return a new engine on the CUDA runner; without `gpu`, on the CPU runner."""
        return make_engine(self.config(*names, **fields), self.weights(*names), gpu=gpu)

    def _weights(self, *names: str | int | None) -> Weights:
        """Return the weights of `names`, which all engines share."""
        return load_weights(self.config(*names))

    def _plain(self, target: str, params: SamplingParams) -> list[list[int]]:
        """Return the texts of the CPU runner without drafts, of requests with `params`."""
        made = self.engine(target, None, gpu=False)
        return texts(generate(made, [params] * len(self._prompts), self._num_tokens, self._prompts))


@torch.inference_mode()
def poison(runner: CudaRunner, caches: bool = True) -> None:
    """Fill whatever a step must not read before writing it with NaN or invalid values. Counters stay zero."""
    ctx = runner.ctx
    tensors = [tensor for name, tensor in ctx.buffers.tensors().items() if name not in {"uniform_start"}]
    tensors.append(ctx.record.results)
    models: list[Workspace] = [model.workspace for model in (ctx.target,) if isinstance(model, CudaDecoder)]
    if ctx.hidden is not None:
        head = cast("HeadPasses", ctx.drafter).model
        models.append(head.workspace)
        tensors += [getattr(head.buffers, field.name) for field in dataclasses.fields(cast("Any", head.buffers))]
    for workspace in models:
        tensors += written_tensors(workspace)
    if caches:
        own = [ctx.kv_cache, getattr(ctx.drafter, "kv_cache", None)]
        tensors += [layer for cache in own if cache is not None for layer in cache.layers]
        tensors += [] if ctx.states is None else ctx.states.memory
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**30))


def written_tensors(workspace: Workspace) -> list[Tensor]:
    """Return the tensors of a workspace that a step must not read before it writes them. Counters stay zero."""
    found = {field.name: getattr(workspace, field.name) for field in dataclasses.fields(workspace)}
    return [value for name, value in found.items() if isinstance(value, Tensor) and name != "counters"]


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """Settings that change no text: `texts_in` compares texts under them with those of a CPU without drafts."""

    sampled: bool
    graphs: bool
    """True if steps run as with CUDA graphs."""
    budget: int
    """Number of tokens of a step, which decides in how many chunks prompts are."""
    blocks: int
    """Number of KV blocks. With 8, requests are preempted."""

    @property
    def params(self) -> SamplingParams:
        """Greedy parameters, or those that draw from all tokens."""
        return SAMPLED if self.sampled else GREEDY

    @property
    def fields(self) -> dict[str, Any]:
        """Arguments of `engine_config`. Sampled text is that without drafts only by the rule `coupled`."""
        return {
            "rule": "coupled" if self.sampled else "rejection",
            "max_num_batched_tokens": self.budget,
            "num_gpu_blocks_override": self.blocks,
            "num_reserved_decode_tokens": 0,
        }


SETTINGS = st.builds(TextSettings, st.booleans(), st.booleans(), st.sampled_from([4, 12]), st.sampled_from([8, 20]))
OWN_K = st.lists(st.sampled_from([0, 1, K]), min_size=3, max_size=3)
"""Numbers of drafts that each of three requests asks for."""


def texts_in(
    settings: TextSettings,
    engine: Engine,
    num_tokens: int,
    prompts: list[list[int]],
    params: Sequence[SamplingParams] | None = None,
) -> list[list[int]]:
    """Return the texts of an engine that has the fields of `settings`. `params` are the requests' own; None: those of
    `settings`."""
    if settings.graphs:
        give_graphs(engine)
    return texts(generate(engine, list(params or [settings.params] * len(prompts)), num_tokens, prompts))


def texts(requests: list[Request]) -> list[list[int]]:
    """Return the token ids of requests that ended without an error."""
    assert all(request.error is None for request in requests)
    return [request.output_token_ids for request in requests]


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

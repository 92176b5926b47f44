"""Kernels that Triton would compile while an engine serves: specialisations that a mixed run needs and that the start
has not launched. Kernels are interpreted; a graph's replay calls its function again."""

from typing import Any

import pytest
import torch
from kernel_launches import H200, Launch, recorded
from lora.adapters import Spec, write_adapter
from specrs import LoRARequest
from specrs.backends.cuda import attention
from specrs.backends.cuda.context import sequences_of
from specrs.backends.cuda.graphs import Uncaptured, tasks
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.cuda.warm_up import warm_up
from specrs.engine.engine import Engine
from specrs.kernels.cuda.attention_config import AttentionConfig
from specrs.kernels.cuda.embedding import embed_kernel
from specrs.kernels.cuda.lora import lora_expand_kernel, lora_shrink_kernel
from specrs.kernels.cuda.paged_attention import paged_attention_kernel
from specrs.kernels.cuda.qk_norm_rope import qk_norm_rope_kernel
from specrs.kernels.cuda.skinny_linear import skinny_linear_kernel
from specrs.models.lora import LoRAAdapter
from specrs.sampling import SamplingParams

from .cuda_engines import PROMPTS, generate, give_graphs
from .test_cuda_drafters import Bench, bench  # noqa: F401 (a fixture)
from .test_cuda_runner import GREEDY, PENALISED, Pair, pair  # noqa: F401 (a fixture)

Keys = dict[tuple[Any, ...], Launch]
PASSES = (
    embed_kernel,
    skinny_linear_kernel,
    paged_attention_kernel,
    qk_norm_rope_kernel,
    lora_shrink_kernel,
    lora_expand_kernel,
)
"""Kernels that only compute values, and decide nothing about tokens, lengths or slots. They are not run, so all logits
are 0. That halves the time."""


def keys_of(launches: list[Launch]) -> Keys:
    return {launch.key(): launch for launch in launches}


@torch.inference_mode()
def start(engine: Engine, *, eager: bool) -> Keys:
    """Give the engine's runner its graphs unless `eager`. Return the keys of the kernels that the start launches; none
    of them runs."""
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    launches: list[Launch] = []
    with recorded(launches):
        for work in (runner.adapted, runner.plain):
            if work is None:
                continue
            if eager:
                assert isinstance(work.graphs, Uncaptured)
                work.graphs.run_all()
                continue
            for _, function in tasks(work.ctx, runner.buckets, sequences_of(work.ctx.record.views, "num_decode")):
                function()
        warm_up(runner.adapted.ctx, runner.buckets)
    if not eager:
        give_graphs(engine)
    return keys_of(launches)


def lacking(known: Keys, served: Keys) -> set[str]:
    """Return the kernels of `served` that are not in `known`, with what distinguishes each from the nearest known
    one."""
    found = set()
    for key, launch in served.items():
        if key in known:
            continue
        near = [k for k in known if k[0] == launch.name]
        differs = min(
            ([name for part in range(1, 5) for name in _different(key[part], other[part])] for other in near),
            key=len,
            default=["all of it"],
        )
        found.add(f"{launch.name}: {', '.join(differs)}")
    return found


def _different(one: Any, other: Any) -> list[str]:
    """Return the names of the arguments in which two parts of keys differ."""
    return sorted({str(item[0]) if isinstance(item, tuple) else f"{item} aligned" for item in {*one} ^ {*other}})


def cut_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Divide work as on an H200. Without a device, attention in fp32 over chunks of any length would be one kernel."""
    choose = AttentionConfig.choose

    def on_a_gpu(**named: Any) -> AttentionConfig:
        return choose(**named | {"limits": H200, "dtypes": (torch.bfloat16, torch.bfloat16)})

    patch.setattr(AttentionConfig, "choose", on_a_gpu)
    patch.setattr(attention, "_attention_config", attention._attention_config.__wrapped__)


LONG = [[5, 9, 2, 33, 7] * 58, [5, 9, 2, 33, 7] * 5, [60]]
"""The first prompt has more rows than graphs have. The second has the most rows that split attention serves, and a few
more."""
MANY = [[i] * (1 + i % 2) for i in range(5, 15)]
"""More prompt chunks than graphs have, with few rows in all."""
CASES: dict[str, tuple[list[list[int]], bool, dict[str, int]]] = {
    "short chunks": (PROMPTS, False, {"max_num_batched_tokens": 12}),
    "whole prompts": (PROMPTS, False, {"max_num_batched_tokens": 40}),
    "short chunks, eager": (PROMPTS, True, {"max_num_batched_tokens": 12}),
    "whole prompts, eager": (PROMPTS, True, {"max_num_batched_tokens": 40}),
    "long prompt": (LONG, False, {"max_num_batched_tokens": 320, "max_model_len": 320, "num_gpu_blocks_override": 200}),
    "many chunks": (MANY, False, {"max_num_batched_tokens": 40, "max_num_seqs": 10, "num_gpu_blocks_override": 60}),
}


OTHERS = ("head, whole prompts, eager", "head, long prompt", "adapters, whole prompts", "adapters, long prompt")


@pytest.fixture(scope="module", params=[*CASES, *OTHERS])
def census(
    request: pytest.FixtureRequest,
    pair: Pair,  # noqa: F811
    bench: Bench,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Keys, Keys]:
    """Return the keys of the kernels that the start launches, and those that serving launches."""
    _, of_head, case = request.param.rpartition("head, ")
    _, adapted, case = case.rpartition("adapters, ")
    prompts, eager, fields = CASES[case]
    loras: list[LoRAAdapter | None] | None = None
    plain = [GREEDY, SamplingParams(temperature=0.8, top_p=0.9), GREEDY.replace(num_speculative_tokens=1)]
    asking = [PENALISED, SamplingParams(temperature=0.8, logprobs=2), GREEDY.replace(prompt_logprobs=1)]
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        cut_as_on_a_gpu(patch)
        if of_head:
            engine = bench.engine("fitted head", "rejection", gpu=True, monkeypatch=patch, **fields)
        elif adapted:
            lora: Any = {"enable_lora": True, "max_loras": 2}
            engine = pair.engine(gpu=True, monkeypatch=patch, **fields, **lora)
            path = write_adapter(tmp_path_factory.mktemp("lora"), pair.target, Spec(("q_proj", "down_proj")))
            assert engine.loras is not None
            loras = [engine.loras.load(LoRARequest("a", 1, str(path))), None, None][: len(prompts)]
        else:
            engine = pair.engine(gpu=True, monkeypatch=patch, **fields)
        known = start(engine, eager=eager)
        with recorded(launches, run=True, left_out=PASSES):
            for params in (plain, asking):
                generate(engine, [params[i % 3] for i in range(len(prompts))], 6, prompts, loras)
            if adapted:
                generate(engine, [GREEDY] * len(prompts), 2, prompts)
    return known, keys_of(launches)


def test_nothing_else_is_compiled_while_serving(census: tuple[Keys, Keys]) -> None:
    assert lacking(*census) == set()


def test_a_specialisation_that_the_start_lacks_is_seen(census: tuple[Keys, Keys]) -> None:
    known, served = census
    fewer = {key: launch for key, launch in known.items() if launch.name != "update_kernel"}
    assert lacking(fewer, served) == {"update_kernel: all of it"}


def test_an_odd_number_of_sequences_is_no_other_kernel(census: tuple[Keys, Keys]) -> None:
    """Check that an odd number of sequences needs no other kernel, although views that begin at an odd sequence are
    aligned differently."""
    known, _ = census
    for name, argument in (("prepare_kernel", "seq_row_ptr"), ("update_kernel", "out_flags_ptr")):
        assert lacking(known, keys_of([moved(known, name, argument)])) == set()


def test_a_view_that_is_aligned_otherwise_is_seen(census: tuple[Keys, Keys]) -> None:
    known, _ = census
    launch = moved(known, "prepare_kernel", "n_ptr")
    assert lacking(known, keys_of([launch])) == {"prepare_kernel: n_ptr aligned"}


def moved(known: Keys, kernel: str, argument: str) -> Launch:
    """Return the launch of a kernel in `known` with one of its tensors shifted by one element. Launches nothing."""
    launch = next(launch for launch in known.values() if launch.name == kernel)
    arguments = {**launch.arguments, argument: launch.arguments[argument][1:]}
    return Launch(launch.fn, launch.grid, arguments, launch.settings)

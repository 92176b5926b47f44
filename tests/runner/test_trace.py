"""The functions of an iteration on fake CUDA tensors: nothing crosses devices, nothing is allocated or random.

A graph would record a stray copy as one that happens once, at capture. `FakeTensorMode` alone lets `.cpu()`, copies
from the host and allocations pass, so a dispatch mode watches every op; what kernels write is in their signatures.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from specrs.config import EngineConfig
from specrs.engine.blueprint import Blueprint
from specrs.engine.build_cuda import make_context
from specrs.engine.weights import Weights
from specrs.kernels.linear import DenseWeight
from specrs.models.dense import Dense
from specrs.models.dense_weights import DenseWeights, LayerWeights
from specrs.models.loader import load_config
from specrs.runner.cuda import iteration
from specrs.runner.cuda.iteration import Context
from specrs.runner.cuda.runner import entries_of
from specrs.runner.cuda.shapes import Shape, Tail
from specrs.runner.sampling_state import SamplingState
from specrs.speculative_config import SpeculativeConfig
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
K, BATCH = 3, 4
VIEWS = {
    "view",
    "narrow",
    "slice",
    "select",
    "t",
    "as_strided",
    "unsqueeze",
    "squeeze",
    "expand",
    "alias",
    "detach",
    "transpose",
}
"""Ops of torch that touch no memory; everything else must be one of ours or write where it is told."""
WRITES = {"mm.out", "addmm.out", "clamp.out", "copy_"}
DRAFT_IDS, IDS = 90, 97
LAYERS = 2


class Watch(TorchDispatchMode):
    """Refuses what a captured iteration must not do, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        strangers = [tensor.device for tensor in tensors if tensor.device.type != "cuda"]
        if strangers:
            raise AssertionError(f"{name}: reads or writes {strangers[0]}")
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            raise AssertionError(f"{name}: draws from a generator")
        namespace, _, op = name.partition("::")
        base = op.partition(".")[0]
        allowed = namespace == "specrs" or base in VIEWS or op in WRITES or name == "prim::device"
        if not allowed:
            raise AssertionError(f"{name}: allocates, waits or depends on data; allowed are {sorted(WRITES)} and views")
        self.ops.append(name)
        return func(*args, **(kwargs or {}))


def fake_decoder(folder: Path, dtype: torch.dtype) -> Dense:
    """A decoder of empty tensors on a device that is not there."""
    c = load_config(folder)
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=CUDA)

    def linear(n: int, k: int, bias: bool = False) -> DenseWeight:
        return DenseWeight(empty(n, k), empty(n) if bias else None)

    layer = LayerWeights(
        input_norm=empty(c.hidden_size),
        qkv=linear(q + 2 * kv, c.hidden_size, c.qkv_bias),
        qk_norm=empty(c.num_heads + c.num_kv_heads, c.head_dim) if c.qk_norm else None,
        o=linear(c.hidden_size, q),
        post_attention_norm=empty(c.hidden_size),
        gate_up=linear(2 * c.intermediate_size, c.hidden_size),
        down=linear(c.hidden_size, c.intermediate_size),
    )
    weights = DenseWeights(
        config=c,
        dtype=dtype,
        device=CUDA,
        embedding=empty(c.vocab_size, c.hidden_size),
        layers=(layer,) * c.num_layers,
        final_norm=empty(c.hidden_size),
        lm_head=linear(c.vocab_size, c.hidden_size),
        rotary=torch.empty(c.head_dim, device=CUDA),
    )
    return Dense(weights)


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def context(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Context]]:
    """Makes contexts of fake tensors; the draft's vocabulary is smaller than the target's."""
    folder = tmp_path_factory.mktemp("trace")
    shape = {"layers": 2, "hidden": 64, "kv_heads": 2, "head_dim": 64}
    target = make_checkpoint(folder / "target", request.param, vocab=97, **shape)  # type: ignore[arg-type]
    draft = make_checkpoint(folder / "draft", request.param, vocab=90, **shape)  # type: ignore[arg-type]
    with FakeTensorMode():
        yield lambda rule: make(target, draft, rule)


def make(target: Path, draft: Path, rule: str) -> Context:
    speculative = SpeculativeConfig(model=str(draft), num_speculative_tokens=K, rejection_sample_method=rule)
    config = EngineConfig(
        model=str(target),
        speculative_config=speculative,
        max_num_seqs=BATCH,
        max_num_batched_tokens=32,
        max_model_len=64,
    )
    weights = Weights(fake_decoder(target, torch.bfloat16), fake_decoder(draft, torch.bfloat16))
    blueprint = Blueprint(config, weights)
    sampling = SamplingState(BATCH, IDS, torch.float32, CUDA)
    return make_context(blueprint, blueprint.scheduler(20), sampling, 20)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("tail", [Tail.GREEDY, Tail.SAMPLED])
@pytest.mark.parametrize("k", [0, K])
def test_an_iteration_stays_on_its_device(context: Callable[..., Context], rule: str, tail: Tail, k: int) -> None:
    ctx = context(rule)
    shape = Shape(BATCH, k, BATCH * (k + 1), tail)
    entries = entries_of(ctx.record.views, "num_decode")
    with torch.inference_mode(), Watch() as watch:
        iteration.prepare(ctx, shape, entries)
        iteration.draft(ctx, shape)
        iteration.verify(ctx, shape)
        iteration.accept_and_update(ctx, shape)
    ours = [op for op in watch.ops if op.startswith("specrs::")]
    # A pass: the embedding, six kernels a layer, the final norm, the LM head.
    passes = (k + 1) * (6 * LAYERS + 3)
    drawn = k * 2 if tail is Tail.SAMPLED else 0  # cut and draw
    accepted = {Tail.GREEDY: 1, Tail.SAMPLED: 2 if rule == "rejection" else 3}[tail]
    assert len(ours) == 1 + passes + drawn + (k > 0) + accepted + 1


@pytest.mark.parametrize(
    "offence",
    [
        lambda x: x.cpu(),
        lambda x: x.item(),
        lambda x: x.new_empty(3),
        lambda x: x + 1,
        lambda x: x.normal_(),
        lambda x: x.copy_(torch.zeros(1)),
        lambda x: x[torch.tensor([0])],
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.multinomial(x, 1),
    ],
)
def test_the_watch_sees(offence: Callable[[Tensor], Any]) -> None:
    with FakeTensorMode():
        x = torch.empty(1, device=CUDA)
        with pytest.raises(AssertionError, match=r"allocates, waits or depends on data|reads or writes cpu"), Watch():
            offence(x)


def test_the_watch_sees_a_copy_from_the_host() -> None:
    with FakeTensorMode():
        x, host = torch.empty(1, device=CUDA), torch.empty(1)
        for copy in (lambda: x.copy_(host), lambda: host.copy_(x)):
            with pytest.raises(AssertionError, match="reads or writes cpu"), Watch():
                copy()

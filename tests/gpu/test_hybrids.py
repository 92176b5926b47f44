"""Models with gated delta nets on a GPU: kernels at real sizes against float64, their bits, and texts of engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, perturb_checkpoint
from mtp_reference import add_head
from specrs.backends.cuda.delta_states import DeltaStates
from specrs.models.decoder_weights import DeltaWeights
from specrs.models.delta_net import DeltaNet
from specrs.models.inputs import PassInputs
from specrs.models.torch_delta_net import delta_net
from specrs.models.torch_states import LayerStates, Runs
from torch import Tensor

from .test_models import SHAPE, build
from .texts import GREEDY, generate, share_of_equal

K = 4
NETS = {"0.8b": DeltaNet(16, 16, 128, 128, 4, (True,)), "9b": DeltaNet(16, 32, 128, 128, 4, (True,))}
HYBRID: dict[str, Any] = {
    "layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


class Passes:
    """One request through one delta net of random weights on a GPU."""

    def __init__(self, net: DeltaNet, drafts: int, dtype: torch.dtype, device: torch.device) -> None:
        config: Any = SimpleNamespace(delta=net, rms_norm_eps=1e-6)
        self.config = config
        generator = torch.Generator(device).manual_seed(5)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        # Decays from next to 1 down, as trained ones have them.
        self.weights = DeltaWeights(
            random(net.kernel, net.conv_dim) / 2,
            2 * random(net.value_heads) - 2,
            random(net.value_heads),
            random(net.value_dim),
        )
        self.states = DeltaStates.allocate(
            self.config, max_rows=4096, max_seqs=2, num_drafts=drafts, dtype=dtype, device=device
        )
        self.out = torch.zeros((4096, net.inner), dtype=dtype, device=device)

    def feed(self, x: Tensor, first: int, *, prompts: bool = False) -> Tensor:
        rows = len(x)
        at = torch.arange(first, first + rows, device=x.device)
        q_start = torch.tensor([0, rows], device=x.device)
        table = torch.zeros((1, 1), dtype=torch.int64, device=x.device)
        inputs = PassInputs(at, at, at, q_start, table, rows, 8192, prompts=prompts)
        dependent = torch.cuda.get_device_capability(x.device)[0] >= 9
        self.states.begin(inputs, dependent)(0, self.weights, x, self.out[:rows])
        return self.out[:rows].clone()


def text(net: DeltaNet, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(6)
    return torch.randn((length, net.outputs), generator=generator, device=device).to(dtype)


@pytest.mark.parametrize("size", NETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_kernels_are_near_float64(device: torch.device, size: str, dtype: torch.dtype) -> None:
    """Check kernels against float64: a prompt in two chunks, then a verification."""
    net, passes = NETS[size], Passes(NETS[size], K, dtype, device)
    x = text(net, 200, dtype, device)
    found = torch.cat(
        [passes.feed(x[:130], 0, prompts=True), passes.feed(x[130:195], 130, prompts=True), passes.feed(x[195:], 195)]
    )
    w = passes.weights
    wide = DeltaWeights(*(part.double() for part in (w.conv, w.a_log, w.dt_bias, w.norm)))
    runs = Runs(((0, tuple(range(200)), 0),), True)
    exact = delta_net(x.double(), wide, passes.config, 0, runs, LayerStates())
    error = (found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) < {torch.bfloat16: 1e-2, torch.float32: 1e-4}[dtype]


@pytest.mark.parametrize("size", NETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_bits_do_not_depend_on_drafts(device: torch.device, size: str, dtype: torch.dtype) -> None:
    """Check that verification with rejected rows has the bits of single rows, and that a prompt does not depend on its
    chunks."""
    net = NETS[size]
    x, wrong = text(net, 120, dtype, device), text(net, 240, dtype, device)[120:]
    alone, drafted = Passes(net, 0, dtype, device), Passes(net, K, dtype, device)
    expected = torch.cat([alone.feed(x[p : p + 1], p, prompts=p < 50) for p in range(120)])
    outputs = [drafted.feed(x[:7], 0, prompts=True), drafted.feed(x[7:50], 7, prompts=True)]
    at, turn = 50, 0
    while at + K < 119:
        kept = 1 + turn % (K + 1)
        rows = torch.cat((x[at : at + kept], wrong[: K + 1 - kept]))
        outputs.append(drafted.feed(rows, at)[:kept])
        at, turn = at + kept, turn + 1
    outputs += [drafted.feed(x[p : p + 1], p) for p in range(at, 120)]
    assert torch.cat(outputs).equal(expected)
    assert drafted.states.bases[:, 0].equal(alone.states.bases[:, 0])
    assert drafted.states.inputs[:, 0, : net.kernel - 1].equal(alone.states.inputs[:, 0])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("hybrids")
    target = make_checkpoint(folder / "target", "qwen3_5_text", seed=1, **(SHAPE | HYBRID))
    return add_head(target), make_checkpoint(folder / "draft", "qwen3", seed=2, **SHAPE)


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a shared expert and others in every layer, and with an MTP head."""
    path = tmp_path_factory.mktemp("experts") / "target"
    return add_head(make_checkpoint(path, "qwen3_5_moe_text", seed=1, **(SHAPE | HYBRID)))


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "mtp", "mtp with experts"])
def test_texts(pair: tuple[Path, Path], with_experts: Path, kind: str) -> None:
    """Check texts with graphs, with and without drafts, eager, and torch's on the CPU. Only near-ties may differ."""
    target, draft = pair
    if kind == "mtp with experts":
        target, kind = with_experts, "mtp"
    speculative: dict[str, Any] = {"method": kind}
    if kind == "ngram":
        speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    elif kind == "draft_model":
        speculative["model"] = str(draft)
    fields: dict[str, Any] = {"enable_prefix_caching": False}
    engine = build(target, speculative, **fields)
    texts = generate(engine, [GREEDY] * 4)
    assert engine.stats().drafts > 0
    assert share_of_equal(generate(engine, [GREEDY.replace(num_speculative_tokens=0)] * 4), texts) > 0.95
    assert (
        share_of_equal(generate(build(target, speculative, enforce_eager=True, **fields), [GREEDY] * 4), texts) > 0.95
    )
    assert share_of_equal(generate(build(target, speculative, "cpu", **fields), [GREEDY] * 4), texts) > 0.95


def test_an_equal_request_has_an_equal_text(pair: tuple[Path, Path]) -> None:
    """Check that equal requests have equal texts, in rows that other requests used before, with a pool too small for
    all."""
    target, draft = pair
    near = perturb_checkpoint(draft, target.parent / "near", noise=0.1, seed=3)
    engine = build(target, {"model": str(near)}, num_gpu_blocks_override=40, num_reserved_decode_tokens=0)
    first, second = (generate(engine, [GREEDY] * 4) for _ in range(2))
    assert share_of_equal(first, second) > 0.95

"""Passes of other model families on fake CUDA tensors, checked as in `test_trace`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from assistant_reference import make_assistant
from checkpoints import make_checkpoint, make_gemma4
from specrs.backends.cuda import iteration
from specrs.backends.cuda.context import Context, sequences_of
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.shapes import LogitsMode, Shape
from specrs.kernels.coding import Coding
from specrs.kernels.cuda._codes import scales_dtype
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.linear import Weight
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.inputs import PassInputs
from specrs.models.torch_weights import with_fp8_rows
from torch._subclasses.fake_tensor import FakeTensorMode

from .test_trace import BATCH, CUDA, LAYERS, K, Watch, count_ours, fake_decoder, make

SHAPE: dict[str, object] = {"vocab": 97, "layers": LAYERS, "hidden": 64, "kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(("family", "kernels"), [("gemma3_text", 7), ("qwen3_moe", 11)])
def test_an_iteration_stays_on_its_device(family: str, kernels: int, tmp_path: Path) -> None:
    """Check the number of kernels per layer. A layer with norms after its blocks has two more. A layer with experts has
    more that choose experts, sort the pairs of row and expert, and add the results."""
    target = make_checkpoint(tmp_path, family, **SHAPE)  # type: ignore[arg-type]
    with FakeTensorMode():
        ctx = make(target, target, "rejection", "draft")
        sequences = sequences_of(ctx.record.views, "num_decode")
        with torch.inference_mode(), Watch() as watch:
            iteration.run(ctx, Shape(BATCH, K, BATCH * (K + 1), LogitsMode.GREEDY), sequences)
    assert count_ours(watch) == 1 + (K + 1) * (kernels * LAYERS + 3) + 3


def test_a_shared_expert_takes_two_kernels(tmp_path: Path) -> None:
    """Check that a shared expert takes two products more than the six kernels of other experts. An MLP has two. The
    norms before and after it are in its products, but that of a draft's input is a kernel in either case."""
    counts = []
    for family, fields in (("qwen3_5_text", {}), ("qwen3_5_moe_text", {"shared_expert_intermediate_size": 32})):
        target = make_checkpoint(tmp_path / family, family, **SHAPE, **fields)  # type: ignore[arg-type]
        with FakeTensorMode():
            ctx = make(target, target, "rejection", "mtp")
            sequences = sequences_of(ctx.record.views, "num_decode")
            with torch.inference_mode(), Watch() as watch:
                iteration.run(ctx, Shape(BATCH, K, BATCH * (K + 1), LogitsMode.GREEDY), sequences)
        counts.append(count_ours(watch))
        assert ("specrs::add_pairs" in "".join(watch.ops)) == (family == "qwen3_5_moe_text")
    assert counts[1] - counts[0] == LAYERS * (6 + 2 - 2 + 2) + K * (6 + 2 - 2 + 1)


@pytest.mark.parametrize("k", [0, K])
def test_delta_nets_take_seven_kernels(k: int, tmp_path: Path) -> None:
    """Check that a delta net has three kernels between its projections, and gated attention eight, with the splitting
    and applying of gates. The places of rows are found once per pass."""
    target = make_checkpoint(tmp_path / "target", "qwen3_5_text", **SHAPE)  # type: ignore[arg-type]
    draft = make_checkpoint(tmp_path / "draft", "qwen3", **SHAPE)  # type: ignore[arg-type]
    counts = []
    for path in (target, draft):
        with FakeTensorMode():
            ctx = make(path, draft, "rejection", "draft")
            sequences = sequences_of(ctx.record.views, "num_decode")
            with torch.inference_mode(), Watch() as watch:
                iteration.run(ctx, Shape(BATCH, k, BATCH * (k + 1), LogitsMode.GREEDY), sequences)
        counts.append(count_ours(watch))
    assert counts[0] - counts[1] == 1 + 7 + 8 - 5 * LAYERS


def with_and_without_drafts(ctx: Context, logits_mode: LogitsMode) -> list[Watch]:
    """Return what an iteration launches with K drafts, and with rows for them that no pass drafts."""
    sequences, watches = sequences_of(ctx.record.views, "num_decode"), [Watch(), Watch()]
    for watch, passes in zip(watches, (K, 0), strict=True):
        with torch.inference_mode(), watch:
            iteration.run(ctx, Shape(BATCH, K, BATCH * (K + 1), logits_mode, passes), sequences)
    return watches


@pytest.mark.parametrize("logits_mode", [LogitsMode.GREEDY, LogitsMode.SAMPLED])
def test_a_draft_of_an_mtp_head_takes_a_layers_kernels(logits_mode: LogitsMode, tmp_path: Path) -> None:
    """Check that an MTP head's draft has the kernels of one layer with gated attention, and a few more: embedding, two
    norms, `fc`, the final norm and the LM head. The target's final states are copied nowhere before they are kept."""
    target = make_checkpoint(tmp_path, "qwen3_5_text", **SHAPE)  # type: ignore[arg-type]
    with FakeTensorMode():
        ctx = make(target, target, "coupled", "mtp")
        watches = with_and_without_drafts(ctx, logits_mode)
    counts = [count_ours(watch) for watch in watches]
    spread = 0 if logits_mode is LogitsMode.GREEDY else 3  # to the target's ids; cut and draw
    gathered = 1  # the target's states, before the first draft
    assert counts[0] - counts[1] == K * (6 + 9 + spread) + gathered
    assert not any("copy_" in op for op in watches[1].ops)


@pytest.mark.parametrize("logits_mode", [LogitsMode.GREEDY, LogitsMode.SAMPLED])
def test_a_draft_of_an_assistant_takes_its_layers_kernels(logits_mode: LogitsMode, tmp_path: Path) -> None:
    """Check that an assistant's draft has eight kernels a layer, and a few more: embedding, `pre`, the final norm,
    `post` and the LM head. Nothing is read back."""
    sizes = SHAPE | {"layers": 6, "global_head_dim": 128}
    target = make_gemma4(tmp_path / "target", "gemma4", **sizes)  # type: ignore[arg-type]
    assistant = make_assistant(tmp_path / "assistant", target, heads=4)
    with FakeTensorMode():
        ctx = make(target, assistant, "coupled", "assistant")
        watches = with_and_without_drafts(ctx, logits_mode)
    counts = [count_ours(watch) for watch in watches]
    spread = 0 if logits_mode is LogitsMode.GREEDY else 3  # to the target's ids; cut and draw
    gathered = 1  # the target's states, before the first draft
    assert counts[0] - counts[1] == K * (8 * 3 + 5 + spread) + gathered


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("logits_mode", [LogitsMode.GREEDY, LogitsMode.SAMPLED])
def test_groups_take_one_kernel_more_an_iteration(logits_mode: LogitsMode, rule: str, tmp_path: Path) -> None:
    """Check that KV groups take one kernel more per iteration, for slots and block tables of all groups after the
    first."""
    target = make_checkpoint(tmp_path, "gemma3_text", sliding_window=8, **SHAPE)  # type: ignore[arg-type]
    counts = []
    for grouped in (False, True):
        with FakeTensorMode():
            ctx = make(target, target, rule, "draft", grouped=grouped)
            assert len(ctx.state.tables) == 1 + grouped
            sequences = sequences_of(ctx.record.views, "num_decode")
            with torch.inference_mode(), Watch() as watch:
                iteration.run(ctx, Shape(BATCH, K, BATCH * (K + 1), logits_mode), sequences)
        counts.append(count_ours(watch))
        assert (len(ctx.state.group_tables) > 0) == grouped
    assert counts[1] == counts[0] + 1


@pytest.mark.parametrize(("variant", "kernels", "of_pass"), [("gemma4", 12, 7), ("gemma4, experts", 18, 5)])
def test_layers_of_different_sizes(variant: str, kernels: int, of_pass: int, tmp_path: Path) -> None:
    """Check the number of kernels per layer. Heads take a kernel of their own, as norms around blocks do. A layer's
    embedding takes four: the addition of the MLP's output, two products and a gate. Experts next to an MLP take their
    six and four norms. A pass has two for the embeddings of all layers, and two for a cap between logits and
    argmax."""
    target = make_gemma4(tmp_path, variant, **SHAPE | {"layers": 6, "global_head_dim": 128})  # type: ignore[arg-type]
    with FakeTensorMode():
        ctx = make(target, target, "rejection", "draft")
        sequences = sequences_of(ctx.record.views, "num_decode")
        with torch.inference_mode(), Watch() as watch:
            iteration.run(ctx, Shape(BATCH, K, BATCH * (K + 1), LogitsMode.GREEDY), sequences)
    assert count_ours(watch) == 1 + (K + 1) * (kernels * 6 + of_pass) + 3


@pytest.mark.parametrize(("coding", "capability"), [(Coding("fp8", 128, 128), 90), (Coding("fp8", 512), 89)])
def test_rows_in_fp8_take_a_kernel_a_product(coding: Coding, capability: int, tmp_path: Path) -> None:
    """Check that FP8 activations take one kernel more per product, which rounds them; with few rows, two norms become
    kernels of their own. Products of many rows are `scaled_mm`'s."""
    shape = {"hidden": 512, "intermediate": 512, "kv_heads": 2, "group": 2, "head_dim": 128}
    target = make_checkpoint(tmp_path, "qwen3", vocab=97, layers=LAYERS, **shape)
    counts: dict[int, Sequence[str]] = {}
    with FakeTensorMode():
        weights = fake_decoder(target, torch.bfloat16).weights
        names = ("qkv", "o", "gate_up", "down")
        layers = [replace(w, **{name: quantized(getattr(w, name), coding) for name in names}) for w in weights.layers]
        weights = with_fp8_rows(replace(weights, layers=tuple(layers)))
        model = CudaDecoder.allocate(weights, max_rows=128, max_seqs=BATCH)
        limits = DeviceLimits("", capability, 132, 99 * 1024)
        model = replace(model, workspace=replace(model.workspace, limits=limits))
        cache = model.allocate_cache(8, 16)
        for rows in (16, 64, 65, 128):
            inputs = inputs_of(rows)
            with torch.inference_mode(), Watch() as watch:
                model.forward(inputs, cache)
            counts[rows] = [op for op in watch.ops if op.startswith("specrs::")]
    for rows, ops in counts.items():
        wide = rows > 64
        assert len(ops) == 2 + (12 + wide) * LAYERS, "wide passes have an activation of their own"
        assert ops.count("specrs::fp8_rows") == 4 * LAYERS
        assert ops.count("specrs::scaled_linear") == 4 * LAYERS * wide


def test_minima_take_no_kernel(tmp_path: Path) -> None:
    """Check that passes with weights in Q4_K have the kernels of passes with weights in Q4_0, for few rows, for rows
    that read the weights twice, and for more, whose weights are dequantized."""
    shape = {"hidden": 256, "intermediate": 512, "kv_heads": 2, "group": 1, "head_dim": 128}
    target = make_checkpoint(tmp_path, "qwen3", vocab=97, layers=LAYERS, **shape)
    names, found = ("qkv", "o", "gate_up", "down"), []
    for coding in (Coding("int4", 32), Coding("int4", 32, minima="blocks")):
        with FakeTensorMode():
            weights = fake_decoder(target, torch.bfloat16).weights
            layers = [
                replace(w, **{name: quantized(getattr(w, name), coding) for name in names}) for w in weights.layers
            ]
            model = CudaDecoder.allocate(replace(weights, layers=tuple(layers)), max_rows=320, max_seqs=BATCH)
            cache = model.allocate_cache(20, 16)
            for rows in (6, 128, 320):
                inputs = inputs_of(rows)
                with torch.inference_mode(), Watch() as watch:
                    model.forward(inputs, cache)
                found.append([op for op in watch.ops if op.startswith("specrs::")])
    assert found[:3] == found[3:]
    assert [ops.count("specrs::dequantize") for ops in found[:3]] == [0, 0, 4 * LAYERS]


def quantized(w: Weight, coding: Coding) -> QuantizedWeight:
    """Return `w` in `coding`, of empty tensors."""
    out, size = w.shape
    codes = torch.empty((out, size * coding.bits // 16), dtype=torch.int16, device=CUDA)
    scales = -(-out // coding.outputs), -(-size // coding.block) * coding.words
    return QuantizedWeight(codes, torch.empty(scales, dtype=scales_dtype(coding), device=CUDA), coding)


def inputs_of(rows: int) -> PassInputs:
    """Return the inputs of one request's chunk."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=CUDA)

    return PassInputs(
        input_ids=ints(rows),
        positions=ints(rows),
        slots=ints(rows),
        q_start=ints(2),
        block_table=ints(1, 8),
        max_q_len=rows,
        max_context=128,
    )

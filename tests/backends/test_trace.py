"""The functions of an iteration on fake CUDA tensors: nothing is copied between devices, allocated, or random.

A graph would record a stray copy as one that happens once, at capture. `FakeTensorMode` alone lets `.cpu()`, copies
from the host and allocations pass, so a dispatch mode watches every op; what kernels write is in their signatures.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_eagle3
from specrs.backends.blueprint import Blueprint
from specrs.backends.cuda import drafting, iteration
from specrs.backends.cuda.build import make_context
from specrs.backends.cuda.chunks import catch_up_pass, feeds_chunks, prompt_pass
from specrs.backends.cuda.context import Context, sequences_of
from specrs.backends.cuda.products import stored
from specrs.backends.cuda.sampling.sampling_state import SamplingState
from specrs.backends.cuda.shapes import ChunkShape, LogitsMode, MergedShape, Shape
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.drafters.assistant import LoadedAssistant
from specrs.drafters.assistant.config import parse_assistant_config
from specrs.drafters.assistant.torch_loader import TorchAssistant, TorchAssistantWeights
from specrs.drafters.base import LoadedDrafter
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.drafters.eagle3.config import TargetFacts, parse_eagle3_config
from specrs.drafters.eagle3.head import Eagle3Head, Eagle3Weights
from specrs.drafters.hidden_state import LoadedHead
from specrs.drafters.mtp.head import MtpHead, TorchMtpWeights
from specrs.drafters.mtp.reader import head_config
from specrs.drafters.other_tokenizer import LoadedSharedTokens
from specrs.drafters.other_tokenizer.vocabulary import SharedVocabulary
from specrs.drafters.parallel import LoadedParallel
from specrs.kernels.linear import DenseWeight
from specrs.models.checkpoint import read_json
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import (
    AdditionWeights,
    DeltaWeights,
    ExpertWeights,
    LayerEmbeddingWeights,
    LayerWeights,
    ParallelNorms,
    RouterScales,
    SharedWeights,
)
from specrs.models.experts import Experts
from specrs.models.loader import load_config
from specrs.models.shards import Shard
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_weights import TorchExperts, TorchLayer, TorchWeights
from specrs.parallel.ranks import Ranks
from specrs.speculative_config import SpeculativeConfig
from sweep import some
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
    "unbind",
}
"""Ops of torch that touch no memory. Every other op must be one of specrs's, or write to a given `out`."""
WRITES = {"add.out", "mm.out", "addmm.out", "clamp.out", "index_select.out", "copy_"}
DRAFT_IDS, IDS = 90, 97
LAYERS = 2
HEAD_IDS = 50


class Watch(TorchDispatchMode):
    """Rejects ops that a captured iteration must not do, with their names. `also`: further ops that are allowed."""

    def __init__(self, also: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.ops: list[str] = []
        self._also = also

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
        allowed = namespace == "specrs" or base in VIEWS or op in WRITES or name in {"prim::device", *self._also}
        if not allowed:
            raise AssertionError(f"{name}: allocates, waits or depends on data; allowed are {sorted(WRITES)} and views")
        self.ops.append(name)
        return func(*args, **(kwargs or {}))


def fake_decoder(
    folder: Path, dtype: torch.dtype, cache_dtype: torch.dtype | None = None, ranks: Ranks | None = None
) -> TorchDecoder:
    """Return a decoder of empty tensors on a device that does not exist, or one rank's part of such a decoder."""
    c, ids = load_config(folder), load_config(folder).vocab_size
    if ranks is not None:
        c, ids = Shard(ranks.rank, ranks.size).of_config(c), -(-ids // ranks.size)
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=CUDA)

    def linear(n: int, k: int, bias: bool = False) -> DenseWeight:
        return DenseWeight(empty(n, k), empty(n) if bias else None)

    around = empty(c.hidden_size) if c.norms == "around" else None
    layer = LayerWeights(
        attention_output_norm=around,
        mlp_output_norm=around,
        experts=None if c.experts is None else fake_experts(c.experts, c.hidden_size, dtype),
        input_norm=empty(c.hidden_size),
        qkv=linear(q + 2 * kv, c.hidden_size, c.qkv_bias),
        qk_norm=empty(c.num_heads + c.num_kv_heads, c.head_dim) if c.qk_norm else None,
        o=linear(c.hidden_size, q),
        post_attention_norm=empty(c.hidden_size),
        gate_up=linear(2 * c.intermediate_size, c.hidden_size),
        down=linear(c.hidden_size, c.intermediate_size),
    )
    layers = (layer,) * c.num_layers
    if c.delta is not None:
        net, gates = fake_net(layer, c), q if c.output_gate else 0
        layer = replace(layer, qkv=linear(q + gates + 2 * kv, c.hidden_size))
        layers = tuple(net if is_net else layer for is_net in c.delta.layers)
    weights = TorchWeights(
        config=c,
        dtype=dtype,
        device=CUDA,
        embedding=empty(ids, c.hidden_size),
        layers=layers,
        final_norm=empty(c.hidden_size),
        lm_head=linear(ids, c.hidden_size),
        rotary=torch.empty(c.rotary_dim, device=CUDA),
        rotaries=tuple(torch.empty(c.rotary_dim_of(i), device=CUDA) for i in range(len(c.ropes))),
        cache_dtype=cache_dtype,
    )
    return TorchDecoder(with_sizes(weights) if c.varied else weights, ranks=ranks)


def with_sizes(weights: TorchWeights) -> TorchWeights:
    """Return the weights with layers of the sizes that the configuration gives each, and with their embeddings."""
    c, dtype, layers, added = weights.config, weights.dtype, [], None

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=CUDA)

    h, own = c.hidden_size, c.layer_embedding
    if own is not None:
        added = AdditionWeights(DenseWeight(empty(own.size, h)), DenseWeight(empty(h, own.size)), empty(h))
        width = c.num_layers * own.size
        table, norm = empty(own.vocab_size, width), empty(own.size)
        weights = replace(weights, layer_embedding=LayerEmbeddingWeights(table, DenseWeight(empty(width, h)), norm))
    for layer, s in zip(weights.layers, c.varied, strict=True):
        normed = c.num_heads + (0 if s.source is not None else 2 * s.num_kv_heads)
        layers.append(
            replace(
                layer,
                qkv=DenseWeight(empty((c.num_heads + s.projected_heads) * s.head_dim, h)),
                qk_norm=empty(normed, s.head_dim),
                o=DenseWeight(empty(h, c.num_heads * s.head_dim)),
                gate_up=DenseWeight(empty(2 * s.intermediate_size, h)),
                down=DenseWeight(empty(h, s.intermediate_size)),
                addition=added,
                scalar=0.5,
                experts=None if layer.experts is None else next_to_mlp(layer.experts, c, dtype),
            )
        )
    return replace(weights, layers=tuple(layers))


def next_to_mlp(w: TorchExperts, c: ModelConfig, dtype: torch.dtype) -> TorchExperts:
    """Return the experts with the norms and factors of experts next to an MLP."""
    assert c.experts is not None
    rows = [torch.empty(c.hidden_size, dtype=dtype, device=CUDA) for _ in range(4)]
    scales = RouterScales(rows[0], torch.empty(c.experts.count, dtype=dtype, device=CUDA))
    return replace(w, scales=scales, norms=ParallelNorms(*rows[1:]))


def fake_net(layer: TorchLayer, c: ModelConfig) -> TorchLayer:
    """Return a layer with a delta net, and with the MLP and norms of `layer`."""
    net = c.delta
    assert net is not None

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, device=CUDA)

    dtype = layer.input_norm.dtype
    return replace(
        layer,
        qkv=DenseWeight(torch.empty((net.outputs, c.hidden_size), dtype=dtype, device=CUDA)),
        qk_norm=None,
        o=DenseWeight(torch.empty((c.hidden_size, net.inner), dtype=dtype, device=CUDA)),
        delta=DeltaWeights(
            floats(net.kernel, net.conv_dim), floats(net.value_heads), floats(net.value_heads), floats(net.value_dim)
        ),
    )


def fake_experts(e: Experts, h: int, dtype: torch.dtype) -> TorchExperts:
    gate_up = torch.empty((e.count, 2 * e.intermediate_size, h), dtype=dtype, device=CUDA)
    down = torch.empty((e.count, h, e.intermediate_size), dtype=dtype, device=CUDA)
    router = DenseWeight(torch.empty((e.count, h), dtype=dtype, device=CUDA))
    shared = None
    if e.shared is not None:
        shapes = (1, h), (2 * e.shared, h), (h, e.shared)
        shared = SharedWeights(*(DenseWeight(torch.empty(shape, dtype=dtype, device=CUDA)) for shape in shapes))
    split = (tuple(map(DenseWeight, every)) for every in (gate_up, down))
    return ExpertWeights(router, *split, (gate_up, down), shared=shared)


def fake_head(folder: Path, target: TorchDecoder) -> Eagle3Head:
    """Return an EAGLE-3 head of empty tensors, over a part of the target's ids."""
    t = target.config
    config = parse_eagle3_config(
        read_json(folder / "config.json"), TargetFacts(t.hidden_size, t.vocab_size, t.num_layers, 64)
    )
    c, h = config.layer, config.layer.hidden_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=CUDA)

    layer = LayerWeights(
        input_norm=empty(h),
        qkv=DenseWeight(empty(q + 2 * kv, 2 * h), None),
        qk_norm=empty(c.num_heads + c.num_kv_heads, c.head_dim) if c.qk_norm else None,
        o=DenseWeight(empty(h, q), None),
        post_attention_norm=empty(h),
        gate_up=DenseWeight(empty(2 * c.intermediate_size, h), None),
        down=DenseWeight(empty(h, c.intermediate_size), None),
    )
    weights = Eagle3Weights(
        config=config,
        dtype=torch.bfloat16,
        device=CUDA,
        embedding=target.weights.embedding,
        fc=DenseWeight(empty(h, len(config.aux_layer_ids) * t.hidden_size), None),
        fc_norm=empty(len(config.aux_layer_ids), t.hidden_size),
        hidden_norm=empty(h),
        layer=layer,
        final_norm=empty(h),
        lm_head=DenseWeight(empty(HEAD_IDS, h), None),
        rotary=torch.empty(c.head_dim, device=CUDA),
        target_ids=torch.empty(HEAD_IDS, dtype=torch.int64, device=CUDA),
        max_position_embeddings=64,
    )
    return Eagle3Head(weights)


FAMILIES = ["qwen3", "qwen2"]


@pytest.fixture(scope="module", params=FAMILIES)
def context(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Context]]:
    """Return a function that makes contexts of fake tensors. The draft's vocabulary is smaller than the target's."""
    folder = tmp_path_factory.mktemp("trace")
    shape = {"layers": 2, "hidden": 64, "kv_heads": 2, "head_dim": 64}
    target = make_checkpoint(folder / "target", request.param, vocab=97, **shape)  # type: ignore[arg-type]
    draft = make_checkpoint(folder / "draft", request.param, vocab=90, **shape)  # type: ignore[arg-type]
    layer_ids = {"layer_ids": [0, 1], "fc_norm": True, "head_dim": 64}
    head = make_eagle3(folder / "head", target, vocab=HEAD_IDS, **layer_ids)  # type: ignore[arg-type]
    with FakeTensorMode():
        yield lambda rule, kind="draft": make(target, head if "head" in kind else draft, rule, kind)


def fake_mtp(target: TorchDecoder) -> MtpHead:
    """Return an MTP head of empty tensors, over the first of the target's ids."""
    w, h = target.weights, target.config.hidden_size
    layer = next(layer for layer in w.layers if layer.delta is None)
    decoder = replace(
        w, config=head_config(w.config), layers=(layer,), lm_head=DenseWeight(stored(w.lm_head)[:HEAD_IDS])
    )
    weights = TorchMtpWeights(
        decoder=decoder,
        fc=DenseWeight(torch.empty((h, 2 * h), dtype=w.dtype, device=CUDA)),
        embedding_norm=w.final_norm,
        hidden_norm=w.final_norm,
        target_ids=torch.empty(HEAD_IDS, dtype=torch.int64, device=CUDA),
        target_layers=target.num_layers,
    )
    return MtpHead(weights)


def fake_assistant(folder: Path, target: TorchDecoder) -> TorchAssistant:
    """Return an assistant of empty tensors, over the first of the target's ids."""
    w, size = target.weights, target.config.hidden_size
    config = parse_assistant_config(read_json(folder / "config.json"), target.config)
    c = config.layers
    norm = torch.empty(c.hidden_size, dtype=w.dtype, device=CUDA)
    names = ("input_norm", "attention_output_norm", "post_attention_norm", "mlp_output_norm")
    decoder = with_sizes(
        replace(
            w,
            config=c,
            layers=tuple(replace(w.layers[i], **dict.fromkeys(names, norm)) for i in config.sources),
            layer_embedding=None,
            final_norm=norm,
            lm_head=DenseWeight(torch.empty((HEAD_IDS, c.hidden_size), dtype=w.dtype, device=CUDA)),
            rotaries=tuple(w.rotaries[i] for i in config.sources),
        )
    )
    weights = TorchAssistantWeights(
        decoder=decoder,
        pre=DenseWeight(torch.empty((c.hidden_size, 2 * size), dtype=w.dtype, device=CUDA)),
        post=DenseWeight(torch.empty((size, c.hidden_size), dtype=w.dtype, device=CUDA)),
        target_ids=torch.empty(HEAD_IDS, dtype=torch.int64, device=CUDA),
        target_layers=target.num_layers,
        target_hidden_size=size,
    )
    return TorchAssistant(weights)


METHODS = {
    "list": "ngram,draft_model",
    "mtp": "mtp",
    "assistant": "mtp",
    "head": "eagle3",
    "list with a head": "ngram,eagle3",
}
KINDS = ("draft", "list", "parallel", "other vocabulary", "head", "list with a head")


def make(target: Path, draft: Path, rule: str, kind: str, *, grouped: bool = False) -> Context:
    speculative = SpeculativeConfig(
        method=METHODS.get(kind, "draft_model"),
        model=None if kind == "mtp" else str(draft),
        num_speculative_tokens=K,
        rejection_sample_method=rule,
        parallel_drafting=kind == "parallel",
        use_heterogeneous_vocab=kind == "other vocabulary",
    )
    config = EngineConfig(
        model=str(target),
        speculative_config=speculative,
        max_num_seqs=BATCH,
        max_num_batched_tokens=32,
        max_model_len=64,
        enable_lora=kind == "adapters",
        max_loras=3,
    )
    model = fake_decoder(target, torch.bfloat16)
    model = model.with_kv_groups(1) if grouped else model
    drafter: LoadedDrafter
    if "head" in kind:
        drafter = LoadedHead(fake_head(draft, model))
    elif kind == "mtp":
        drafter = LoadedHead(fake_mtp(model))
    elif kind == "assistant":
        drafter = LoadedAssistant(fake_assistant(draft, model))
    elif kind == "parallel":
        drafter = LoadedParallel(fake_decoder(draft, torch.bfloat16), 7)
    elif kind == "other vocabulary":
        pairs = tuple((i, 40 - i) for i in range(40))
        drafter = LoadedSharedTokens(fake_decoder(draft, torch.bfloat16), SharedVocabulary(pairs, 0, IDS))
    else:
        drafter = LoadedDraftModel(fake_decoder(draft, torch.bfloat16))
    blueprint = Blueprint(config, Weights(model, drafter), max_steps_in_flight=2)
    sampling = SamplingState(BATCH, IDS, torch.float32, CUDA)
    return make_context(blueprint, blueprint.scheduler(20), sampling, 20)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("logits_mode", [LogitsMode.GREEDY, LogitsMode.SAMPLED])
@pytest.mark.parametrize("k", [0, K])
def test_an_iteration_stays_on_its_device(
    context: Callable[..., Context], rule: str, logits_mode: LogitsMode, k: int
) -> None:
    ctx = context(rule)
    shape = Shape(BATCH, k, BATCH * (k + 1), logits_mode)
    sequences = sequences_of(ctx.record.views, "num_decode")
    with torch.inference_mode(), Watch() as watch:
        iteration.prepare(ctx, shape, sequences)
        drafting.draft(ctx, shape)
        iteration.verify(ctx, shape)
        iteration.accept_and_update(ctx, shape)
    ours = count_ours(watch)
    # A pass: the embedding, five kernels a layer, the final norm, the LM head.
    passes = (k + 1) * (5 * LAYERS + 3)
    drawn = k * 2 if logits_mode is LogitsMode.SAMPLED else 0  # cut and draw
    accepted = {LogitsMode.GREEDY: 1, LogitsMode.SAMPLED: 2 if rule == "rejection" else 3}[logits_mode]
    assert ours == 1 + passes + drawn + (k > 0) + accepted + 1


@pytest.mark.parametrize("k", [0, K])
def test_adapters_stay_on_the_device(context: Callable[..., Context], k: int) -> None:
    """Check that LoRA adapters stay on the device. They add one kernel for each kind of rows, which finds their slots,
    and two for each of a layer's four projections."""
    counts, shape = [], Shape(BATCH, k, BATCH * (k + 1), LogitsMode.GREEDY)
    merged = MergedShape(Shape(2, k, 2 * (k + 1), LogitsMode.GREEDY), 3, ChunkShape(16, 1))
    for kind in ("draft", "adapters"):
        ctx = context("rejection", kind)
        sequences = sequences_of(ctx.record.views, "num_decode")
        for work in (
            lambda ctx=ctx, sequences=sequences: iteration.run(ctx, shape, sequences),
            lambda ctx=ctx: iteration.run_merged(ctx, merged),
            lambda ctx=ctx: prompt_pass(ctx, ChunkShape(16, 2)),
        ):
            with torch.inference_mode(), Watch() as watch:
                work()
            counts.append(count_ours(watch))
    more = [after - before for before, after in zip(counts[:3], counts[3:], strict=True)]
    assert more == [1 + 8 * LAYERS, 2 + 8 * LAYERS, 1 + 8 * LAYERS]


def count_ours(watch: Watch) -> int:
    return sum(op.startswith("specrs::") for op in watch.ops)


@pytest.mark.parametrize(
    ("logits_mode", "rule", "context", "kind"),
    some(4, [LogitsMode.GREEDY, LogitsMode.SAMPLED], ["rejection", "coupled"], FAMILIES, KINDS[1:]),
    indirect=["context"],
    scope="module",
)
def test_other_drafters_stay_on_the_device(
    context: Callable[..., Context], kind: str, logits_mode: LogitsMode, rule: str
) -> None:
    """Check iterations of other drafters, whole and as single passes; without draft passes if all drafts come from the
    host."""
    ctx, counts = context(rule, kind), []
    sequences = sequences_of(ctx.record.views, "num_decode")
    for passes in (None, 0):
        with torch.inference_mode(), Watch() as watch:
            iteration.run(ctx, Shape(BATCH, K, BATCH * (K + 1), logits_mode, passes), sequences)
        counts.append(count_ours(watch))
    with torch.inference_mode(), Watch() as watch:
        for i in range(1, 2 if ctx.in_parallel else K + 1):
            drafting.draft_pass(ctx, i, 2, LogitsMode.LOGITS)
    assert counts[0] > counts[1]
    if kind == "parallel":
        sampled = 2 * K if logits_mode is LogitsMode.SAMPLED else 0
        assert counts[0] - counts[1] == 5 * LAYERS + 3 + sampled, "one pass"


@pytest.mark.parametrize("kind", ["draft", "head"])
def test_passes_over_chunks_stay_on_the_device(context: Callable[..., Context], kind: str) -> None:
    ctx, shape = context("rejection", kind), ChunkShape(16, 2)
    with torch.inference_mode(), Watch() as watch:
        prompt_pass(ctx, shape)
        if feeds_chunks(ctx):
            catch_up_pass(ctx, shape)
    assert feeds_chunks(ctx) == (kind == "draft")
    # The embedding, five kernels a layer, the final norm.
    assert count_ours(watch) == (1 + feeds_chunks(ctx)) * (5 * LAYERS + 2)


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("logits_mode", [LogitsMode.GREEDY, LogitsMode.SAMPLED])
def test_chunks_after_verification_stay_on_the_device(
    context: Callable[..., Context], logits_mode: LogitsMode, k: int
) -> None:
    """Check an iteration with prompt chunks after verification: one attention more per layer than without."""
    ctx = context("rejection")
    alone = Shape(BATCH - 1, k, (BATCH - 1) * (k + 1), logits_mode)
    merged = MergedShape(alone, BATCH, ChunkShape(16, 1))
    counts = []
    for work in (
        lambda: iteration.run(ctx, alone, sequences_of(ctx.record.views, "num_decode")),
        lambda: iteration.run_merged(ctx, merged),
    ):
        with torch.inference_mode(), Watch() as watch:
            work()
        counts.append(count_ours(watch))
    assert counts[1] == counts[0] + LAYERS


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

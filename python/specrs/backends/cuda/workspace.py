"""Buffers of a model's passes on a CUDA device, and the tiling of its products. Launches nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specrs.backends.cuda.cublaslt import CublasLt
from specrs.backends.cuda.experts import ExpertBuffers
from specrs.backends.cuda.providers import OWN, OWN_BUCKETS, Providers
from specrs.backends.cuda.shapes import CHUNK_SEQS, MAX_CAPTURED_ROWS, MERGED_CHUNKS
from specrs.kernels.coding import Coding
from specrs.kernels.cuda._heads import WIDTHS
from specrs.kernels.cuda.attention_config import MAX_VERIFY_ROWS, AttentionConfig
from specrs.kernels.cuda.configs import LinearConfig, LinearShape, linear_config
from specrs.kernels.cuda.device import DeviceLimits, limits_of
from specrs.kernels.cuda.linear_product import DRAFT_ROWS, MAX_ROWS, block_m, scratch_sizes
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.scaled_linear import PADDED_ROWS
from specrs.models.config import ModelConfig
from specrs.models.rope import Rope
from specrs.models.varied_layers import LayerSizes

MLP_ROWS = 2048
"""Largest number of rows that go through a wide MLP at once. Its activations are ten times as wide as the residual
stream."""
QUANTIZED_ROWS = 256
"""Largest number of rows for which quantized weights are read in place, once per 64 rows. Dequantizing them moves ten
times their bytes or more."""
_NUMBERS_BYTES = 64 * 2**20
"""Bytes of memory for a dequantized piece of a quantized weight, for products of more rows."""
_FAR = 1 << 24
"""A number of positions larger than any request has."""
_DRAFT_FEATURES = 2048
"""Maximum features of a draft's stream for fused products of more than `MAX_ROWS` rows, unless the table of products
names our kernel."""
_LOGITS_ROWS = 256
"""Maximum number of rows whose logits exist at the same time when an argmax follows the LM head of more than `MAX_ROWS`
rows."""


def rotations(config: ModelConfig) -> list[tuple[Rope, int]]:
    """Return the distinct RoPEs of a model's layers in order, each with the number of features that it rotates; the
    model's main RoPE if no layer has one."""
    main = (config.rope_theta, config.rope_scaling)
    found = [(rope, config.rotary_dim_of(i)) for i, rope in enumerate(config.ropes) if rope is not None]
    return list(dict.fromkeys(found)) or [(main, config.rotary_dim)]


def layer_sizes(config: ModelConfig) -> list[LayerSizes]:
    """Return the distinct sizes of a model's layers in order."""
    return list(dict.fromkeys(config.varied)) or [config.plain_sizes]


def fused_heads(config: ModelConfig, dtype: torch.dtype, limits: DeviceLimits) -> int:
    """Return the features of a head if the qkv product itself can norm, rotate and write heads, else 0. It needs a tile
    that holds one head, a rotation of halves of the whole head, norms of single heads, no gates between queries, and
    layers of equal sizes."""
    dim = config.head_dim
    if config.varied or config.qk_norm_whole or config.output_gate:
        return 0
    if config.rotary_dim != dim or config.interleaved_rope:
        return 0
    if not limits.capability:
        return dim if dim >= 16 and dim & (dim - 1) == 0 else 0
    return dim if dim in WIDTHS and dtype != torch.float32 else 0


def max_fused_rows(
    config: ModelConfig,
    shapes: Mapping[str, Sequence[LinearShape]],
    limits: DeviceLimits,
    providers: Providers,
    *,
    is_draft: bool = False,
) -> int:
    """Return the maximum number of rows of a pass of our fused products alone: `DRAFT_ROWS` or `MAX_ROWS`. For one rank
    without LoRA adapters.

    `DRAFT_ROWS` if `providers` name our kernel for each of the products `shapes`, or without a table for a draft model
    with a stream of at most 2,048 features. With wider streams cuBLAS may be faster. Tiles of that many rows need
    16-bit numbers and the shared memory of sm_90 or sm_100.
    """
    small = not limits.capability or config.hidden_size <= _DRAFT_FEATURES
    chosen = (is_draft and small) or providers.are_own(shape for every in shapes.values() for shape in every)
    return DRAFT_ROWS if chosen and _can_fuse_more(config, shapes, limits) else MAX_ROWS


def _can_fuse_more(config: ModelConfig, shapes: Mapping[str, Sequence[LinearShape]], limits: DeviceLimits) -> bool:
    """Return whether our fused products serve passes of up to `DRAFT_ROWS` rows of a model."""
    every = [shape for kinds in shapes.values() for shape in kinds]
    if config.experts is not None or config.norms != "before" or any(shape.coding is not None for shape in every):
        return False
    if not limits.capability:  # the interpreter
        return True
    return all(shape.dtype != torch.float32 for shape in every) and 90 <= limits.capability < 120


def linear_shapes(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cuda"
) -> dict[str, LinearShape]:
    """Return the products of a pass with dense weights, by name."""
    heads = fused_heads(config, dtype, limits_of(torch.device(device)))
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    router = {} if config.experts is None else {"router": LinearShape(config.experts.count, config.hidden_size, dtype)}
    net, nets = config.states, {}
    if config.experts is not None and config.experts.shared is not None:
        nets["shared_gate_up"] = LinearShape(config.experts.shared, config.hidden_size, dtype, gated=True)
        nets["shared_down"] = LinearShape(config.hidden_size, config.experts.shared, dtype)
    if net is not None:
        nets["net"] = LinearShape(net.outputs, config.hidden_size, dtype)
        nets["net_o"] = LinearShape(config.hidden_size, net.inner, dtype)
    qkv = q * (1 + config.output_gate) + 2 * kv
    return (
        router
        | nets
        | {
            "qkv": LinearShape(qkv // (2 if heads else 1), config.hidden_size, dtype, head_dim=heads),
            "o": LinearShape(config.hidden_size, q, dtype),
            "gate_up": LinearShape(config.intermediate_size, config.hidden_size, dtype, gated=True),
            "down": LinearShape(config.hidden_size, config.intermediate_size, dtype),
            "lm_head": LinearShape(config.vocab_size, config.hidden_size, dtype),
        }
    )


def layer_shapes(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cuda"
) -> dict[str, list[LinearShape]]:
    """Return the products of a pass with dense weights, by name, in each size that a layer has."""
    plain = linear_shapes(config, dtype, device)
    if not config.varied:
        return {name: [shape] for name, shape in plain.items()}
    h, heads, sizes = config.hidden_size, config.num_heads, layer_sizes(config)
    made = {name: [shape] for name, shape in plain.items() if name in ("router", "lm_head")}
    made |= {
        "qkv": [LinearShape((heads + own.projected_heads) * own.head_dim, h, dtype) for own in sizes],
        "o": [LinearShape(h, heads * own.head_dim, dtype) for own in sizes],
        "gate_up": [LinearShape(own.intermediate_size, h, dtype, gated=True) for own in sizes],
        "down": [LinearShape(h, own.intermediate_size, dtype) for own in sizes],
    }
    embedding = config.layer_embedding
    if embedding is not None:
        made |= {
            "layer_embeddings": [LinearShape(config.num_layers * embedding.size, h, dtype)],
            "layer_gate": [LinearShape(embedding.size, h, dtype)],
            "layer_projection": [LinearShape(h, embedding.size, dtype)],
        }
    return {name: list(dict.fromkeys(every)) for name, every in made.items()}


def _own_configs(
    providers: Providers, shapes: Mapping[str, Sequence[LinearShape]], limits: DeviceLimits
) -> dict[tuple[int, int], LinearConfig]:
    """Return the tilings for `Workspace.own_configs`: of dense products for which `providers` name our kernel."""
    found = {}
    for shape in (shape for every in shapes.values() for shape in every if shape.coding is None):
        n, k = shape.n * shape.sides, shape.k
        if any(providers.choice_of(n, k, shape.dtype, rows).provider == OWN for rows in OWN_BUCKETS):
            found[n, k] = linear_config(LinearShape(n, k, shape.dtype), DRAFT_ROWS, limits)
    return found


def logits_rows(max_seqs: int) -> int:
    """Return the number of rows whose logits exist at the same time when an argmax reads them, for `max_seqs`
    requests."""
    return min(_LOGITS_ROWS, max_seqs * MAX_VERIFY_ROWS)


def _projected_width(config: ModelConfig) -> int:
    """Return the maximum number of outputs of an input projection other than q, k and v, such as a delta net's. 0 if
    there is none."""
    net = 0 if config.states is None else config.states.outputs
    gated = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim if config.output_gate else 0
    return max(net, gated)


def _rounded_sizes(shapes: Mapping[str, Sequence[LinearShape]], max_rows: int) -> tuple[int, int]:
    """Return the maximum count of numbers and of scales of rows rounded to FP8, over all products of FP8 weights."""
    sizes = [(0, 0)]
    for name, every in shapes.items():
        rows = PADDED_ROWS - 1 + (min(max_rows, MLP_ROWS) if name in ("gate_up", "down") else max_rows)
        kinds = [(shape.k, shape.coding.group) for shape in every if shape.coding and shape.coding.kind == "fp8"]
        sizes += [(rows * k, rows * -(-k // group)) for k, group in kinds]
    return max(numbers for numbers, _ in sizes), max(scales for _, scales in sizes)


def _attention_scratch(
    config: ModelConfig, max_seqs: int, dtype: torch.dtype, limits: DeviceLimits
) -> tuple[int, int, int]:
    """Return the largest scratch sizes of attention over `max_seqs` requests and `MERGED_CHUNKS` ends of prompts, and
    over captured prompt chunks, as in `AttentionConfig.scratch_sizes`. Shorter spans have no more splits, so the
    longest is used."""
    kinds = dict.fromkeys((own.num_kv_heads, own.head_dim) for own in layer_sizes(config))
    found = [_scratch_of(config.num_heads, *kind, max_seqs, dtype, limits) for kind in kinds]
    partial_out, partial_stat, counters = zip(*found, strict=True)
    return max(partial_out), max(partial_stat), max(counters)


def _scratch_of(
    heads: int, num_kv_heads: int, head_dim: int, max_seqs: int, dtype: torch.dtype, limits: DeviceLimits
) -> tuple[int, int, int]:
    """Return `_attention_scratch` of layers with these heads."""
    choose = partial(
        AttentionConfig.choose,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtypes=(dtype, dtype),
        limits=limits,
        span=_FAR,
    )
    needed = partial(AttentionConfig.scratch_sizes, num_kv_heads=num_kv_heads, head_dim=head_dim)
    sizes = [(0, 0, 0)]
    for batch in range(1, max_seqs + 1):
        for rows in range(1, MAX_VERIFY_ROWS + 1):
            most_seqs = min(batch + MERGED_CHUNKS, max_seqs)
            sizes.append(needed(choose(batch=batch, max_q_len=rows), batch=most_seqs, max_q_len=rows))
    for batch in {min(seqs, max_seqs) for seqs in (*CHUNK_SEQS, MERGED_CHUNKS)}:
        for rows in range(MAX_VERIFY_ROWS + 1, MAX_CAPTURED_ROWS + 1):
            cut = choose(batch=batch, max_q_len=rows)
            cut = cut.of_chunks(rows, batch=batch, max_q_len=rows, num_kv_heads=num_kv_heads, limits=limits, span=_FAR)
            sizes.append(needed(cut, batch=batch, max_q_len=rows))
    partial_out, partial_stat, counters = zip(*sizes, strict=True)
    return max(partial_out), max(partial_stat), max(counters)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Persistent buffers of one model's passes, and the tiling of its products. One pass at a time may use it.

    Between passes the buffers hold nothing that the next one needs, except that `counters` stay zero.
    """

    hidden: Tensor
    """[max_rows, hidden], the residual stream."""
    weighted: Tensor
    """[min(max_rows, 64), hidden], with `fuses_more` [min(max_rows, 128), hidden]: the stream times the weight of its
    next norm."""
    squares: Tensor
    """[tiles, 64] fp32, with `fuses_more` [tiles, 128]: sums of squares of the stream, by tile of the product that last
    added to it."""
    normed: Tensor
    """[max_rows, hidden], the normed stream. Passes return a view of it."""
    delta: Tensor
    """[max_rows, hidden], a block's output before it is added to the stream. Passes of few rows add it in their
    product."""
    mixed: Tensor
    """[max_rows, hidden], output of an MLP next to experts, and then theirs. No rows if no layer has both."""
    qkv: Tensor
    """[max_rows, (heads + 2 * kv_heads) * head_dim], queries, keys and values. Of layers of different sizes, the widest
    counts; see `part`."""
    projected: Tensor
    """Outputs of input projections that are not all queries, keys and values, flat: of attention with output gates, of
    delta nets, and of short convolutions. Empty if a model has none of them."""
    attended: Tensor
    """[max_rows, heads * head_dim], attention's output."""
    netted: Tensor
    """[max_rows, inner], outputs of delta nets or short convolutions. 0 columns if the model has neither."""
    layer_embeddings: Tensor
    """[max_rows, layers, size], each layer's embedding of a row's token. 0 layers if the model has none."""
    layer_gate: Tensor
    """[max_rows, size], gates of one layer's embedding. 0 columns if the model has none."""
    gate_up: Tensor
    """[min(max_rows, 2048), 2 * intermediate], gate and up before activation, for many rows. No rows if no layer has an
    MLP."""
    activated: Tensor
    """[min(max_rows, 2048), intermediate], activations of the MLP. No rows if no layer has an MLP."""
    entries: Tensor
    """[max_rows, L, hidden], the residual stream at the inputs of the requested hidden layers."""
    cos: Tensor
    """[rotations, max_rows, rotary_dim / 2] fp32, cos of RoPE angles."""
    sin: Tensor
    """[rotations, max_rows, rotary_dim / 2] fp32, sin of RoPE angles."""
    partials: Tensor
    """fp32 scratch of products and of attention."""
    stats: Tensor
    """fp32 scratch of attention."""
    counters: Tensor
    """int32 counters of kernels; zero between kernels."""
    tile_top: Tensor
    """fp32 scratch of the LM head with an argmax: largest logit of each tile."""
    tile_id: Tensor
    """int32 scratch of the LM head with an argmax: id of each tile's largest logit."""
    logits: Tensor
    """[0, or at most 256, vocab] fp32, for an argmax over more than 64 rows, or over capped logits."""
    scratch: SamplingScratch
    """Scratch of an argmax over `logits`."""
    numbers: Tensor
    """Up to 64 MiB for a dequantized piece of a quantized weight, for more than 256 rows; else empty."""
    rounded: Tensor
    """Rows rounded to FP8, as 16-bit numbers or as FP8 bytes; flat, with room for the largest number of rows times
    inputs. Empty if rows are not rounded."""
    row_scales: Tensor
    """Scales of rows rounded to FP8, flat fp32: at most groups times rows. Empty if rows are not rounded."""
    rounds_rows: bool
    """True if products of few rows have rows rounded to FP8. False: none have, or only those of many rows."""
    configs: Mapping[tuple[str, Coding | None, int], list[int]]
    """Fields of the `LinearConfig` for each (product, format of its weight, number of columns of its tiles)."""
    sized_configs: Mapping[tuple[str, Coding | None, int, int, int], list[int]]
    """Fields of the `LinearConfig` for each (product, format of its weight, number of columns of its tiles, outputs,
    inputs), for products that have several sizes."""
    experts: ExpertBuffers | None
    """Buffers of experts. None: no layer has experts."""
    limits: DeviceLimits
    dependent: bool
    """True if kernels are launched dependently: each starts while the one before it ends."""
    fuses_more: bool
    """True if passes of up to 128 rows use our fused products. False: of up to 64."""
    providers: Providers
    """Who computes dense products of 65 to 2,048 rows that are not fused."""
    cublaslt: CublasLt | None
    """Products by cuBLASLt. None: `providers` name none, or nvmath-python is not installed."""
    own_configs: Mapping[tuple[int, int], list[int]]
    """Fields of the `LinearConfig` of our kernel for 65 to 128 rows, by shape of the weight, where `providers` name
    it."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        max_rows: int,
        max_seqs: int,
        dtype: torch.dtype,
        device: torch.device | str,
        dependent: bool | None = None,
        num_hidden_layers: int = 0,
        shapes: Mapping[str, Sequence[LinearShape]] | None = None,
    ) -> Workspace:
        """Return buffers for passes of at most `max_rows` rows and `num_hidden_layers` hidden layers, and for argmaxes
        of at most 17 rows for each of `max_seqs` requests.

        `dependent=None` launches kernels dependently if the device can: compute capability 9.0 or more. `shapes` are
        the products and the codings of their weights; None: those of `layer_shapes`.
        """
        device = torch.device(device)
        limits = limits_of(device)
        shapes = layer_shapes(config, dtype, device) if shapes is None else shapes
        widths = sorted({block_m(rows) for rows in (1, 17, MAX_ROWS)})
        configs: dict[tuple[str, Coding | None, int], LinearConfig] = {}
        sized: dict[tuple[str, Coding | None, int, int, int], list[int]] = {}
        partials, stats, counters = _attention_scratch(config, max_seqs, dtype, limits)
        providers = Providers.of(limits.name)
        own = _own_configs(providers, shapes, limits)
        for (n, _), cut in own.items():
            sizes = scratch_sizes(cut, DRAFT_ROWS, n=n)
            partials, counters = max(partials, sizes[0]), max(counters, sizes[1])
        for name, shape, m in ((n, s, m) for n, every in shapes.items() for s in every for m in widths):
            cut = linear_config(shape, m, limits)
            configs.setdefault((name, shape.coding, m), cut)
            if config.varied:
                sized[name, shape.coding, m, shape.n, shape.k] = cut.as_list()
            sizes = scratch_sizes(cut, m, n=shape.n, sides=shape.sides)
            partials, counters = max(partials, sizes[0]), max(counters, sizes[1])
        tiles = max(-(-config.vocab_size // configs["lm_head", None, m].block_n) for m in widths)
        added = ("o", "net_o", "down")
        stream_tiles = max(-(-config.hidden_size // c.block_n) for key, c in configs.items() if key[0] in added)
        quantized = [s for every in shapes.values() for s in every if s.coding is not None]
        pieces = [s.n * s.sides * s.k for s in quantized]
        numbers = min(max(pieces, default=0), _NUMBERS_BYTES // dtype.itemsize) if max_rows > QUANTIZED_ROWS else 0
        many = logits_rows(max_seqs)
        room = max_rows + PADDED_ROWS - 1  # rows of an operand that is rounded to FP8, with padding
        many = many if many > MAX_ROWS or config.final_logit_softcapping is not None else 0
        layers, kinds = config.layer_embedding, layer_sizes(config)
        size, intermediate = 0 if layers is None else layers.size, max(own.intermediate_size for own in kinds)

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        f32, i32 = torch.float32, torch.int32
        turns = rotations(config)
        angles = (len(turns), max_rows, max(dim for _, dim in turns) // 2)
        beside = config.experts is not None and config.experts.parallel_mlp
        has_mlp = config.experts is None or beside or not all(config.experts.layers)
        mlp_rows = min(max_rows, MLP_ROWS) + room - max_rows if has_mlp else 0
        return cls(
            hidden=buffer(max_rows, config.hidden_size),
            weighted=buffer(min(max_rows, MAX_ROWS), config.hidden_size),
            squares=buffer(stream_tiles, MAX_ROWS, dtype=f32),
            normed=buffer(max_rows, config.hidden_size),
            delta=buffer(room, config.hidden_size),
            mixed=buffer(room if beside else 0, config.hidden_size),
            qkv=buffer(room, max((config.num_heads + 2 * own.num_kv_heads) * own.head_dim for own in kinds)),
            projected=buffer(room * _projected_width(config)),
            attended=buffer(max_rows, max(shape.k for shape in shapes["o"])),
            netted=buffer(max_rows, 0 if config.states is None else config.states.inner),
            layer_embeddings=buffer(room, config.num_layers if size else 0, size),
            layer_gate=buffer(room, size),
            gate_up=buffer(mlp_rows, 2 * intermediate),
            activated=buffer(mlp_rows, intermediate),
            entries=buffer(max_rows, num_hidden_layers, config.hidden_size),
            cos=buffer(*angles, dtype=f32),
            sin=buffer(*angles, dtype=f32),
            partials=buffer(partials, dtype=f32),
            stats=buffer(stats, dtype=f32),
            counters=buffer(counters, dtype=i32),
            tile_top=buffer(MAX_ROWS * tiles, dtype=f32),
            tile_id=buffer(MAX_ROWS * tiles, dtype=i32),
            logits=buffer(many, config.vocab_size, dtype=f32),
            scratch=SamplingScratch.allocate(many, 0, config.vocab_size, device),
            numbers=buffer(numbers),
            rounded=buffer(0),
            row_scales=buffer(0, dtype=f32),
            rounds_rows=False,
            configs={key: c.as_list() for key, c in configs.items()},
            sized_configs=sized,
            experts=ExpertBuffers.allocate(config, max_rows, dtype, device, limits),
            limits=limits,
            dependent=limits.capability >= 90 if dependent is None else dependent,
            fuses_more=False,
            providers=providers,
            cublaslt=CublasLt.load(device) if providers.need_cublaslt else None,
            own_configs={size: cut.as_list() for size, cut in own.items()},
        )

    def fusing_more(self, config: ModelConfig, shapes: Mapping[str, Sequence[LinearShape]]) -> Workspace:
        """Return the workspace with buffers for fused products of up to `DRAFT_ROWS` rows, where `max_fused_rows`
        returns that many."""
        configs, partials, counters = dict(self.configs), self.partials.numel(), self.counters.numel()
        for name, shape in ((name, shape) for name, every in shapes.items() for shape in every):
            cut = linear_config(shape, DRAFT_ROWS, self.limits)
            configs[name, shape.coding, DRAFT_ROWS] = cut.as_list()
            # More rows than `MAX_ROWS` leave heads to `qk_norm_rope`, so tiles have one side in the place of two.
            n = shape.n * (shape.sides if shape.head_dim else 1)
            sizes = scratch_sizes(cut, DRAFT_ROWS, n=n, sides=shape.sides)
            partials, counters = max(partials, sizes[0]), max(counters, sizes[1])
        tiles = -(-config.vocab_size // LinearConfig(*configs["lm_head", None, DRAFT_ROWS]).block_n)

        def buffer(*shape: int, like: Tensor) -> Tensor:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        return dataclasses.replace(
            self,
            weighted=buffer(min(len(self.hidden), DRAFT_ROWS), config.hidden_size, like=self.weighted),
            squares=buffer(len(self.squares), DRAFT_ROWS, like=self.squares),
            tile_top=buffer(max(self.tile_top.numel(), DRAFT_ROWS * tiles), like=self.tile_top),
            tile_id=buffer(max(self.tile_id.numel(), DRAFT_ROWS * tiles), like=self.tile_id),
            partials=buffer(partials, like=self.partials),
            counters=buffer(counters, like=self.counters),
            configs=configs,
            fuses_more=True,
        )

    def with_product(self, name: str, shape: LinearShape) -> Workspace:
        """Return the workspace with the tiling of one more product, `name`, and with scratch for it."""
        configs, partials, counters = dict(self.configs), self.partials.numel(), self.counters.numel()
        for m in {block_m(rows) for rows in (1, 17, MAX_ROWS)}:
            cut = linear_config(shape, m, self.limits)
            configs[name, shape.coding, m] = cut.as_list()
            sizes = scratch_sizes(cut, m, n=shape.n, sides=shape.sides)
            partials, counters = max(partials, sizes[0]), max(counters, sizes[1])
        return dataclasses.replace(
            self,
            partials=self.partials.new_zeros(partials),
            counters=self.counters.new_zeros(counters),
            configs=configs,
        )

    def rounding_rows(self, shapes: Mapping[str, Sequence[LinearShape]], *, few: bool) -> Workspace:
        """Return the workspace with buffers for products of FP8 weights in `shapes` with rows rounded to FP8. `few`:
        rows are rounded in products of few rows, too."""
        max_rows, device = len(self.hidden), self.hidden.device
        rounded, row_scales = _rounded_sizes(shapes, max_rows)
        return dataclasses.replace(
            self,
            rounded=torch.zeros(rounded, dtype=self.hidden.dtype, device=device),
            row_scales=torch.zeros(row_scales, dtype=torch.float32, device=device),
            rounds_rows=few,
        )

    def projection(self, rows: int, width: int) -> Tensor:
        """Return `[rows, width]` of `projected`, contiguous, for an input projection with `width` outputs."""
        return self.projected[: rows * width].view(rows, width)

    @staticmethod
    def part(buffer: Tensor, rows: int, width: int) -> Tensor:
        """Return the beginning of a buffer as `[rows, width]`, contiguous, for a layer that is not the widest."""
        return buffer.view(-1)[: rows * width].view(rows, width)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all buffers."""
        buffers = [getattr(self, field.name) for field in dataclasses.fields(self)]
        if self.experts is not None:
            buffers += self.experts.tensors
        return self.scratch.num_bytes + sum(buffer.nbytes for buffer in buffers if isinstance(buffer, Tensor))

    def config(self, name: str, rows: int, coding: Coding | None = None, sizes: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the tiling of the product `name` of `rows` rows with a weight of `coding`. `sizes`: its outputs and
        inputs, if layers differ in them."""
        m = block_m(rows)
        return self.sized_configs.get((name, coding, m, *sizes)) or self.configs[name, coding, m]

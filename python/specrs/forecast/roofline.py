"""The time of a pass on a GPU from its kernels: bytes over bandwidth, flops over rate, and a fixed part of each kernel.

The kernels are those that `models.dense_cuda` launches (`tests/runner/test_kernel_counts.py` counts both). Greedy
iterations in bf16 as one graph, so that launches cost no host time; prefill, sampling and several GPUs are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrs.core import CostModel
from specrs.errors import InvalidConfigError, invalid_config
from specrs.forecast.gpus import ATTENTION_SHARE, ATTENTION_US, GPUS, KERNEL_US, OVERLAP, PRODUCT_US, Gpu
from specrs.speculative_config import CACHE_DTYPE

if TYPE_CHECKING:
    import torch

    from specrs.kernels.cuda.device import DeviceLimits
    from specrs.models.config import ModelConfig

WEIGHT_BITS: Mapping[str | None, float] = {None: 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.25}
"""Of a weight, scales included: INT4 in groups of 128 inputs with fp32 scales."""
_FEW, _CODED, _MLP, _LOGITS = 64, 256, 2048, 256
"""Rows up to which products are fused; codes are read where they are; an MLP and logits run at once."""
_ALL_ROWS = 1 << 20
"""So many that they choose every expert."""
FIRST_PASS_ROWS = 2
"""Of each request in the first draft pass: the last two committed tokens."""


@dataclass(frozen=True, slots=True)
class Work:
    """Kernels of one kind in a pass, all of them together."""

    name: str
    kernels: int
    bytes: float
    flops: float
    fixed_us: float

    def ms(self, gpu: Gpu) -> float:
        """Milliseconds on `gpu`."""
        rate = gpu.bytes_per_us * (ATTENTION_SHARE if self.name == "attention" else 1.0)
        work = float(((self.bytes / rate) ** OVERLAP + (self.flops / gpu.flops_per_us) ** OVERLAP) ** (1 / OVERLAP))
        return 1e-3 * (work + self.fixed_us)


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of one model over `rows` rows, its LM head and argmax included."""

    rows: int
    work: Sequence[Work]

    @property
    def kernels(self) -> int:
        """Launched, nodes of a graph."""
        return sum(work.kernels for work in self.work)

    @property
    def bytes(self) -> float:
        """Moved from and to memory."""
        return sum(work.bytes for work in self.work)

    @property
    def flops(self) -> float:
        """Two for each multiplication and addition."""
        return sum(work.flops for work in self.work)

    def ms(self, gpu: Gpu) -> float:
        """Milliseconds on `gpu`."""
        return sum(work.ms(gpu) for work in self.work)


def gpu_of(name: str) -> Gpu:
    """The GPU called `name`, in any case. Raises `InvalidConfigError` for one that is not known."""
    found = {key.lower(): gpu for key, gpu in GPUS.items()}.get(name.lower().replace("_", " "))
    if found is None:
        raise invalid_config("--roofline", name, f"must be one of {', '.join(GPUS)}")
    return found


def model_pass(
    config: ModelConfig,
    gpu: Gpu,
    batch: int,
    rows: int,
    context: int,
    quantization: str | None = None,
    *,
    every_row: bool = True,
    kv_cache_dtype: str = "auto",
) -> Pass:
    """A pass of `rows` rows of each of `batch` requests, which have `context` positions behind them; `every_row` has
    logits, or the last of each request alone.

    `quantization`: of the projections, one of `WEIGHT_BITS`; embedding, LM head, router and experts stay bf16, as a
    GPU keeps them. `kv_cache_dtype`: as `EngineConfig`'s. Raises `InvalidConfigError` for another.
    """
    if quantization not in WEIGHT_BITS:
        names = ", ".join(name for name in WEIGHT_BITS if name)
        raise invalid_config("quantization", quantization, f"must be one of {names}, or left out")
    heads, cached = batch * (rows if every_row else 1), cache_dtype(kv_cache_dtype)
    return Pass(batch * rows, _Layers(config, gpu, batch, rows, context, quantization, heads, cached).work())


def cache_dtype(kv_cache_dtype: str) -> torch.dtype:
    """Of K and V of a model in bf16. Raises `UnsupportedConfigError`."""
    from specrs.arrays import BFLOAT16
    from specrs.models.kv_dtypes import resolve_cache_dtype
    from specrs.models.torch_arrays import TORCH_DTYPES

    field = "kv_cache_dtype"
    given = CACHE_DTYPE.check(InvalidConfigError, field, kv_cache_dtype)
    return TORCH_DTYPES[resolve_cache_dtype(field, given, BFLOAT16)]


def weight_bytes(config: ModelConfig, quantization: str | None = None) -> float:
    """Memory of a model's weights, all experts and both embeddings among them."""
    layers = config.num_layers * sum(n * k for n, k in _projections(config))
    every_expert = config.num_parameters_read(_ALL_ROWS)
    numbers = every_expert - layers + (not config.tie_word_embeddings) * config.vocab_size * config.hidden_size
    return layers * WEIGHT_BITS[quantization] / 8 + 2 * numbers


def kv_bytes(config: ModelConfig, kv_cache_dtype: str = "auto") -> float:
    """Memory of a position's K and V."""
    numbers = 2.0 * config.num_layers * config.num_kv_heads * config.head_dim
    return numbers * cache_dtype(kv_cache_dtype).itemsize


@dataclass(frozen=True, slots=True)
class Roofline:
    """Iterations of a target and a draft on one GPU. `draft` None: no draft, so K = 0 alone."""

    gpu: Gpu
    target: ModelConfig
    draft: ModelConfig | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    context: int = 1024
    kv_cache_dtype: str = "auto"
    """Of both."""

    def target_pass(self, batch: int, k: int) -> Pass:
        """Verification of `k` drafts of each request; without drafts a row of each."""
        cached = self.kv_cache_dtype
        return model_pass(self.target, self.gpu, batch, k + 1, self.context, self.quantization, kv_cache_dtype=cached)

    def draft_pass(self, batch: int, rows: int = 1) -> Pass:
        """A draft pass over `rows` rows of each request. Raises `InvalidConfigError` without a draft."""
        if self.draft is None:
            raise invalid_config("--draft-model", None, "must be given for draft passes")
        return model_pass(
            self.draft,
            self.gpu,
            batch,
            rows,
            self.context,
            self.draft_quantization,
            every_row=False,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    @property
    def _around(self) -> int:
        """Kernels that prepare, accept and commit; layers of several windows have KV groups, and a kernel for them."""
        return 3 + (len(set(self.target.windows)) > 1)

    def kernels(self, batch: int, k: int) -> int:
        """Of an iteration: its passes, and what prepares it, assembles drafts, accepts and commits."""
        passes = self.target_pass(batch, k).kernels + self._around
        if k:
            first, later = self.draft_pass(batch, FIRST_PASS_ROWS).kernels, self.draft_pass(batch).kernels
            passes += 1 + first + (k - 1) * later
        return passes

    def iteration_ms(self, batch: int, k: int) -> float:
        """Milliseconds of an iteration of `batch` requests with `k` drafts each."""
        ms = self.target_pass(batch, k).ms(self.gpu) + 1e-3 * self._around * KERNEL_US
        if k:
            first, later = self.draft_pass(batch, FIRST_PASS_ROWS), self.draft_pass(batch)
            ms += 1e-3 * KERNEL_US + first.ms(self.gpu) + (k - 1) * later.ms(self.gpu)
        return ms

    def cost_model(self, batches: Sequence[int], max_k: int) -> CostModel:
        """Costs at `batches` and K = 0 .. `max_k`. Raises `InvalidConfigError` for batches that do not increase."""
        ks = list(range(max_k + 1))
        return CostModel(list(batches), ks, [[self.iteration_ms(batch, k) for k in ks] for batch in batches])

    def memory_gb(self, batch: int) -> float:
        """Weights of both, and the KV of `batch` contexts."""
        positions, cached = batch * self.context, self.kv_cache_dtype
        total = weight_bytes(self.target, self.quantization) + positions * kv_bytes(self.target, cached)
        if self.draft is not None:
            total += weight_bytes(self.draft, self.draft_quantization) + positions * kv_bytes(self.draft, cached)
        return total / 1e9


def _projections(c: ModelConfig) -> list[tuple[int, int]]:
    """`(outputs, inputs)` of a layer's attention and MLP; experts are not among them."""
    q, kv, h = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    attention = [(q + 2 * kv, h), (h, q)]
    return attention if c.experts is not None else [*attention, (2 * c.intermediate_size, h), (h, c.intermediate_size)]


@dataclass(slots=True)
class _Layers:
    """What a pass does, layer by layer."""

    c: ModelConfig
    gpu: Gpu
    batch: int
    each: int
    context: int
    quantization: str | None
    heads: int
    """Rows that have logits."""
    cache_dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.batch * self.each

    def work(self) -> list[Work]:
        c, rows = self.c, self.rows
        q, kv, h, layers = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.num_layers
        found = [self._small("embed", 1, 4 * rows * h), self._attention()]
        if rows <= _FEW and c.norms == "before" and c.experts is None:
            norms = 1
        else:
            # Of streams normed behind blocks alone the first layer's is read as it is.
            norms = 2 * layers + 1 - (c.norms == "behind")
        found.append(self._small("norms", norms, norms * 6 * rows * h))
        if rows > _FEW or not self._fuses_heads():
            found.append(self._small("rotation and KV", layers, layers * 4 * rows * (q + 2 * kv)))
        found.append(self._product("qkv", q + 2 * kv, h, layers))
        found.append(self._product("o", h, q, layers))
        dense = layers if c.experts is None else layers - sum(c.experts.layers)
        if dense:
            times = dense * -(-rows // _MLP) if rows > _FEW else dense
            found.append(self._product("gate_up", 2 * c.intermediate_size, h, dense, times))
            found.append(self._product("down", h, c.intermediate_size, dense, times))
            if rows > _FEW:
                found.append(self._small("activation", times, dense * 6 * rows * c.intermediate_size))
        if c.experts is not None:
            found += self._experts(sum(c.experts.layers))
        many = self.heads > _FEW
        parts = -(-self.heads // _LOGITS) if many else 1
        found.append(self._product("lm_head", c.vocab_size, h, 1, parts, coded=False, rows=self.heads))
        found.append(self._small("argmax", 2 * parts if many else 1, 8 * self.heads * c.vocab_size * many))
        return found

    def _small(self, name: str, kernels: int, moved: float) -> Work:
        return Work(name, kernels, moved, 0.0, kernels * KERNEL_US)

    def _product(
        self,
        name: str,
        n: int,
        k: int,
        layers: int,
        kernels: int | None = None,
        *,
        coded: bool = True,
        rows: int | None = None,
    ) -> Work:
        """Products of a weight `[n, k]` of each of `layers` layers, by `kernels` (one a layer) of the pass's rows."""
        kernels = layers if kernels is None else kernels
        rows, weights = self.rows if rows is None else rows, float(n) * k
        moved = 2.0 * rows * (n + k)
        if not coded or self.quantization is None:
            reads = kernels // layers
            moved += 2.0 * weights * reads
        else:
            codes = weights * WEIGHT_BITS[self.quantization] / 8
            if rows <= _FEW:
                moved += codes
            elif rows <= _CODED:
                times = -(-rows // _FEW)
                kernels, moved = kernels * times, moved + times * codes
            else:  # made numbers of, which are written and read
                pieces = -(-int(weights) // (2**26 // 2 // k * k))
                kernels, moved = kernels * 2 * pieces, moved + codes + 4.0 * weights
        return Work(name, kernels, layers * moved, layers * 2.0 * rows * weights, kernels * PRODUCT_US)

    def _experts(self, layers: int) -> list[Work]:
        c, rows = self.c, self.rows
        e = c.experts
        assert e is not None
        h, i, times = c.hidden_size, e.intermediate_size, -(-rows // _MLP)
        # Tiles of more rows than 64 read an expert's weights once for every 64 of its rows.
        reads = max(e.expected(rows), rows * e.per_token / _FEW)
        pairs = rows * e.per_token
        work = [self._product("router", e.count, h, layers, layers * times, coded=False)]
        for name, n, k in (("expert gate_up", 2 * i, h), ("expert down", h, i)):
            moved, flops = 2.0 * reads * n * k + 2.0 * pairs * (n + k), 2.0 * pairs * n * k
            kernels = layers * times
            work.append(Work(name, kernels, layers * moved, layers * flops, kernels * PRODUCT_US))
        return [*work, self._small("routing and sums", 3 * layers * times, layers * 2.0 * (pairs + rows) * h)]

    def _limits(self) -> DeviceLimits:
        from specrs.kernels.cuda.device import DeviceLimits

        gpu = self.gpu
        return DeviceLimits(gpu.name, gpu.capability, gpu.num_sms, gpu.shared_kib * 1024)

    def _fuses_heads(self) -> bool:
        """Whether the product of few rows writes heads as attention reads them."""
        import torch

        from specrs.models.cuda.workspace import fused_heads

        return self.quantization is None and fused_heads(self.c, torch.bfloat16, self._limits()) > 0

    def _attention(self) -> Work:
        """All layers' attention, combining kernels included."""
        import torch

        from specrs.kernels.cuda.attention_config import AttentionConfig

        c, limits = self.c, self._limits()
        kernels, moved, flops = 0, 0.0, 0.0
        for window in c.windows or (None,) * c.num_layers:
            cut = AttentionConfig.choose(
                batch=self.batch,
                max_q_len=self.each,
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                dtypes=(torch.bfloat16, self.cache_dtype),
                limits=limits,
                span=self.context if window is None else min(self.context, window),
            )
            combined = cut.splits > 1 and not cut.fused_lines(c.num_heads // c.num_kv_heads)
            seen = self.context if window is None else min(self.context, window)
            kernels += 1 + combined
            moved += 2.0 * self.batch * seen * c.num_kv_heads * c.head_dim * self.cache_dtype.itemsize
            flops += 4.0 * self.rows * seen * c.num_heads * c.head_dim
        fixed = c.num_layers * ATTENTION_US + (kernels - c.num_layers) * KERNEL_US
        return Work("attention", kernels, moved, flops, fixed)

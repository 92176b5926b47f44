"""Predicts the time of a pass on a GPU from its kernels: bytes over bandwidth, flops over rate, and a fixed part per
kernel.

The kernels are those that `backends.cuda.decoder` launches (`tests/backends/test_kernel_counts.py` counts both).
Iterations are greedy, in bf16, and one graph, so launches cost no host time. Sampling and several GPUs are not
modelled. `specrs.forecast.steady` predicts the throughput of an engine from these passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specrs.core import CostModel
from specrs.errors import InvalidConfigError, invalid_config
from specrs.forecast.gpus import ATTENTION_SHARE, ATTENTION_US, GPUS, KERNEL_US, OVERLAP, PRODUCT_US, Gpu
from specrs.model_values import CACHE_DTYPE

if TYPE_CHECKING:
    import torch

    from specrs.backends.cuda.providers import Providers
    from specrs.kernels.cuda.device import DeviceLimits
    from specrs.models.config import ModelConfig

WEIGHT_BITS: Mapping[str | None, float] = {
    None: 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 4.25,
    "q8_0": 9.0,
    "q4_0": 5.0,
    "q4_k": 4.625,
}
"""Bits per weight by quantization, with a GPU's scales: fp32 numbers for groups of 128 inputs in INT4 and of 32 in Q8_0
and Q4_0. Q4_K has 20 bytes per 256 inputs."""
_FEW, _READ_IN_PLACE, _MLP, _LOGITS = 64, 256, 2048, 256
"""Maximum number of rows: for fused products of any model (`_FEW`), for quantized weights that are read in place
(`_READ_IN_PLACE`), for one run of an MLP (`_MLP`), and for one run of logits (`_LOGITS`)."""
_ALL_ROWS = 1 << 20
"""Number of rows so large that together they choose every expert."""
FIRST_PASS_ROWS = 2
"""Rows of each request in the first draft pass: the last two committed tokens."""


@dataclass(frozen=True, slots=True)
class Work:
    """All kernels of one kind in a pass."""

    name: str
    kernels: int
    bytes: float
    flops: float
    fixed_us: float
    rate: float = 1.0
    """Rate of these kernels' arithmetic, relative to the GPU's rate for bf16."""

    def ms(self, gpu: Gpu) -> float:
        """Return the milliseconds of these kernels on `gpu`."""
        rate = gpu.bytes_per_us * (ATTENTION_SHARE if self.name == "attention" else 1.0)
        bytes_us, flops_us = self.bytes / rate, self.flops / (self.rate * gpu.flops_per_us)
        work = float((bytes_us**OVERLAP + flops_us**OVERLAP) ** (1 / OVERLAP))
        return 1e-3 * (work + self.fixed_us)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompt chunks of a pass, which have an attention kernel of their own in each layer."""

    rows: int
    """Number of rows of all chunks."""
    context: int
    """Number of positions that a row attends to, in the mean."""
    ends: int
    """Number of prompts that end, whose last rows have logits. In a verification pass these are further rows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a pass: `each` rows of each of `batch` requests, which have `context` earlier positions."""

    batch: int
    each: int
    context: int
    chunks: Chunks | None = None
    """Prompt chunks after these rows, or alone in the pass if `batch` is 0."""

    @property
    def total(self) -> int:
        """Number of rows of the pass."""
        chunks = self.chunks
        return self.batch * self.each + (chunks.rows + chunks.ends * (self.batch > 0) if chunks else 0)


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of one model over `rows` rows, including its LM head and argmax."""

    rows: int
    work: Sequence[Work]

    @property
    def kernels(self) -> int:
        """Number of kernels of the pass, which are the nodes of its graph."""
        return sum(work.kernels for work in self.work)

    @property
    def bytes(self) -> float:
        """Number of bytes that the pass moves from and to memory."""
        return sum(work.bytes for work in self.work)

    @property
    def flops(self) -> float:
        """Number of floating-point operations of the pass, two for each multiplication with addition."""
        return sum(work.flops for work in self.work)

    def ms(self, gpu: Gpu) -> float:
        """Return the milliseconds of the pass on `gpu`."""
        return sum(work.ms(gpu) for work in self.work)


def gpu_of(name: str) -> Gpu:
    """Return the GPU called `name`, in upper or lower case. Raises `InvalidConfigError` for an unknown name."""
    found = {key.lower(): gpu for key, gpu in GPUS.items()}.get(name.lower().replace("_", " "))
    if found is None:
        raise invalid_config("--roofline", name, f"must be one of {', '.join(GPUS)}")
    return found


def model_pass(
    config: ModelConfig,
    gpu: Gpu,
    rows: Rows,
    quantization: str | None = None,
    *,
    is_draft: bool = False,
    kv_cache_dtype: str = "auto",
) -> Pass:
    """Return a pass over `rows`.

    `quantization`: of projections and experts, one of `WEIGHT_BITS`. Embedding, LM head and router stay bf16, as on a
    GPU. `kv_cache_dtype`: dtype of the KV cache, as in `EngineConfig`. `is_draft`: the last row of each request has
    logits, not every row; fused products serve more rows, and, above 64 rows, FP8 weights are multiplied with rows
    rounded to FP8.
    Raises `InvalidConfigError` for an unknown quantization or dtype, and for a table of products that cannot be read.
    """
    from specrs.backends.cuda.providers import Providers
    from specrs.kernels.cuda.configs import TABLE

    if quantization not in WEIGHT_BITS:
        names = ", ".join(name for name in WEIGHT_BITS if name)
        raise invalid_config("quantization", quantization, f"must be one of {names}, or left out")
    heads = rows.batch * (1 if is_draft else rows.each) + (rows.chunks.ends if rows.chunks else 0)
    providers = Providers.of(gpu.torch_name, gpu.products or TABLE)
    layers = _Layers(config, gpu, rows, quantization, heads, cache_dtype(kv_cache_dtype), is_draft, providers)
    return Pass(rows.total, layers.work())


def cache_dtype(kv_cache_dtype: str) -> torch.dtype:
    """Return the dtype of K and V in the cache of a bf16 model. Raises `UnsupportedConfigError` for a dtype that such a
    model cannot have."""
    from specrs.arrays import BFLOAT16
    from specrs.models.kv_dtypes import resolve_cache_dtype
    from specrs.models.torch_arrays import TORCH_DTYPES

    field = "kv_cache_dtype"
    given = CACHE_DTYPE.check(InvalidConfigError, field, kv_cache_dtype)
    return TORCH_DTYPES[resolve_cache_dtype(field, given, BFLOAT16)]


def weight_bytes(config: ModelConfig, quantization: str | None = None) -> float:
    """Return the bytes of a model's weights, including all experts and both embeddings."""
    layers = config.num_layers * sum(n * k for n, k in _projections(config))
    if config.experts is not None:
        e = config.experts
        layers += sum(e.layers) * e.count * 3 * config.hidden_size * e.intermediate_size
    every_expert = config.num_parameters_read(_ALL_ROWS)
    numbers = every_expert - layers + (not config.tie_word_embeddings) * config.vocab_size * config.hidden_size
    return layers * WEIGHT_BITS[quantization] / 8 + 2 * numbers


def kv_bytes(config: ModelConfig, kv_cache_dtype: str = "auto") -> float:
    """Return the bytes of K and V of one position, over all layers with attention."""
    numbers = 2.0 * len(config.attention_layers) * config.num_kv_heads * config.head_dim
    return numbers * cache_dtype(kv_cache_dtype).itemsize


@dataclass(frozen=True, slots=True)
class Roofline:
    """Model of the iterations of a target and a draft model on one GPU. Without `draft`, only K = 0 is possible."""

    gpu: Gpu
    target: ModelConfig
    draft: ModelConfig | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    context: int = 1024
    kv_cache_dtype: str = "auto"
    """Dtype of both models' KV caches, as in `EngineConfig`."""
    draft_vocab_size: int | None = None
    """Number of ids that the draft drafts. None: all."""

    def target_pass(self, batch: int, k: int, chunks: Chunks | None = None) -> Pass:
        """Return the target's pass that verifies `k` drafts of each request; with k = 0, a pass over one row of each
        request. `chunks` are prompt chunks in the same pass, alone if `batch` is 0."""
        return model_pass(
            self.target,
            self.gpu,
            Rows(batch, k + 1, self.context, chunks),
            self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def draft_pass(self, batch: int, rows: int = 1, chunks: Chunks | None = None) -> Pass:
        """Return a draft pass over `rows` rows of each request, or over `chunks` if `batch` is 0. Raises
        `InvalidConfigError` if there is no draft model."""
        if self.draft is None:
            raise invalid_config("--draft-model", None, "must be given for draft passes")
        return model_pass(
            replace(self.draft, vocab_size=min(self.draft.vocab_size, self.draft_vocab_size or self.draft.vocab_size)),
            self.gpu,
            Rows(batch, rows, self.context, chunks),
            self.draft_quantization,
            is_draft=True,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    @property
    def _around(self) -> int:
        """Number of kernels that prepare an iteration, accept and commit. Models whose layers have several windows need
        one more, for their KV groups."""
        return 3 + (len(set(self.target.windows)) > 1)

    def kernels(self, batch: int, k: int) -> int:
        """Return the number of kernels of an iteration: those of its passes, and those that prepare it, assemble
        drafts, accept and commit."""
        passes = self.target_pass(batch, k).kernels + self._around
        if k:
            first, later = self.draft_pass(batch, FIRST_PASS_ROWS).kernels, self.draft_pass(batch).kernels
            passes += 1 + first + (k - 1) * later
        return passes

    def iteration_ms(self, batch: int, k: int, verification: Pass | None = None) -> float:
        """Return the milliseconds of an iteration of `batch` requests with `k` drafts each. `verification` is its pass
        of the target. None: a pass without prompt chunks."""
        verification = self.target_pass(batch, k) if verification is None else verification
        ms = verification.ms(self.gpu) + 1e-3 * self._around * KERNEL_US
        if k:
            first, later = self.draft_pass(batch, FIRST_PASS_ROWS), self.draft_pass(batch)
            ms += 1e-3 * KERNEL_US + first.ms(self.gpu) + (k - 1) * later.ms(self.gpu)
        return ms

    def prompts_ms(self, chunks: Chunks) -> float:
        """Return the milliseconds of the target's pass over prompt chunks alone, and of what draws the first tokens of
        prompts that end."""
        return self.target_pass(0, 0, chunks).ms(self.gpu) + 1e-3 * self._around * KERNEL_US

    def cost_model(self, batches: Sequence[int], max_k: int) -> CostModel:
        """Return the costs at batch sizes `batches` and K = 0 to `max_k`. Raises `InvalidConfigError` for batch sizes
        that do not increase."""
        ks = list(range(max_k + 1))
        return CostModel(list(batches), ks, [[self.iteration_ms(batch, k) for k in ks] for batch in batches])

    def memory_gb(self, batch: int) -> float:
        """Return the gigabytes of the weights of both models, and of the KV and the states of `batch` contexts."""
        positions, cached = batch * self.context, self.kv_cache_dtype
        states = 0 if self.target.states is None else batch * self.target.states.row_bytes
        total = states + weight_bytes(self.target, self.quantization) + positions * kv_bytes(self.target, cached)
        if self.draft is not None:
            total += weight_bytes(self.draft, self.draft_quantization) + positions * kv_bytes(self.draft, cached)
        return total / 1e9


def _projections(c: ModelConfig) -> list[tuple[int, int]]:
    """Return `(outputs, inputs)` of each matrix in a layer's attention and MLP, without experts."""
    q, kv, h = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    attention = [(q + 2 * kv, h), (h, q)]
    return attention if c.experts is not None else [*attention, (2 * c.intermediate_size, h), (h, c.intermediate_size)]


@dataclass(slots=True)
class _Layers:
    """Work of a pass, added up layer by layer."""

    c: ModelConfig
    gpu: Gpu
    of: Rows
    quantization: str | None
    heads: int
    """Number of rows that have logits."""
    cache_dtype: torch.dtype
    is_draft: bool
    providers: Providers

    @property
    def rows(self) -> int:
        return self.of.total

    @property
    def few(self) -> int:
        """Maximum number of rows for fused products, by the rule of the engine."""
        import torch

        from specrs.backends.cuda.workspace import layer_shapes, max_fused_rows

        if self.quantization is not None:
            return _FEW
        shapes = layer_shapes(self.c, torch.bfloat16)
        return max_fused_rows(self.c, shapes, self._limits(), self.providers, is_draft=self.is_draft)

    @property
    def rounds_rows(self) -> bool:
        """True if FP8 weights are multiplied with rows rounded to FP8."""
        return self.is_draft and self.quantization == "fp8" and self.rows > _FEW and self.gpu.capability >= 89

    def work(self) -> list[Work]:
        c, rows, few = self.c, self.rows, self.few
        q, kv, h, layers = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.num_layers
        found = [self._small("embed", 1, 4 * rows * h)]
        if self.of.batch:
            found.append(self._attention(self.of.batch, self.of.each, self.of.context))
        if chunks := self.of.chunks:
            found.append(self._attention(1, chunks.rows, chunks.context))
        if rows <= few and c.norms == "before" and c.experts is None:
            norms = 1
        else:
            # Of streams normed after blocks alone the first layer's is read as it is.
            norms = 2 * layers + 1 - (c.norms == "after")
        found.append(self._small("norms", norms, norms * 6 * rows * h))
        if rows > _FEW or not self._fuses_heads():
            found.append(self._small("rotation and KV", layers, layers * 4 * rows * (q + 2 * kv)))
        if c.query_scaling is not None:
            found.append(self._small("query scaling", layers, layers * 4 * rows * q))
        found.append(self._product("qkv", q + 2 * kv, h, layers))
        found.append(self._product("o", h, q, layers))
        dense = layers if c.experts is None else layers - sum(c.experts.layers)
        if dense:
            times = dense * -(-rows // _MLP) if rows > few else dense
            found.append(self._product("gate_up", 2 * c.intermediate_size, h, dense, times))
            found.append(self._product("down", h, c.intermediate_size, dense, times))
            if rows > few:
                found.append(self._small("activation", times, dense * 6 * rows * c.intermediate_size))
        if c.experts is not None:
            found += self._experts(sum(c.experts.layers))
        if not self.heads:
            return found
        many = self.heads > few
        parts = -(-self.heads // _LOGITS) if many else 1
        found.append(self._product("lm_head", c.vocab_size, h, 1, parts, quantized=False, rows=self.heads))
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
        quantized: bool = True,
        rows: int | None = None,
    ) -> Work:
        """Return the work of multiplying the pass's rows with a weight `[n, k]` in each of `layers` layers. `kernels`
        is the number of kernels; None: one per layer."""
        kernels = layers if kernels is None else kernels
        rows, weights = self.rows if rows is None else rows, float(n) * k
        moved = 2.0 * rows * (n + k)
        if not quantized or self.quantization is None:
            reads = kernels // layers
            moved += 2.0 * weights * reads
        else:
            codes = weights * WEIGHT_BITS[self.quantization] / 8
            if self.rounds_rows:
                work = Work(name, 2 * kernels, layers * (moved + codes), layers * 2.0 * rows * weights, 0.0, 2.0)
                return replace(work, fixed_us=kernels * (PRODUCT_US + KERNEL_US))
            if rows <= _FEW:
                moved += codes
            elif rows <= _READ_IN_PLACE:
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
        work = [self._product("router", e.count, h, layers, layers * times, quantized=False)]
        for name, n, k in (("expert gate_up", 2 * i, h), ("expert down", h, i)):
            codes = reads * n * k * WEIGHT_BITS[self.quantization] / 8
            moved, flops = codes + 2.0 * pairs * (n + k), 2.0 * pairs * n * k
            kernels = layers * times
            work.append(Work(name, kernels, layers * moved, layers * flops, kernels * PRODUCT_US))
        return [*work, self._small("routing and sums", 3 * layers * times, layers * 2.0 * (pairs + rows) * h)]

    def _limits(self) -> DeviceLimits:
        from specrs.kernels.cuda.device import DeviceLimits

        gpu = self.gpu
        return DeviceLimits(gpu.torch_name, gpu.capability, gpu.num_sms, gpu.shared_kib * 1024)

    def _fuses_heads(self) -> bool:
        """Return True if the product of few rows also norms, rotates and caches attention heads."""
        import torch

        from specrs.backends.cuda.workspace import fused_heads

        return self.quantization is None and fused_heads(self.c, torch.bfloat16, self._limits()) > 0

    def _attention(self, batch: int, each: int, context: int) -> Work:
        """Return the work of attention over `each` rows of `batch` sequences in all layers, including the kernels that
        combine partial results. A row attends to `context` positions."""
        import torch

        from specrs.kernels.cuda.attention_config import AttentionConfig

        c, limits = self.c, self._limits()
        kernels, moved, flops = 0, 0.0, 0.0
        for window in c.windows or (None,) * c.num_layers:
            seen = context if window is None else min(context, window)
            cut = AttentionConfig.choose(
                batch=batch,
                max_q_len=each,
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                dtypes=(torch.bfloat16, self.cache_dtype),
                limits=limits,
                span=seen,
            )
            combined = cut.splits > 1 and not cut.fused_lines(c.num_heads // c.num_kv_heads)
            kernels += 1 + combined
            moved += 2.0 * batch * seen * c.num_kv_heads * c.head_dim * self.cache_dtype.itemsize
            flops += 4.0 * batch * each * seen * c.num_heads * c.head_dim
        fixed = c.num_layers * ATTENTION_US + (kernels - c.num_layers) * KERNEL_US
        return Work("attention", kernels, moved, flops, fixed)

"""From a folder or hub id to a model. Knows the names of tensors; reads files through `checkpoint`."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from specrs.errors import CheckpointError, UnsupportedModelError, invalid
from specrs.kernels.coded_weight import CodedWeight, fuse
from specrs.kernels.kv_codes import FRACTIONS, UNSCALED
from specrs.kernels.linear import DenseWeight, Weight, pack
from specrs.kernels.rotary import signed_frequencies
from specrs.models.checkpoint import Checkpoint, read_json, resolve_folder
from specrs.models.config import ModelConfig, mask_token_id, parse_config
from specrs.models.dense import Dense
from specrs.models.dense_weights import DenseWeights, ExpertWeights, LayerWeights
from specrs.models.dummy import DummyCheckpoint
from specrs.models.errors import of_folder, unsupported
from specrs.models.experts import Experts
from specrs.models.gguf.checkpoint import GGUFCheckpoint, gguf_config, gguf_path
from specrs.models.kv_cache import read_kv_scales
from specrs.models.quantization.at_load import Float8AtLoad, IntegersAtLoad
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.quantization.checkpoint import QuantizedCheckpoint
from specrs.models.quantization.table import FIELDS, methods_of, read_config, scheme_of
from specrs.models.registry import is_known
from specrs.models.rope import Rope, frequencies
from specrs.models.shards import Shard, ShardedTensors, check_divides
from specrs.models.stacked import StackedCheckpoint
from specrs.models.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, Tensors, norm_names, tensor_shapes
from specrs.parallel.ranks import Ranks

logger = logging.getLogger("specrs")
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_ELSEWHERE = {"cpu": "float16", "cuda": "float64"}
"""What a device does not serve: half precision is slow on CPUs and emulated, the GPU kernels have no float64."""


class Types(NamedTuple):
    """What a model is of."""

    computed: str | torch.dtype
    """Weights and activations."""
    cached: torch.dtype | None = None
    """K and V in the cache; None: the same."""


def load_config(source: str | Path, *, revision: str | None = None) -> ModelConfig:
    """Read and check the configuration of a folder, hub id or GGUF file; of a hub id no weights are downloaded, but for
    GGUF files, which hold it.

    Raises CheckpointError, or UnsupportedModelError for what is not implemented.
    """
    file = gguf_path(source, revision)
    return _read_config(resolve_folder(source, revision, weights=False)) if file is None else gguf_config(file)


def check_is_model(source: str | Path, *, revision: str | None = None) -> None:
    """Check that `source` is a GGUF file, or a folder or hub id with a readable config.json.

    Of a hub id no weights are downloaded, but for GGUF files. Raises CheckpointError.
    """
    if gguf_path(source, revision) is not None:
        return
    folder = resolve_folder(source, revision, weights=False)
    if os.path.lexists(folder / "config.json"):
        read_json(folder / "config.json")
        return
    files = sorted(folder.glob("*.gguf"))
    remedy = f"the file {files[0]}" if files else "a folder with config.json, tokenizer.json and model.safetensors"
    also = "" if files else ", or a .gguf file"
    reason = f"holds no model, because config.json is missing; pass {remedy}{also}"
    raise invalid(CheckpointError, "model", str(source), reason)


def stored_config(source: str | Path, *, revision: str | None = None, load_format: str = "auto") -> ModelConfig:
    """`load_config`, untied where the weights of a folder hold an LM head of their own, see `with_own_head`.

    Weights of a hub id are not downloaded for it. Raises as `load_model`.
    """
    config = load_config(source, revision=revision)
    if load_format == "dummy" or not config.tie_word_embeddings or not Path(source).is_dir():
        return config
    return open_checkpoint(source, revision, load_format)[0]


def is_known_family(source: str | Path, *, revision: str | None = None) -> bool:
    """Whether a folder or hub id says an architecture of `registry.FAMILIES`; a GGUF file is for our readers. Raises
    CheckpointError."""
    if gguf_path(source, revision) is not None:
        return True
    raw = read_json(resolve_folder(source, revision, weights=False) / "config.json")
    return is_known(raw.get("architectures"))


def load_mask_token_id(source: str | Path, *, revision: str | None = None) -> int | None:
    """What a draft model of any family is fed in place of drafts; None where it is none for parallel drafting. Raises
    CheckpointError."""
    if gguf_path(source, revision) is not None:
        return None
    raw = read_json(resolve_folder(source, revision, weights=False) / "config.json")
    return mask_token_id(raw)


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype | Types = "auto",
    device: torch.device | str = "cpu",
    revision: str | None = None,
    load_format: str = "auto",
    max_model_len: int | None = None,
    quantization: str | None = None,
    ranks: Ranks | None = None,
) -> Dense:
    """Load the model of a folder, hub id or GGUF file; every tensor is checked before the first is read.

    With `ranks` it is this rank's part of the model, whose passes run on all of them at once.

    `max_model_len` is that of the engine, which LongRoPE depends on; None: the model's.
    With `load_format` `dummy` only its config.json is read, and weights are random numbers, the same each time.

    `dtype` is float32, float64, bfloat16 or auto: the checkpoint's dtype on a GPU; on a CPU float32 (float64 for a
    float64 checkpoint), because many CPUs have no bf16 products and those that do gain less than the text may change.

    On a GPU codes of a quantized checkpoint stay codes where kernels read them; elsewhere they become numbers, exact in
    float32. `quantization` `fp8`, `int8` or `int4` quantizes the projections of one that is not.
    Scales of K and V that are cached as codes are the checkpoint's, 1 where it has none.

    Raises CheckpointError, or UnsupportedModelError for what is not implemented.
    """
    device = torch.device(device)
    config, checkpoint = open_checkpoint(source, revision, load_format)
    config = config.for_length(max_model_len)
    if quantization == "fp8":
        checkpoint = Float8AtLoad(checkpoint)
    elif quantization is not None:
        checkpoint = IntegersAtLoad(checkpoint, quantization)
    types = dtype if isinstance(dtype, Types) else Types(dtype)
    resolved = resolve_dtype(types.computed, config, device)
    shard = None
    if ranks is not None:
        check_divides(config, str(source), "tensor_parallel_size", ranks.size)
        shard = Shard(ranks.rank, ranks.size)
    if device.type == "cuda" and isinstance(checkpoint, QuantizedTensors):
        loader: Loader = CodedLoader(config, checkpoint, resolved, device, shard)
    else:
        loader = Loader(config, checkpoint, resolved, device, shard)
    loader.cache_dtype = types.cached
    return Dense(loader.load(), ranks=ranks)


def open_checkpoint(
    source: str | Path, revision: str | None, load_format: str
) -> tuple[ModelConfig, Checkpoint | QuantizedTensors | DummyCheckpoint]:
    """The configuration of a folder, hub id or GGUF file, and where its tensors come from. Raises as `load_model`."""
    file = gguf_path(source, revision)
    if file is not None:
        config = gguf_config(file)
        return config, DummyCheckpoint(config) if load_format == "dummy" else GGUFCheckpoint(file)
    folder = resolve_folder(source, revision, weights=load_format != "dummy")
    config, scheme = _read_config(folder), scheme_of(read_config(folder))
    if load_format == "dummy":
        return config, DummyCheckpoint(config)
    files = StackedCheckpoint(folder) if _is_stacked(config) else Checkpoint(folder)
    tensors = files if scheme is None else QuantizedCheckpoint(files, scheme)
    return with_own_head(config, tensors), tensors


def with_own_head(config: ModelConfig, tensors: Tensors) -> ModelConfig:
    """`config`, untied if it says that embeddings are tied and the tensors hold an LM head that differs from them.

    As in transformers, the tensors are believed. Raises CheckpointError for tensors that are not those of `config`.
    """
    if not config.tie_word_embeddings:
        return config
    tensors.check(tensor_shapes(config), {LM_HEAD: (config.vocab_size, config.hidden_size)})
    if LM_HEAD not in tensors:
        return config
    quantized = isinstance(tensors, QuantizedTensors) and tensors.is_quantized(LM_HEAD)
    if not quantized and _same_numbers(tensors.mapped(LM_HEAD), tensors.mapped(EMBEDDING)):
        return config
    logger.warning(
        "%s: tie_word_embeddings=true, but %s differs from %s: it is loaded as an LM head of its own",
        tensors.folder,
        LM_HEAD,
        EMBEDDING,
    )
    return replace(config, tie_word_embeddings=False)


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices of a shape and any types are equal. Compares some rows at a time: the first often tell."""
    if one.data_ptr() == other.data_ptr() and one.dtype == other.dtype:
        return True
    rows = max(1, (1 << 20) // one.shape[1])
    parts = zip(torch.split(one, rows), torch.split(other, rows), strict=True)
    return all(bool((mine == its).all()) for mine, its in parts)


def load_tensors(config: ModelConfig, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> Dense:
    """A model of `config` from wherever its tensors are, under the names of a checkpoint."""
    config = with_own_head(config, tensors)
    return Dense(Loader(config, tensors, resolve_dtype(dtype, config, device), device).load())


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in (see `load_model`). Raises UnsupportedModelError for any other."""
    return named_dtype(dtype, config.checkpoint_dtype, device)


def named_dtype(dtype: str | torch.dtype, checkpoint_dtype: str | None, device: torch.device) -> torch.dtype:
    """The same where config.json says `checkpoint_dtype`."""
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        name = checkpoint_dtype or "float32"
        if device.type == "cpu" and name != "float64":
            name = "float32"
    if name not in DTYPES:
        given = "" if str(dtype) != "auto" else f" (dtype='auto' and config.json says {checkpoint_dtype})"
        raise invalid(UnsupportedModelError, "dtype", name, f"must be one of auto, {', '.join(DTYPES)}{given}")
    if name == _ELSEWHERE.get(device.type):
        allowed = ", ".join(other for other in DTYPES if other != name)
        raise invalid(
            UnsupportedModelError, "dtype", name, f"not implemented on device {device.type}; allowed: {allowed}"
        )
    return DTYPES[name]


def _read_config(folder: Path) -> ModelConfig:
    raw = read_config(folder)
    with of_folder(folder):
        scheme = scheme_of(raw)
        if scheme is not None:
            raw = {field: value for field, value in raw.items() if field not in FIELDS}
        generation = folder / "generation_config.json"
        config = parse_config(raw, read_json(generation) if generation.exists() else None)
        allowed = methods_of(stacked=_is_stacked(config))
        if scheme is not None and scheme.method not in allowed:
            raise unsupported(
                f"{FIELDS[0]}.quant_method", scheme.method, f"for {config.architecture} {', '.join(allowed)}"
            )
        return config


def _is_stacked(config: ModelConfig) -> bool:
    return config.experts is not None and config.experts.stacked


class LayerReader:
    """Reads, fuses and lays out the tensors of decoder layers."""

    cache_dtype: torch.dtype | None = None
    """See `DenseWeights`."""

    def __init__(self, checkpoint: Tensors, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device

    def layer(self, prefix: str, c: ModelConfig) -> LayerWeights:
        """The decoder layer whose names begin with `prefix`."""
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qk_norm = None
        if c.qk_norm:
            q, k = self.norm(attention + "q_norm", c), self.norm(attention + "k_norm", c)
            if c.qk_norm_whole:
                qk_norm = torch.cat((q, k)).view(-1, c.head_dim)
            else:
                qk_norm = torch.cat((q.expand(c.num_heads, -1), k.expand(c.num_kv_heads, -1)))
        before, behind, before_mlp, behind_mlp = (
            None if name is None else self.norm(prefix + name, c) for name in norm_names(c)
        )
        sparse = c.experts is not None and f"{prefix}{c.experts.block}.{c.experts.router}.weight" in self.checkpoint
        none = torch.empty(0, dtype=self.dtype, device=self.device)
        qkv, gate_up = (("qkv",), ("gate_up",)) if c.fused_projections else ("qkv", ("gate", "up"))
        return LayerWeights(
            input_norm=none if before is None else before,
            attention_output_norm=behind,
            post_attention_norm=none if before_mlp is None else before_mlp,
            mlp_output_norm=behind_mlp,
            qkv=self.linear([attention + f"{x}_proj" for x in qkv], bias=c.qkv_bias),
            qk_norm=qk_norm,
            o=self.linear([attention + "o_proj"], bias=c.o_bias),
            gate_up=self.nothing() if sparse else self.linear([mlp + f"{x}_proj" for x in gate_up], bias=c.mlp_bias),
            down=self.nothing() if sparse else self.linear([mlp + "down_proj"], bias=c.mlp_bias),
            experts=self.experts(prefix, c.experts) if c.experts is not None and sparse else None,
            sinks=self.read(attention + "sinks") if c.sinks else None,
            kv_scales=read_kv_scales(self.checkpoint, attention) if self.cache_dtype in FRACTIONS else UNSCALED,
        )

    def experts(self, prefix: str, experts: Experts) -> ExpertWeights:
        """The experts of a layer, and their router, as numbers."""
        block, (gate, up, down) = prefix + experts.block, experts.projections
        names = [f"{block}.experts.{i}." for i in range(experts.count)]
        parts = [[name + gate, name + up] for name in names], [[name + down] for name in names]
        gate_up, outputs = (self.stack(of, "weight") for of in parts)
        biases = (self.stack(parts[0], "bias"), self.stack(parts[1], "bias")) if experts.biases else None
        packed = [
            [pack(weight, None if biases is None else biases[i][j]) for j, weight in enumerate(stacked.unbind(0))]
            for i, stacked in enumerate((gate_up, outputs))
        ]
        in_place = all(isinstance(weight, DenseWeight) for weights in packed for weight in weights)
        router = f"{block}.{experts.router}"
        return ExpertWeights(
            router=pack(self.read(f"{router}.weight"), self.read(f"{router}.bias") if experts.biases else None),
            gate_up=tuple(packed[0]),
            down=tuple(packed[1]),
            stacked=(gate_up, outputs) if in_place else None,
            stacked_biases=biases if in_place else None,
        )

    def stack(self, names: list[list[str]], kind: str) -> Tensor:
        """Weights `[experts, out, in]` or biases `[experts, out]` of each expert's projections above each other."""
        stacked = torch.empty(0)
        for i, of_expert in enumerate(names):
            weight = torch.cat([self.read(f"{name}.{kind}") for name in of_expert])
            if i == 0:
                stacked = weight.new_empty((len(names), *weight.shape))
            stacked[i] = weight
        return stacked

    def nothing(self) -> Weight:
        """In place of a projection that a layer does not have."""
        return DenseWeight(torch.empty((0, 0), dtype=self.dtype, device=self.device))

    def norm(self, name: str, c: ModelConfig) -> Tensor:
        """The weights of the norm `name`."""
        weight = self.read(f"{name}.weight")
        return weight + c.norm_offset if c.norm_offset else weight

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        """The projections `names`, which share an input, as one."""
        weight = torch.cat([self.read(f"{name}.weight") for name in names])
        return pack(weight, torch.cat([self.read(f"{name}.bias") for name in names]) if bias else None)

    def matrix(self, name: str) -> Tensor:
        return self.read(name)

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(name, self.dtype, self.device)


class Loader(LayerReader):
    """The same for all tensors of one model, or of one rank's part of it."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Tensors,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        """`config` and `checkpoint` are those of the whole model; None: `shard` is all of it."""
        super().__init__(checkpoint if shard is None else ShardedTensors(checkpoint, config, shard), dtype, device)
        self.config = config
        self.held = config if shard is None else shard.of_config(config)

    def load(self) -> DenseWeights:
        c = self.config
        self.check()
        embedding = self.matrix(EMBEDDING)
        head = embedding if c.tie_word_embeddings else self.matrix(LM_HEAD)
        rotaries = {rope: None if rope is None else self.rotary(rope) for rope in c.ropes}
        layers = tqdm(range(c.num_layers), desc="Loading layers", delay=2.0, disable=None)
        return DenseWeights(
            config=self.held,
            dtype=self.dtype,
            device=self.device,
            embedding=embedding,
            layers=tuple(self.layer(f"model.layers.{i}.", self.held) for i in layers),
            final_norm=self.norm(FINAL_NORM.removesuffix(".weight"), c) / c.logits_scaling,
            lm_head=self.lm_head(head),
            rotary=self.rotary((c.rope_theta, c.rope_scaling)),
            rotaries=tuple(rotaries[rope] for rope in c.ropes),
            cache_dtype=self.cache_dtype,
        )

    def rotary(self, rope: Rope) -> Tensor:
        return signed_frequencies(frequencies(rope, self.config.rotary_dim)).to(self.device)

    def check(self) -> None:
        c = self.config
        self.checkpoint.check(tensor_shapes(c), {LM_HEAD: (c.vocab_size, c.hidden_size)})

    def lm_head(self, weight: Tensor) -> Weight:
        return pack(weight.float() if self.dtype == torch.bfloat16 and self.device.type == "cpu" else weight)


class CodedLoader(Loader):
    """Leaves codes as they are where the kernels of a GPU read them, and makes numbers of others."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: QuantizedTensors,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(config, checkpoint, dtype, device, shard)
        self.codes, self.shard = checkpoint, shard
        self.num_codes, self.code_bytes = 0, 0

    def load(self) -> DenseWeights:
        weights = super().load()
        logger.info(
            "%s: %d matrices of %d layers stay codes, %.2f GiB; others are %s",
            self.checkpoint.folder,
            self.num_codes,
            self.config.num_layers,
            self.code_bytes / 2**30,
            str(self.dtype).removeprefix("torch."),
        )
        return weights

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        coded = [self.coded(f"{name}.weight") for name in names]
        parts = [part.to(self.device) for part in coded if part is not None]
        biases = torch.cat([self.read(f"{name}.bias") for name in names]) if bias else None
        fused = fuse(parts, biases) if len(parts) == len(names) else None
        if fused is None:
            return super().linear(names, bias=bias)
        self.num_codes, self.code_bytes = self.num_codes + 1, self.code_bytes + fused.num_bytes
        return fused

    def coded(self, name: str) -> CodedWeight | None:
        """The codes of a weight that are held here; None: it becomes numbers."""
        whole = self.codes.coded(name) if self.codes.is_quantized(name) else None
        return whole if whole is None or self.shard is None else self.shard.of_codes(name, whole, self.config)

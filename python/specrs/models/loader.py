"""From a folder or hub id to a model. Knows the names of tensors; reads files through `checkpoint`."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from specrs.errors import CheckpointError, UnsupportedModelError, invalid
from specrs.kernels.linear import Weight, pack
from specrs.kernels.rotary import inverse_frequencies, signed_frequencies
from specrs.models.checkpoint import Checkpoint, read_json, resolve_folder
from specrs.models.config import ModelConfig, parse_config
from specrs.models.dense import Dense
from specrs.models.dense_weights import DenseWeights, LayerWeights
from specrs.models.dummy import DummyCheckpoint
from specrs.models.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, tensor_shapes

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_ELSEWHERE = {"cpu": "float16", "cuda": "float64"}
"""What a device does not serve: half precision is slow on CPUs and emulated, the GPU kernels have no float64."""


def load_config(source: str | Path, *, revision: str | None = None) -> ModelConfig:
    """Read and check the configuration of a folder or hub id; of a hub id no weights are downloaded.

    Raises CheckpointError, or UnsupportedModelError for what is not implemented.
    """
    return _read_config(resolve_folder(source, revision, weights=False))


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    revision: str | None = None,
    load_format: str = "auto",
) -> Dense:
    """Load the model of a folder or hub id; every tensor is checked before the first is read.

    With `load_format` `dummy` only its config.json is read, and weights are random numbers, the same each time.

    `dtype` is float32, float64, bfloat16 or auto: the checkpoint's dtype on a GPU; on a CPU float32 (float64 for a
    float64 checkpoint), because many CPUs have no bf16 products and those that do gain less than the text may change.

    Raises CheckpointError, or UnsupportedModelError for what is not implemented.
    """
    device = torch.device(device)
    config, checkpoint = open_checkpoint(source, revision, load_format)
    return Dense(Loader(config, checkpoint, resolve_dtype(dtype, config, device), device).load())


def open_checkpoint(
    source: str | Path, revision: str | None, load_format: str
) -> tuple[ModelConfig, Checkpoint | DummyCheckpoint]:
    """The configuration of a folder or hub id, and where its tensors come from. Raises as `load_model`."""
    folder = resolve_folder(source, revision, weights=load_format != "dummy")
    config = _read_config(folder)
    return config, DummyCheckpoint(config) if load_format == "dummy" else Checkpoint(folder)


class Tensors(Protocol):
    """Where the tensors of a model come from."""

    @property
    def folder(self) -> Path | str:
        """What messages call it."""

    def __contains__(self, name: str) -> bool: ...

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]], /) -> None:
        """Raise if what is `required` is not there in its shape."""

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One tensor."""


def load_tensors(config: ModelConfig, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> Dense:
    """A model of `config` from wherever its tensors are, under the names of a checkpoint."""
    return Dense(Loader(config, tensors, resolve_dtype(dtype, config, device), device).load())


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in (see `load_model`). Raises UnsupportedModelError for any other."""
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        name = config.checkpoint_dtype or "float32"
        if device.type == "cpu" and name != "float64":
            name = "float32"
    if name not in DTYPES:
        given = "" if str(dtype) != "auto" else f" (dtype='auto' and config.json says {config.checkpoint_dtype})"
        raise invalid(UnsupportedModelError, "dtype", name, f"must be one of auto, {', '.join(DTYPES)}{given}")
    if name == _ELSEWHERE.get(device.type):
        allowed = ", ".join(other for other in DTYPES if other != name)
        raise invalid(
            UnsupportedModelError, "dtype", name, f"not implemented on device {device.type}; allowed: {allowed}"
        )
    return DTYPES[name]


def _read_config(folder: Path) -> ModelConfig:
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return parse_config(raw, read_json(generation) if generation.exists() else None)


class LayerReader:
    """Reads, fuses and lays out the tensors of decoder layers."""

    def __init__(self, checkpoint: Tensors, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device

    def layer(self, prefix: str, c: ModelConfig) -> LayerWeights:
        """The decoder layer whose names begin with `prefix`."""
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qk_norm = None
        if c.qk_norm:
            q, k = self.read(attention + "q_norm.weight"), self.read(attention + "k_norm.weight")
            qk_norm = torch.cat((q.expand(c.num_heads, -1), k.expand(c.num_kv_heads, -1)))
        return LayerWeights(
            input_norm=self.read(prefix + "input_layernorm.weight"),
            qkv=self.linear([attention + f"{x}_proj" for x in "qkv"], bias=c.qkv_bias),
            qk_norm=qk_norm,
            o=self.linear([attention + "o_proj"], bias=c.o_bias),
            post_attention_norm=self.read(prefix + "post_attention_layernorm.weight"),
            gate_up=self.linear([mlp + "gate_proj", mlp + "up_proj"], bias=c.mlp_bias),
            down=self.linear([mlp + "down_proj"], bias=c.mlp_bias),
        )

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        """The projections `names`, which share an input, as one."""
        weight = torch.cat([self.read(f"{name}.weight") for name in names])
        return pack(weight, torch.cat([self.read(f"{name}.bias") for name in names]) if bias else None)

    def matrix(self, name: str) -> Tensor:
        return self.read(name)

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(name, self.dtype, self.device)


class Loader(LayerReader):
    """The same for all tensors of one model."""

    def __init__(self, config: ModelConfig, checkpoint: Tensors, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(checkpoint, dtype, device)
        self.config = config

    def load(self) -> DenseWeights:
        c = self.config
        self.check()
        embedding = self.matrix(EMBEDDING)
        head = embedding
        if LM_HEAD in self.checkpoint:
            head = self.matrix(LM_HEAD)
            if c.tie_word_embeddings and not torch.equal(head, embedding):
                raise CheckpointError(
                    f"{self.checkpoint.folder}: tie_word_embeddings is true, but {LM_HEAD} differs from {EMBEDDING}"
                )
            if c.tie_word_embeddings:
                head = embedding
        layers = tqdm(range(c.num_layers), desc="Loading layers", delay=2.0, disable=None)
        scaling = {} if c.rope_scaling is None else asdict(c.rope_scaling)
        return DenseWeights(
            config=c,
            dtype=self.dtype,
            device=self.device,
            embedding=embedding,
            layers=tuple(self.layer(f"model.layers.{i}.", c) for i in layers),
            final_norm=self.read(FINAL_NORM),
            lm_head=self.lm_head(head),
            rotary=signed_frequencies(inverse_frequencies(c.head_dim, c.rope_theta, **scaling)).to(self.device),
        )

    def check(self) -> None:
        c = self.config
        self.checkpoint.check(tensor_shapes(c), {LM_HEAD: (c.vocab_size, c.hidden_size)})

    def lm_head(self, weight: Tensor) -> Weight:
        return pack(weight.float() if self.dtype == torch.bfloat16 and self.device.type == "cpu" else weight)

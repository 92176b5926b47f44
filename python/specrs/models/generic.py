"""Any causal model of transformers: its modules, with attention replaced by ours over the paged KV cache.

The N rows of a pass are fed as a batch of N texts of one token each, the shapes that modules see when they decode.
Attention and masks are replaced through transformers' public interfaces. A model's mask arrives as a function of two
positions. Knows no family; `generic_loader` rejects what does not fit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils.generic import ModelOutput

from specrs.errors import UnsupportedModelError
from specrs.kernels.paged_attention import (
    AttentionPlan,
    AttentionShape,
    Visibility,
    paged_attention,
    plan_attention,
    write_kv,
)
from specrs.models.base import HiddenStates, TorchModel
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.torch_arrays import NUMPY_DTYPES, TORCH_DTYPES

ATTENTION = "specrs_paged"
"""Name under which transformers knows the attention and mask functions of this module."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Head counts and head sizes of one attention call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Number of features of a query or key head."""
    value_dim: int
    """Number of features of a value head."""

    @property
    def cached_dim(self) -> int:
        """Number of features that the cache holds for each head of K and of V: the larger of `head_dim` and
        `value_dim`. The shorter one is padded with zeros."""
        return max(self.head_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class Mask:
    """The value that modules pass as `attention_mask` from `_mask`, which makes it, to `_attention`, which uses it."""

    visibility: Visibility


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call of attention: q `[N, heads, D]`, k `[N, kv_heads, D]`, v `[N, kv_heads, Dv]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Mask | None
    sinks: Tensor | None = None
    softcap: float | None = None


class _Attends(Protocol):
    def attend(self, call: Call) -> Tensor:
        """Return the attention output, `[N, heads, Dv]`."""


_PASS: ContextVar[_Attends] = ContextVar("pass")
"""Object that computes attention for the pass that is running in this thread."""
_FINAL: ContextVar[Tensor] = ContextVar("final")
"""Final hidden states that `_States` returns in this thread."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention that transformers calls in every layer, with q, k, v `[N, heads, 1, D]`. Returns `[N, 1, heads, Dv]`.

    Raises UnsupportedModelError for attention that the paged kernels do not compute.
    """
    name, is_causal = type(module).__name__, options.get("is_causal")
    if options.get("position_bias") is not None:
        raise UnsupportedModelError(f"{name} adds a bias for each distance to its attention scores")
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        raise UnsupportedModelError(f"{name} makes attention masks of its own")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModelError(f"{name} attends tokens that are still to come")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = Call(query[:, :, 0], key[:, :, 0], value[:, :, 0], scale, attention_mask)
    call = replace(call, sinks=options.get("s_aux"), softcap=options.get("softcap"))
    return _PASS.get().attend(call).unsqueeze(1), None


def _mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Mask | None:
    """Mask factory that transformers calls for each kind of mask of a pass. `local_size` is the size of a window or
    chunk.

    Returns None for plain causal attention.
    """
    if local_size is None:
        return None
    first = torch.tensor(0)

    def sees(row: Tensor, column: Tensor) -> Tensor:
        return mask_function(first, first, row, column)

    return Mask(Visibility(local_size, sees))


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)


@contextmanager
def attending(by: _Attends) -> Iterator[None]:
    """Context in which `by` computes the attention of passes."""
    token = _PASS.set(by)
    try:
        yield
    finally:
        _PASS.reset(token)


@dataclass(slots=True)
class Probe:
    """Recorder of the shapes of attention calls. Its output has the right shape, but meaningless values."""

    shapes: list[LayerShape] = field(default_factory=list)

    def attend(self, call: Call) -> Tensor:
        """Record the shape of `call` and return values in the shape of an output, `[N, heads, Dv]`."""
        heads, kv_heads, value_dim = call.query.shape[1], call.key.shape[1], call.value.shape[2]
        self.shapes.append(LayerShape(heads, kv_heads, call.query.shape[2], value_dim))
        return call.value.repeat_interleave(heads // kv_heads, dim=1)


@dataclass(slots=True)
class _PagedPass:
    """Attention of one pass over a paged KV cache, called layer by layer."""

    inputs: PassInputs
    kv_cache: KVCache
    shapes: Sequence[LayerShape]
    layer: int = 0
    plans: dict[tuple[AttentionShape, int | None], AttentionPlan] = field(default_factory=dict)

    def attend(self, call: Call) -> Tensor:
        """Write K and V of the next layer into the cache, and return its attention output `[N, heads, Dv]`."""
        shape, cache = self.shapes[self.layer], self.kv_cache.layers[self.layer]
        self.layer += 1
        dim = shape.cached_dim
        q, k, v = (F.pad(x, (0, dim - x.shape[2])) for x in (call.query, call.key, call.value))
        plan = self._plan(shape, call.mask, q.dtype)
        write_kv(torch.cat((k, v), dim=1), cache, plan)
        # Zeros after the features of q and k change no score.
        out = paged_attention(q, cache, plan, call.scale, sinks=call.sinks, softcap=call.softcap)
        return out.view(-1, shape.num_heads, dim)[:, :, : shape.value_dim]

    def _plan(self, layer: LayerShape, mask: Mask | None, dtype: torch.dtype) -> AttentionPlan:
        dtypes = dtype, self.kv_cache.layers[0].dtype
        shape = AttentionShape(layer.num_heads, layer.num_kv_heads, layer.cached_dim, self.kv_cache.block_size, *dtypes)
        # Masks live as long as the pass, so their ids are unique.
        key = (shape, None if mask is None else id(mask))
        if key not in self.plans:
            p = self.inputs
            visibility = None if mask is None else mask.visibility
            self.plans[key] = plan_attention(
                p.positions, p.slots, p.q_start, p.block_table, shape, visibility=visibility
            )
        return self.plans[key]


def _output_embeddings(model: Any) -> Any:
    return model.get_output_embeddings()


def decoder_name(model: PreTrainedModel) -> str:
    """Return the attribute of a causal model that holds its decoder, which computes final states. Raises
    UnsupportedModelError if there is none."""
    name = next((name for name in (model.base_model_prefix, "model") if name in model._modules), None)
    if name is None:
        raise UnsupportedModelError("its decoder cannot be told from its LM head")
    return name


@dataclass
class _Output(ModelOutput):
    """Decoder output with the attributes that causal models read."""

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class _States(nn.Module):
    """Replacement for a causal model's decoder that returns states computed earlier (`_FINAL`)."""

    @property
    def decoder(self) -> _States:
        """This module. Some causal models reach their decoder through this name."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Output:
        """Return the states in `_FINAL`, whatever the arguments are."""
        return _Output(last_hidden_state=_FINAL.get())


class Head:
    """LM head of a causal model. It computes logits of final states with the model's own code, which may scale or cap
    them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Share the weights of `model`, except a bf16 LM head, which is copied to fp32.

        bf16 logits would often tie at the top: see `TorchDecoder.compute_logits`.
        """
        self._model = copy.copy(model)
        modules = dict(model._modules)
        modules[decoder_name(model)] = _States()
        output = _output_embeddings(model)
        name = next((name for name, module in modules.items() if module is output), None)
        self.dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        if model.dtype == torch.bfloat16 and name is not None:
            # A copy, because a tied LM head shares its weight with the embedding.
            modules[name] = copy.deepcopy(output).float()
        else:
            self.dtype = model.dtype
        self._model.__dict__["_modules"] = modules

    def logits(self, states: Tensor) -> Tensor:
        """Return logits `[L, vocab]` of states `[L, hidden]`: fp32, or float64 for float64 models."""
        ids = torch.zeros((len(states), 1), dtype=torch.int64, device=states.device)
        # Engines in several threads may share a model.
        token = _FINAL.set(states.to(self.dtype).unsqueeze(1))
        try:
            logits: Tensor = self._model(input_ids=ids, use_cache=False, return_dict=True).logits[:, 0]
        finally:
            _FINAL.reset(token)
        return logits.float() if logits.dtype == torch.bfloat16 else logits


@dataclass(frozen=True, slots=True)
class GenericFacts:
    """Facts about a model other than its weights."""

    shapes: tuple[LayerShape, ...]
    """Shape of each attention call of a pass, in order."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int


class GenericModel(TorchModel):
    """A causal model of transformers on a CPU, with our attention set."""

    def __init__(self, module: PreTrainedModel, facts: GenericFacts) -> None:
        """Wrap `module`, which has our attention. It must not be changed while this object lives."""
        self.module = module
        self._decoder: Any = getattr(module, decoder_name(module))
        self._facts = facts
        self._head = Head(module)
        self._num_parameters = active_parameters(module)
        self.cache_dtype: np.dtype[Any] = NUMPY_DTYPES[module.dtype]
        """Dtype of K and V in the cache. If that is FP8, their scales are 1."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits per row."""
        return self._facts.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Number of positions that the model was trained for."""
        return self._facts.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a text."""
        return self._facts.eos_token_ids

    @property
    def num_parameters(self) -> int:
        """Number of weights that a pass over one row reads: see `active_parameters`."""
        return self._num_parameters

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of weights and activations."""
        return NUMPY_DTYPES[self.module.dtype]

    @property
    def device_name(self) -> str:
        """Device that holds the weights, as a string."""
        return str(self.module.device)

    @property
    def device(self) -> torch.device:
        """Device that holds the weights."""
        return self.module.device

    @property
    def hidden_size(self) -> int:
        """Number of features of a final hidden state."""
        size: int = self.module.config.get_text_config(decoder=True).hidden_size
        return size

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        layers: int = self.module.config.get_text_config(decoder=True).num_hidden_layers
        return layers

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of K and V of one block over all layers."""
        numbers = sum(2 * shape.num_kv_heads * shape.cached_dim for shape in self._facts.shapes)
        return numbers * block_size * self.cache_dtype.itemsize

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Return a zeroed cache of `num_blocks` blocks of `block_size` positions, and a scratch block. Layers may
        differ in shape."""
        layers = [(shape.num_kv_heads, shape.cached_dim) for shape in self._facts.shapes]
        return KVCache.of_layers(layers, num_blocks, block_size, TORCH_DTYPES[self.cache_dtype], self.device)

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """Feed N rows. Writes K and V of every row with a slot into `kv_cache` and changes nothing else.

        Rows at position -1 are masked: their output is finite but meaningless. `hidden_layers` are the layers whose
        inputs are returned with the final states.
        """
        with attending(_PagedPass(inputs, kv_cache, self._facts.shapes)):
            output = self._decoder(
                input_ids=inputs.input_ids.unsqueeze(1),
                # Masked rows have position -1. They are fed at 0, which every model has.
                position_ids=inputs.positions.clamp(min=0).unsqueeze(1),
                use_cache=False,
                output_hidden_states=bool(hidden_layers),
                return_dict=True,
            )
        entries = None
        if hidden_layers:
            entries = torch.stack([output.hidden_states[i][:, 0] for i in hidden_layers], dim=1)
        return HiddenStates(output.last_hidden_state[:, 0], entries)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of final hidden states `[L, hidden]`. With `out` `[L, ids]`, write those of the first ids
        into it."""
        logits = self._head.logits(hidden)
        return logits if out is None else out.copy_(logits[:, : out.shape[1]])


def active_parameters(model: PreTrainedModel) -> int:
    """Return the number of weights that a pass reads for one token. Counts only the experts that a token uses, and the
    input embedding only if the LM head shares it."""
    config = model.config.get_text_config(decoder=True)
    experts = [getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    total = next((count for count in experts if count), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = chosen / total if total and chosen else 1.0
    count = sum(p.numel() * (share if ".experts." in name else 1.0) for name, p in model.named_parameters())
    embedding: Any = model.get_input_embeddings()
    output = _output_embeddings(model)
    if output is not None and output.weight is not embedding.weight:
        count -= embedding.weight.numel()
    return math.ceil(count)

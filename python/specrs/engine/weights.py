"""The weights that an engine serves: loads target and draft, and checks that they fit. Builds nothing else."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from specrs.arrays import BFLOAT16, FLOAT32
from specrs.config import EngineConfig
from specrs.drafters.text import Bridge, Vocabulary
from specrs.drafters.vocabulary import SharedVocabulary
from specrs.engine.device import device_of_rank, device_type, resolve_device
from specrs.errors import (
    InvalidConfigError,
    TokenizerMismatchError,
    UnsupportedConfigError,
    invalid,
)
from specrs.extras import require
from specrs.models.base import Model, TorchModel
from specrs.models.checkpoint import resolve_folder
from specrs.models.config import MASK_TOKEN_FIELDS, ModelConfig
from specrs.models.dense_weights import DenseFacts
from specrs.models.eagle3 import load_eagle3
from specrs.models.eagle3_weights import Eagle3Facts
from specrs.models.errors import OF_DRAFT, OF_TARGET, about
from specrs.models.kv_dtypes import resolve_cache_dtype
from specrs.models.loader import (
    is_known_family,
    load_config,
    load_mask_token_id,
    open_checkpoint,
    resolve_dtype,
    stored_config,
)
from specrs.models.native_loader import load_native
from specrs.models.quantization.at_load import INT4_GROUPS, bits_at_load
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.quantization.table import method_of, resolve_quantization
from specrs.models.shards import Shard, check_cuda_ranks, check_divides
from specrs.models.tensors import LM_HEAD, tensor_shapes
from specrs.parallel.start import own_place
from specrs.speculative_config import SpeculativeConfig
from specrs.tokenizer import Tokenizer, end_ids, shared_ids, unknown_id

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks

logger = logging.getLogger("specrs")
NATIVE_DTYPES = (FLOAT32, BFLOAT16)
"""What the native pass of a CPU computes; float64 goes through torch."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Loaded models; never written to, so engines may share them."""

    target: Model
    draft: Model | None
    mask_token_id: int | None = None
    """What the draft is fed in place of drafts; None: it drafts token by token."""
    shared: SharedVocabulary | None = None
    """What the draft, of another tokenizer, shares with the target; None: they have the same ids."""
    head: Eagle3Facts | None = None
    bridge: Bridge | None = None
    """How the draft, of another tokenizer, reads and writes the target's texts; None: it drafts by tokens."""

    @property
    def device(self) -> str:
        """Where the models are: `cpu`, or `cuda:N`."""
        kind = self.target.device_type
        return kind if kind == "cpu" else str(cast("TorchModel", self.target).device)


def load_weights(config: EngineConfig, ranks: Ranks | None = None) -> Weights:
    """Load target and, where the engine may speculate, draft, onto the device of `config`; of several `ranks` this
    one's part, and of a draft of degree 1 all.

    Raises:
        InvalidConfigError and its subclasses: what is missing, broken or not supported, by name.
    """
    device = resolve_device(config.device) if ranks is None else str(ranks.device)
    kind = device_type(device)
    speculative = config.speculative_config
    config.check_native_serves(kind, config.dtype)
    if kind == "cuda":
        check_formats(config, device)
        check_weights_fit(config, device, ranks)
    config.check_fp8_rows(kind, config.dtype)
    config.check_ranks_serve(kind)
    config.check_loras_serve(kind)
    kinds = config.quantization, config.kv_cache_dtype
    if config.enable_lora and _is_generic(config, config.target, config.revision, device):
        reason = f"not implemented with model_impl='transformers', which {config.target} needs; allowed: False"
        raise invalid(UnsupportedConfigError, "enable_lora", True, reason)
    target = _load(config, config.target, config.revision, config.dtype, device, kinds, ranks=ranks)
    draft = _draft_source(config)
    if speculative is None or draft is None:
        return Weights(target, None)
    if speculative.reads_hidden:
        if not isinstance(target, DenseFacts):
            reason = "not implemented for a target of model_impl='transformers'; allowed: a method of another kind"
            raise invalid(UnsupportedConfigError, "speculative_config.method", speculative.method, reason)
        with about(*OF_DRAFT):
            return Weights(target, None, head=_load_head(speculative, draft, target, _of_draft(config, ranks)))
    dtype = str(target.dtype)
    kinds = speculative.quantization, speculative.kv_cache_dtype or config.kv_cache_dtype
    own = _of_draft(config, ranks)
    with about(*OF_DRAFT):
        mask = _mask_token_id(*draft) if speculative.parallel_drafting else None
        model = _load(config, *draft, dtype, device, kinds, "speculative_config.", ranks=own)
    if not speculative.use_heterogeneous_vocab:
        return Weights(target, model, mask)
    revision = config.tokenizer_revision or (None if config.tokenizer else config.revision)
    ours = Tokenizer(config.tokenizer or config.target, revision)
    with about(*OF_DRAFT):
        theirs = Tokenizer(*draft)
    if config.rule == "coupled" and target.device_type == "cpu":
        return Weights(target, model, bridge=Bridge(_vocabulary(ours, target), _vocabulary(theirs, model)))
    return Weights(target, model, shared=_shared(draft[0], ours, theirs, target, model))


def _of_draft(config: EngineConfig, ranks: Ranks | None) -> Ranks | None:
    """The ranks that compute the draft together; None: each does alone."""
    speculative = config.speculative_config
    return None if speculative is None or speculative.draft_tensor_parallel_size == 1 else ranks


def check_ranks(config: EngineConfig) -> None:
    """Raises UnsupportedConfigError for models that the ranks of `config` cannot split. Reads configurations only."""
    draft, speculative = _draft_source(config), config.speculative_config
    device = device_of_rank(config.device, config.tensor_parallel_size, own_place(config.tensor_parallel_size))
    config.check_ranks_serve(device_type(device))
    sources = [("tensor_parallel_size", config.target, config.revision)]
    in_parts = speculative is not None and speculative.draft_tensor_parallel_size > 1 and not speculative.reads_hidden
    if draft is not None and in_parts:
        sources.append(("speculative_config.draft_tensor_parallel_size", *draft))
    for field, source, revision in sources:
        with about(*(OF_TARGET if field == "tensor_parallel_size" else OF_DRAFT)):
            _check_ours(config, source, revision)
            model = load_config(source, revision=revision)
        check_divides(model, source, field, config.tensor_parallel_size)
        if device_type(device) == "cuda":
            check_cuda_ranks(model, field, config.tensor_parallel_size)


def _check_ours(config: EngineConfig, source: str, revision: str | None) -> None:
    """Raises UnsupportedConfigError for a model that transformers' modules compute."""
    if config.model_impl == "auto" and not is_known_family(source, revision=revision):
        reason = f"not implemented with model_impl='transformers', which {source} needs; allowed: 1"
        raise invalid(UnsupportedConfigError, "tensor_parallel_size", config.tensor_parallel_size, reason)


def _vocabulary(tokenizer: Tokenizer, model: Model) -> Vocabulary:
    bos = tokenizer.bos_token_id
    begins = bos is not None and tokenizer.encode("a")[:1] == [bos]
    ends = end_ids(model.eos_token_ids, tokenizer, model.vocab_size)
    return Vocabulary(tokenizer.backend, bos if begins else None, ends)


def _shared(draft: str, ours: Tokenizer, theirs: Tokenizer, target: Model, model: Model) -> SharedVocabulary:
    """Raises TokenizerMismatchError if nothing is shared."""
    sizes, unknown = (target.vocab_size, model.vocab_size), unknown_id(theirs)
    pairs = [pair for pair in shared_ids(ours, theirs) if pair[0] < sizes[0] and pair[1] < sizes[1]]
    if not pairs:
        reason = f"its tokenizer shares no token with that of {ours.source}, so it can propose none"
        raise invalid(TokenizerMismatchError, "speculative_config.model", draft, reason)
    logger.info(
        "%s shares %d of its %d tokens with the target's %d, and is fed id %d for others",
        draft,
        len(pairs),
        theirs.vocab_size,
        ours.vocab_size,
        unknown,
    )
    return SharedVocabulary(tuple(pairs), unknown, sizes[0])


def _mask_token_id(draft: str, revision: str | None) -> int:
    """Raises InvalidConfigError for a draft that has none."""
    mask = load_mask_token_id(draft, revision=revision)
    if mask is None:
        reason = f"has no mask token in config.json, which parallel_drafting needs ({', '.join(MASK_TOKEN_FIELDS)})"
        raise invalid(InvalidConfigError, "speculative_config.model", draft, reason)
    return mask


def _load(
    config: EngineConfig,
    source: str,
    revision: str | None,
    dtype: str,
    device: str,
    kinds: tuple[str | None, str],
    at: str = "",
    ranks: Ranks | None = None,
) -> Model:
    """`kinds` are `quantization` and `kv_cache_dtype`, whose fields' names begin with `at`, which is empty for the
    target; `ranks` compute the model together."""
    if _is_generic(config, source, revision, device):
        return _load_generic(config, source, revision, dtype, kinds, at)
    (quantization, kv_cache_dtype), field, kind = kinds, at + "quantization", device_type(device)
    quantization = resolve_quantization(field, quantization, source, revision, kind, load_format=config.load_format)
    model = load_config(source, revision=revision)
    if quantization == "int4":
        _check_int4(field, source, model)
    resolved = resolve_dtype(dtype, model, kind)
    cache_dtype = resolve_cache_dtype(at + "kv_cache_dtype", kv_cache_dtype, resolved)
    if kind == "cpu" and not config.enforce_eager and ranks is None:
        config.check_native_serves(kind, str(resolved))
        if resolved in NATIVE_DTYPES:
            return load_native(
                source,
                dtype=resolved,
                revision=revision,
                load_format=config.load_format,
                quantization=quantization,
                max_model_len=config.max_model_len,
                exact=config.dtype != "auto",
                cache_dtype=cache_dtype,
            )
        logger.info("%s: torch computes %s, the native pass computes float32 and bfloat16", source, resolved)
    config.check_fp8_rows(kind, str(resolved))
    if kind == "cpu":
        _check_torch(config, resolved)
    from specrs.models.torch_loader import load_model  # and torch, which the native pass does without

    loaded = load_model(
        source,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device if ranks is None else ranks,
        revision=revision,
        load_format=config.load_format,
        max_model_len=config.max_model_len,
        quantization=quantization,
    )
    if not config.cuda_fp8_rows:
        return loaded
    from specrs.models.torch_weights import has_fp8_rows, with_fp8_rows

    made = replace(loaded, weights=with_fp8_rows(loaded.weights))
    if not at and not has_fp8_rows(made.weights):
        reason = f"{source} has no FP8 weights here; allowed: False"
        raise invalid(UnsupportedConfigError, "cuda_fp8_rows", True, reason)
    return made


def _check_torch(config: EngineConfig, dtype: np.dtype[Any]) -> None:
    """Raise InvalidConfigError for what torch computes on a CPU, where it is not installed."""
    field = f"dtype={str(dtype)!r}"
    if config.enforce_eager:
        field = "enforce_eager=True"
    elif config.tensor_parallel_size > 1:
        field = f"tensor_parallel_size={config.tensor_parallel_size}"
    require("torch", "transformers", field)


def _is_generic(config: EngineConfig, source: str, revision: str | None, device: str) -> bool:
    """Whether transformers' modules compute the model. Raises UnsupportedConfigError where they would, on a GPU."""
    if config.model_impl == "specrs" or (config.model_impl == "auto" and is_known_family(source, revision=revision)):
        return False
    if device_type(device) == "cuda":
        if config.model_impl == "auto":
            return False  # whose reader refuses it with the families that there are
        reason = f"not implemented on device={device!r}; allowed: 'auto' or 'specrs', or device='cpu'"
        raise invalid(UnsupportedConfigError, "model_impl", config.model_impl, reason)
    return True


def _load_generic(
    config: EngineConfig, source: str, revision: str | None, dtype: str, kinds: tuple[str | None, str], at: str
) -> Model:
    quantization, kv_cache_dtype = kinds
    if quantization is not None:
        reason = f"not implemented with model_impl='transformers', which {source} needs; allowed: None"
        raise invalid(UnsupportedConfigError, at + "quantization", quantization, reason)
    require("torch", "transformers", f"model={source!r}")
    require("transformers", "transformers", f"model={source!r}")
    from specrs.models.generic_loader import load_generic  # and transformers' models, which others do without

    model = load_generic(
        source,
        dtype=dtype,
        revision=revision,
        load_format=config.load_format,
        kv_cache_dtype=kv_cache_dtype,
        field=at + "kv_cache_dtype",
    )
    if config.model_impl == "auto":
        name = type(model.module).__name__
        logger.info("%s: specrs knows no %s: transformers' modules compute it, with our attention", source, name)
    return model


def _load_head(
    speculative: SpeculativeConfig, source: tuple[str, str | None], target: DenseFacts, ranks: Ranks | None
) -> Eagle3Facts:
    path, revision = source
    head = load_eagle3(
        path,
        target,
        aux_hidden_state_layer_ids=speculative.aux_hidden_state_layer_ids,
        rope_theta=speculative.rope_theta,
        revision=revision,
        cache_dtype=target.cache_dtype,
        ranks=ranks,
    )
    ids = list(head.aux_layer_ids)
    logger.info("%s reads hidden states where they enter layers %s of the target, counted from 0", path, ids)
    return head


def _check_int4(field: str, source: str, model: ModelConfig) -> None:
    """Raises UnsupportedConfigError for a model whose inputs make no groups."""
    smallest = INT4_GROUPS[-1]
    experts = [] if model.experts is None else [("an expert's intermediate size", model.experts.intermediate_size)]
    dense = model.experts is None or not all(model.experts.layers)
    for name, size in (
        ("hidden_size", model.hidden_size),
        *([("intermediate_size", model.intermediate_size)] if dense else []),
        *experts,
        ("num_attention_heads * head_dim", model.num_heads * model.head_dim),
    ):
        if size % smallest:
            reason = f"{source} has {name} = {size}, groups need a multiple of {smallest}; allowed: None or 'int8'"
            raise invalid(UnsupportedConfigError, field, "int4", reason)


def _draft_source(config: EngineConfig) -> tuple[str, str | None] | None:
    """Folder or hub id of the draft and its revision; None where the engine never speculates."""
    speculative, draft = config.speculative_config, config.draft
    if speculative is None or draft is None or speculative.most_speculative_tokens == 0:
        return None
    return draft, speculative.revision


def check_formats(config: EngineConfig, device: str) -> None:
    """Raises UnsupportedConfigError for a checkpoint of weights that the device does not read."""
    draft, speculative = _draft_source(config), config.speculative_config
    args = {"load_format": config.load_format}
    resolve_quantization(
        "quantization", config.quantization, config.target, config.revision, device_type(device), **args
    )
    if draft is not None and speculative is not None and not speculative.reads_hidden:
        with about(*OF_DRAFT):
            quantization = speculative.quantization
            resolve_quantization("speculative_config.quantization", quantization, *draft, device_type(device), **args)


def check_weights_fit(config: EngineConfig, device: str, ranks: Ranks | None = None) -> None:
    """Raises InvalidConfigError if the GPU's free memory does not hold the weights, of several `ranks` this one's.

    Reads configurations, and of models with tied embeddings whether the files hold an LM head that differs.
    """
    sizes, draft, speculative = {}, _draft_source(config), config.speculative_config
    sources = [("model", config.target, config.revision, config.quantization)]
    parts = {"model": ranks, "speculative_config.model": _of_draft(config, ranks)}
    if draft is not None and speculative is not None and speculative.reads_hidden:
        with about(*OF_DRAFT):
            files = resolve_folder(*draft).glob("*.safetensors")
        sizes["speculative_config.model"] = sum(file.stat().st_size for file in files)
    elif draft is not None:
        assert speculative is not None
        sources.append(("speculative_config.model", *draft, speculative.quantization))
    import torch

    dtype: np.dtype[Any] | None = None
    for field, source, revision, quantization in sources:
        with about(*(OF_TARGET if field == "model" else OF_DRAFT)):
            model = stored_config(source, revision=revision, load_format=config.load_format)
        dtype = resolve_dtype(config.dtype, model, "cuda") if dtype is None else dtype
        own = parts[field]
        shapes = tensor_shapes(model) if own is None else Shard(own.rank, own.size).tensor_shapes(model)
        sizes[field] = sum(map(math.prod, shapes.values())) * dtype.itemsize
        for name, bits in _coded_bits(source, revision, model, quantization, config.load_format).items():
            sizes[field] -= math.prod(shapes[name]) * (8 * dtype.itemsize - bits) // 8
    free, needed = torch.cuda.mem_get_info(device)[0], sum(sizes.values())
    if needed > free:
        told = " and ".join(f"{size / 2**30:.2f} GiB for {field}" for field, size in sizes.items())
        raise invalid(
            InvalidConfigError,
            "model",
            config.target,
            f"weights need {told}, {free / 2**30:.2f} GiB of the GPU are free, {(needed - free) / 2**30:.2f} GiB too "
            "little; allowed are smaller models, a dtype of fewer bytes, or device='cpu'",
        )


def _coded_bits(
    source: str, revision: str | None, model: ModelConfig, quantization: str | None, load_format: str
) -> dict[str, int]:
    """Bits of the weights that stay codes on a GPU, by name. Reads no tensor; raises as the loader for a checkpoint
    whose tensors are not what its config.json makes them."""
    if load_format == "dummy":
        return {}
    made = method_of(source, revision) is None
    if made and quantization is None:
        return {}
    # Those of experts become numbers.
    projections = [name for name in tensor_shapes(model) if name.endswith("_proj.weight") and ".experts." not in name]
    if made:
        assert quantization is not None
        sizes = {name: shape[1] for name, shape in tensor_shapes(model).items() if name in projections}
        made_bits = {name: bits_at_load(quantization, size) for name, size in sizes.items()}
        return {name: bits for name, bits in made_bits.items() if bits is not None}
    checkpoint = open_checkpoint(source, revision, load_format)[1]
    assert isinstance(checkpoint, QuantizedTensors)
    checkpoint.check(tensor_shapes(model), {LM_HEAD: (model.vocab_size, model.hidden_size)})
    found = {name: checkpoint.coded_bits(name) for name in projections if checkpoint.is_quantized(name)}
    return {name: bits for name, bits in found.items() if bits is not None}

"""The weights that an engine serves: loads target and draft, and checks that they fit. Builds nothing else."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from specrs.config import EngineConfig
from specrs.drafters.vocabulary import SharedVocabulary
from specrs.engine.device import resolve_device
from specrs.errors import InvalidConfigError, TokenizerMismatchError, UnsupportedConfigError, invalid
from specrs.models.base import Model
from specrs.models.config import MASK_TOKEN_FIELDS, ModelConfig
from specrs.models.eagle3 import load_eagle3
from specrs.models.eagle3_head import Eagle3Head
from specrs.models.loader import load_config, load_model, resolve_dtype
from specrs.models.native_loader import INT4_GROUPS, load_native
from specrs.speculative_config import SpeculativeConfig
from specrs.tokenizer import Tokenizer, shared_ids, unknown_id

logger = logging.getLogger("specrs")
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
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
    head: Eagle3Head | None = None


def load_weights(config: EngineConfig) -> Weights:
    """Load target and, where the engine may speculate, draft, onto the device of `config`.

    Raises:
        InvalidConfigError and its subclasses: what is missing, broken or not supported, by name.
    """
    device = resolve_device(config.device)
    speculative = config.speculative_config
    if device.type == "cuda" and speculative is not None and speculative.reads_hidden:
        reason = f"not implemented on device={str(device)!r}; allowed: a method of another kind, or device='cpu'"
        raise invalid(UnsupportedConfigError, "speculative_config.method", speculative.method, reason)
    config.check_quantization_serves(device.type, config.dtype)
    if device.type == "cuda":
        check_weights_fit(config, device)
    target = _load(config, config.target, config.revision, config.dtype, device, config.quantization)
    draft = _draft_source(config)
    if speculative is None or draft is None:
        return Weights(target, None)
    if speculative.reads_hidden:
        return Weights(target, None, head=_load_head(speculative, draft, target))
    dtype = str(target.dtype).removeprefix("torch.")
    field = "speculative_config.quantization"
    mask = _mask_token_id(*draft, device) if speculative.parallel_drafting else None
    model = _load(config, *draft, dtype, device, speculative.quantization, field)
    shared = _shared(config, *draft, target, model) if speculative.use_heterogeneous_vocab else None
    return Weights(target, model, mask, shared)


def _shared(config: EngineConfig, draft: str, revision: str | None, target: Model, model: Model) -> SharedVocabulary:
    """Raises TokenizerMismatchError if nothing is shared, UnsupportedConfigError for a device that cannot."""
    if target.device.type == "cuda":
        field, reason = "speculative_config.use_heterogeneous_vocab", "not implemented on device='cuda'; allowed: False"
        raise invalid(UnsupportedConfigError, field, True, reason)
    own = config.tokenizer_revision or (None if config.tokenizer else config.revision)
    ours, theirs = Tokenizer(config.tokenizer or config.target, own), Tokenizer(draft, revision)
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
    return SharedVocabulary.of(pairs, unknown, sizes[0], target.device)


def _mask_token_id(draft: str, revision: str | None, device: torch.device) -> int:
    """Raises InvalidConfigError for a draft that has none, UnsupportedConfigError for a device that cannot."""
    if device.type == "cuda":
        field, reason = "speculative_config.parallel_drafting", "not implemented on device='cuda'; allowed: False"
        raise invalid(UnsupportedConfigError, field, True, reason)
    mask = load_config(draft, revision=revision).mask_token_id
    if mask is None:
        reason = f"has no mask token in config.json, which parallel_drafting needs ({', '.join(MASK_TOKEN_FIELDS)})"
        raise invalid(InvalidConfigError, "speculative_config.model", draft, reason)
    return mask


def _load(
    config: EngineConfig,
    source: str,
    revision: str | None,
    dtype: str,
    device: torch.device,
    quantization: str | None,
    field: str = "quantization",
) -> Model:
    """`field` is that of `quantization`."""
    if device.type == "cpu" and not config.enforce_eager:
        model = load_config(source, revision=revision)
        resolved = resolve_dtype(dtype, model, device)
        config.check_quantization_serves(device.type, str(resolved).removeprefix("torch."))
        if resolved in NATIVE_DTYPES:
            if quantization == "int4":
                _check_int4(field, source, model)
            return load_native(
                source, dtype=resolved, revision=revision, load_format=config.load_format, quantization=quantization
            )
        logger.info("%s: %s is served op by op, the native pass computes float32 and bfloat16", source, resolved)
    return load_model(source, dtype=dtype, device=device, revision=revision, load_format=config.load_format)


def _load_head(speculative: SpeculativeConfig, source: tuple[str, str | None], target: Model) -> Eagle3Head:
    path, revision = source
    head = load_eagle3(
        path,
        target,
        dtype=target.dtype,
        aux_hidden_state_layer_ids=speculative.aux_hidden_state_layer_ids,
        rope_theta=speculative.rope_theta,
        revision=revision,
    )
    ids = list(head.aux_layer_ids)
    logger.info("%s reads hidden states where they enter layers %s of the target, counted from 0", path, ids)
    return head


def _check_int4(field: str, source: str, model: ModelConfig) -> None:
    """Raises UnsupportedConfigError for a model whose inputs make no groups."""
    smallest = INT4_GROUPS[-1]
    for name, size in (
        ("hidden_size", model.hidden_size),
        ("intermediate_size", model.intermediate_size),
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


def check_weights_fit(config: EngineConfig, device: torch.device) -> None:
    """Raises InvalidConfigError if the GPU's free memory does not hold the weights; reads configurations only."""
    sizes, draft = {}, _draft_source(config)
    sources = [("model", config.target, config.revision)]
    if draft is not None:
        sources.append(("speculative_config.model", *draft))
    dtype: torch.dtype | None = None
    for field, source, revision in sources:
        model = load_config(source, revision=revision)
        dtype = resolve_dtype(config.dtype, model, device) if dtype is None else dtype
        untied = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
        sizes[field] = (model.num_parameters + untied) * dtype.itemsize
    free, needed = torch.cuda.mem_get_info(device)[0], sum(sizes.values())
    if needed > free:
        parts = " and ".join(f"{size / 2**30:.2f} GiB for {field}" for field, size in sizes.items())
        raise invalid(
            InvalidConfigError,
            "model",
            config.target,
            f"weights need {parts}, {free / 2**30:.2f} GiB of the GPU are free, {(needed - free) / 2**30:.2f} GiB too "
            "little; allowed are smaller models, a dtype of fewer bytes, or device='cpu'",
        )

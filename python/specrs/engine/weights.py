"""Loads the weights of target and drafter, and checks that they fit together. Builds nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from specrs.backends.model_source import ModelSource, draft_ranks, draft_source, drafts_by_model
from specrs.backends.table import backend_of, device_of_rank, resolve_device
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.drafters.base import Loading
from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.errors import OF_DRAFT, OF_TARGET, about
from specrs.models.loader import is_known_family, load_config
from specrs.models.shards import Shard, check_divides
from specrs.parallel.start import own_place

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks


def load_weights(config: EngineConfig, ranks: Ranks | None = None) -> Weights:
    """Load the target of `config` and, if the engine may speculate, its drafter, onto the device of `config`.

    With `ranks`, load this rank's part of the target, and its part or all of the drafter.

    Raises:
        InvalidConfigError: a file or setting is missing, broken or not supported; often a subclass of this error.
    """
    device = resolve_device(config.device) if ranks is None else str(ranks.device)
    backend = backend_of(device)
    config.check_device(device, config.dtype)
    backend.check_config(config, device, ranks)
    source, draft, speculative = ModelSource.of_target(config), draft_source(config), config.speculative_config
    if config.enable_lora and source.is_generic:
        reason = f"not implemented with model_impl='transformers', which {config.target} needs; allowed: False"
        raise invalid(UnsupportedConfigError, "enable_lora", True, reason)
    method = None if speculative is None or draft is None else speculative.model_method
    if draft is not None and method is not None and method.check is not None and not source.is_generic:
        with about(*OF_TARGET):
            model = load_config(config.target, revision=config.revision)
        with about(*OF_DRAFT):
            method.check(*draft, model)
    target = backend.load_model(source, device, ranks)
    if draft is None or method is None:
        return Weights(target)
    own = draft_ranks(config, ranks)
    path, revision = draft
    tokenizer_revision = config.tokenizer_revision or (None if config.tokenizer else config.revision)
    loading = Loading(
        path=path,
        revision=revision,
        options=speculative,
        target=target,
        target_tokenizer=(config.tokenizer or config.target, tokenizer_revision),
        generic_target=source.is_generic,
        drafts_text=config.rule == "coupled" and backend.drafts_text,
        load_model=lambda: backend.load_model(ModelSource.of_draft(config, str(target.dtype)), device, own),
        load_head=lambda files: backend.load_head(files, cast("DecoderFacts", target), own),
    )
    return Weights(target, method.load(loading))


def check_ranks(config: EngineConfig) -> ModelConfig:
    """Return the configuration of a rank's part of the target. Reads configurations only.

    Raises UnsupportedConfigError for models that the ranks of `config` cannot split.
    """
    draft, speculative = draft_source(config), config.speculative_config
    in_parts = speculative is not None and speculative.draft_tensor_parallel_size > 1 and drafts_by_model(config)
    device = device_of_rank(config.device, config.tensor_parallel_size, own_place(config.tensor_parallel_size))
    config.check_device(device, config.dtype)
    sources = [("tensor_parallel_size", config.target, config.revision)]
    if draft is not None and in_parts:
        sources.append(("speculative_config.draft_tensor_parallel_size", *draft))
    parts = []
    for field, source, revision in sources:
        with about(*(OF_TARGET if field == "tensor_parallel_size" else OF_DRAFT)):
            _check_ours(config, source, revision)
            model = load_config(source, revision=revision)
        check_divides(model, source, field, config.tensor_parallel_size)
        backend_of(device).check_rank_parts(model, field, config.tensor_parallel_size)
        parts.append(Shard(0, config.tensor_parallel_size).of_config(model))
    return parts[0]


def _check_ours(config: EngineConfig, source: str, revision: str | None) -> None:
    """Raise UnsupportedConfigError if the model at `source` runs through transformers' modules, which ranks cannot
    split."""
    if config.model_impl == "auto" and not is_known_family(source, revision=revision):
        reason = f"not implemented with model_impl='transformers', which {source} needs; allowed: 1"
        raise invalid(UnsupportedConfigError, "tensor_parallel_size", config.tensor_parallel_size, reason)

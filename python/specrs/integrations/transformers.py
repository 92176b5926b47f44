"""specrs as the decoding loop of transformers' `generate`. Changes no model and registers nothing.

    from specrs.integrations import transformers as specrs_transformers

    model.generate(**inputs, custom_generate=specrs_transformers.generate, draft_model=draft, max_new_tokens=100)

The weights of `model` and `draft_model` are converted for specrs' own forward pass, and kept as long as the model
lives. Every call reads all of them once to detect changes (about 0.7 s per GB on one core, as long as a decode pass or
two). A model whose parameters have changed is converted again, with an empty prefix cache. Greedy text is that of
transformers, up to rounding.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from specrs.arrays import Array
from specrs.backends.table import backend_of
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.errors import EngineError, UnsupportedRequestError, invalid
from specrs.integrations.fingerprint import fingerprint
from specrs.integrations.hf_arguments import TokenStream, check_arguments, of_generate
from specrs.models.config import parse_config
from specrs.models.errors import unsupported, with_equal_layers, without_states
from specrs.models.registry import renamed
from specrs.models.torch_arrays import TORCH_DTYPES, to_numpy
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_tensors
from specrs.sampling import MAX_SPECULATIVE_TOKENS, SamplingParams
from specrs.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

_PROCESSORS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinLengthLogitsProcessor",
}
"""Logits processors that `generate` makes from settings that are read here. Any other processor is the user's own."""
_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "typical_p": (None, 1.0),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
"""Settings that are not supported, with the values at which they have no effect."""

_ids = itertools.count()


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_model: PreTrainedModel | None = None,
    num_speculative_tokens: int = 5,
    **model_kwargs: Any,
) -> Any:
    """Continue `input_ids` `[B, L]` int64; called by `model.generate(..., custom_generate=generate)`.

    Args:
        logits_processor: those that `generate` makes from its settings; any other processor is rejected.
        stopping_criteria: those that `generate` makes from its settings; any other is rejected.
        generation_config: max_length, min_new_tokens, eos_token_id, pad_token_id, do_sample with temperature, top_k,
            top_p, min_p, and repetition_penalty are read; settings that would change something else are rejected.
        draft_model: a model with the same tokenizer; None decodes without drafts.
        num_speculative_tokens: K, 0 to 16.
        model_kwargs: `attention_mask` `[B, L]`, whose zeros on the left are padding. A `streamer` gets each position's
            tokens as soon as they are there. Other arguments that would change the text are rejected.

    Returns:
        `[B, L + n]` int64 like transformers' own, padded after the end of a sequence; with return_dict_in_generate
        an output object that holds them. Sampling draws its seeds from torch's generator.

    Raises:
        UnsupportedRequestError, InvalidRequestError and other SpecrsError: what is not supported, by name.
    """
    _refuse(generation_config, logits_processor, stopping_criteria)
    check_arguments(input_ids, model_kwargs)
    streamer = model_kwargs.get("streamer") or of_generate("streamer")
    engine = _engine(model, draft_model, num_speculative_tokens)
    params = _params(generation_config, input_ids.shape[1])
    mask = model_kwargs.get("attention_mask")
    requests = []
    for row, ids in enumerate(input_ids):
        prompt = ids.tolist() if mask is None else ids[mask[row].bool()].tolist()
        seed = int(torch.randint(0, 2**62, ()).item()) if generation_config.do_sample else 0
        request = Request(next(_ids), prompt, params, num_speculative_tokens=engine.num_speculative_tokens, seed=seed)
        engine.add_request(request)
        requests.append(request)
    stream = TokenStream(streamer, requests, _pad_id(generation_config))
    while engine.has_unfinished():
        engine.step()
        stream.advance()
    for request in requests:
        if request.error is not None:
            raise EngineError(f"row {requests.index(request)}: {request.error}")
    stream.end()
    sequences = _padded(input_ids, [request.output_token_ids for request in requests], generation_config)
    if generation_config.return_dict_in_generate:
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=cast("torch.LongTensor", sequences))
    return sequences


def _refuse(config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> None:
    for field, values in _NEUTRAL.items():
        value = getattr(config, field, None)
        if value not in values:
            allowed = " or ".join(map(repr, values))
            raise invalid(UnsupportedRequestError, field, value, f"not implemented; allowed: {allowed}")
    for field, found, known in (
        ("logits_processor", processors, _PROCESSORS),
        ("stopping_criteria", criteria, _CRITERIA),
    ):
        for item in found:
            name = type(item).__name__
            if name not in known:
                allowed = ", ".join(sorted(known))
                raise invalid(UnsupportedRequestError, field, name, f"not implemented; allowed: {allowed}")


def _params(config: GenerationConfig, input_length: int) -> SamplingParams:
    eos = config.eos_token_id
    sampled: dict[str, Any] = {"temperature": 0.0}
    if config.do_sample:
        sampled = {
            "temperature": 1.0 if config.temperature is None else config.temperature,
            "top_k": config.top_k or 0,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "min_p": config.min_p or 0.0,
        }
    return SamplingParams(
        max_tokens=config.max_length - input_length,
        min_tokens=max(config.min_new_tokens or 0, (config.min_length or 0) - input_length, 0),
        stop_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
        ignore_eos=True,
        repetition_penalty=config.repetition_penalty or 1.0,
        detokenize=False,
        **sampled,
    )


def _pad_id(config: GenerationConfig) -> int:
    """Return the id that fills rows after their end: `pad_token_id`, else the first end id, else 0."""
    eos = config.eos_token_id
    return config.pad_token_id if config.pad_token_id is not None else eos if isinstance(eos, int) else (eos or [0])[0]


def _padded(input_ids: Tensor, outputs: list[list[int]], config: GenerationConfig) -> Tensor:
    width = max(map(len, outputs))
    new = torch.full((len(outputs), width), _pad_id(config), dtype=input_ids.dtype, device=input_ids.device)
    for row, tokens in enumerate(outputs):
        new[row, : len(tokens)] = torch.tensor(tokens, dtype=input_ids.dtype, device=input_ids.device)
    return torch.cat((input_ids, new), dim=1)


class _StateDict:
    """Tensors of a transformers model, with the interface of a `Checkpoint`, which reads those of a folder. They are
    named as in other families."""

    folder = "the transformers model"

    def __init__(self, model: PreTrainedModel) -> None:
        held = model.state_dict()
        names = renamed(Path(self.folder), {name: name for name in held}, [type(model).__name__])
        self._tensors: Mapping[str, Tensor] = {name: held[own] for name, own in names.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise EngineError for a model whose tensors are not those that its configuration implies."""
        for name, shape in required.items():
            found = tuple(self._tensors[name].shape) if name in self._tensors else None
            if found != shape:
                raise EngineError(f"{name}: shape {found} in the model, its configuration makes it {shape}")

    def read(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Return one tensor in the host's memory."""
        return to_numpy(self._tensors[name].detach().to("cpu", TORCH_DTYPES[dtype]))

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return one tensor, detached; it may share memory with the model."""
        return self._tensors[name].detach().to(device=device, dtype=dtype)


@dataclass
class _Kept:
    contents: tuple[object, ...]
    decoder: TorchDecoder


_decoders: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()
_engines: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], Engine]] = weakref.WeakKeyDictionary()


def _decoder(model: PreTrainedModel) -> TorchDecoder:
    # Neither addresses nor version counters tell: a write through `parameter.data` changes none of them.
    contents = fingerprint(model.parameters())
    kept = _decoders.get(model)
    if kept is None or kept.contents != contents:
        config = parse_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
        if config.experts is not None:
            raise unsupported("architectures", [config.architecture], "a model without experts")
        without_states(config, "for custom_generate")
        with_equal_layers(config, "for custom_generate")
        dtypes = backend_of(str(model.device)).dtypes
        kept = _Kept(contents, load_tensors(config, _StateDict(model), model.dtype, model.device, dtypes))
        _decoders[model] = kept
    return kept.decoder


def _engine(model: PreTrainedModel, draft_model: PreTrainedModel | None, num_speculative_tokens: int) -> Engine:
    k = num_speculative_tokens if draft_model is not None else 0
    if not 0 <= k <= MAX_SPECULATIVE_TOKENS:
        allowed = f"must be an integer from 0 to {MAX_SPECULATIVE_TOKENS}"
        raise invalid(UnsupportedRequestError, "num_speculative_tokens", k, allowed)
    target = _decoder(model)
    draft = None if draft_model is None or k == 0 else _decoder(draft_model)
    engines = _engines.setdefault(model, {})
    key = (id(draft), k)
    if key not in engines or engines[key].weights.target is not target:
        speculative = None if draft is None else SpeculativeConfig(num_speculative_tokens=k)
        config = EngineConfig(speculative_config=speculative, device=str(target.device), max_num_seqs=64)
        engines.clear()  # one KV pool a model
        drafter = None if draft is None else LoadedDraftModel(draft)
        engines[key] = build_engine(config, Weights(target, drafter))
    return engines[key]

"""Loader of models that transformers computes with our attention, from a folder or hub id.

Rejects what does not fit, with the reason. Before it returns a model, it feeds a short text with transformers'
attention and with ours, and compares the logits. So it also notices what no rule here foresees.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specrs.errors import CheckpointError, UnsupportedModelError, short
from specrs.models.checkpoint import Checkpoint, read_json, resolve_folder
from specrs.models.config import stop_ids
from specrs.models.errors import unsupported
from specrs.models.generic import ATTENTION, GenericFacts, GenericModel, LayerShape, Probe, attending, decoder_name
from specrs.models.inputs import PassInputs
from specrs.models.kv_dtypes import resolve_cache_dtype
from specrs.models.loader import named_dtype
from specrs.models.quantization.table import read_config
from specrs.models.torch_arrays import TORCH_DTYPES

logger = logging.getLogger("specrs")

PROBE = 12
"""Number of tokens in the text for comparing logits. Our attention gets it in two passes."""
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.02}
"""Largest allowed difference of logits, relative to their norm. Not tighter in float64, because transformers takes some
softmaxes in fp32 there too. In bfloat16, dense models of the tests differ by at most 0.0033, with 2 or 32 layers."""
TOLERANCE_WITH_EXPERTS = 0.25
"""`TOLERANCE` of models with experts in bfloat16. Rounding may send a row to other experts: gpt-oss with 32 random
layers differs by up to 0.23."""
_NO_CODE = "null, or architectures of transformers: no code of checkpoints is run"
_SCALINGS_BY_LENGTH = ("longrope",)
"""Kinds of RoPE whose frequencies change with the longest text of a batch."""


def load_generic(
    source: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    load_format: str = "auto",
    kv_cache_dtype: str = "auto",
    field: str = "kv_cache_dtype",
) -> GenericModel:
    """Load the causal model of a folder or hub id onto the CPU.

    `dtype` is float32, float64, bfloat16 or auto: float32, or float64 for a float64 checkpoint. With `load_format`
    `dummy`, transformers initialises the weights, the same way each time. `field` names the option of `kv_cache_dtype`
    in errors.

    Raises CheckpointError if a file is missing or wrong, or UnsupportedModelError with the reason why the model cannot
    be served.
    """
    folder = resolve_folder(source, revision, weights=load_format != "dummy")
    raw = read_config(folder)
    config = _config(folder, raw)
    name = _check_config(folder, raw, config)
    resolved = named_dtype(str(dtype).removeprefix("torch."), raw_dtype(raw))
    cache_dtype = resolve_cache_dtype(field, kv_cache_dtype, resolved)
    with _silent():
        module: PreTrainedModel = _load(folder, config, TORCH_DTYPES[resolved], load_format)
    generation = folder / "generation_config.json"
    text = config.get_text_config(decoder=True)
    vocab_size = int(text.vocab_size)
    stops = stop_ids(text.to_dict() | raw, read_json(generation) if generation.exists() else {}, vocab_size)
    try:
        model = _adapted(module, int(text.max_position_embeddings), stops, vocab_size)
    except UnsupportedModelError as fault:
        raise _refused(folder, name, str(fault)) from None
    model.cache_dtype = cache_dtype
    return model


def raw_dtype(raw: dict[str, Any]) -> str | None:
    """Return the `dtype` of a config.json, or of the text model in it. None: it names none."""
    inner = raw.get("text_config")
    for place in (raw, inner if isinstance(inner, dict) else {}):
        for field in ("dtype", "torch_dtype"):
            if isinstance(place.get(field), str):
                return str(place[field]).removeprefix("torch.")
    return None


def _refused(folder: Path, name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{folder}: {name} does not run with model_impl='transformers': {reason}")


def _config(folder: Path, raw: dict[str, Any]) -> PreTrainedConfig:
    if raw.get("auto_map") and raw.get("model_type") not in CONFIG_MAPPING:
        raise unsupported("auto_map", raw["auto_map"], _NO_CODE)
    if raw.get("transformers_weights") is not None:
        raise unsupported("transformers_weights", raw["transformers_weights"], "null: model.safetensors or its index")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as fault:
        reason = f"transformers {transformers.__version__} does not read it ({type(fault).__name__}: {short(fault)})"
        raise CheckpointError(f"{folder}/config.json: {reason}") from fault
    # A file may not choose which kernels are loaded, nor from where.
    config._attn_implementation = config._experts_implementation = None
    return config


def _check_config(folder: Path, raw: dict[str, Any], config: PreTrainedConfig) -> str:
    """Return the name of the model's class. Raises UnsupportedModelError for a model that cannot be served, as far as
    its configuration shows."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if isinstance(name, list | tuple):
        name = next((n for n in name if n in (raw.get("architectures") or ())), name[0])
    if name is None:
        raise unsupported("model_type", config.model_type, "a causal language model of transformers")
    if raw.get("auto_map") and name not in (raw.get("architectures") or ()):
        raise unsupported("auto_map", raw["auto_map"], _NO_CODE)
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise unsupported("is_encoder_decoder", True, "false")
    if raw.get("quantization_config") is not None:
        allowed = "null with model_impl='transformers'"
        raise unsupported("quantization_config", raw["quantization_config"], allowed)
    reason = _unfit(getattr(transformers, str(name)))
    if reason is not None:
        raise _refused(folder, str(name), reason)
    if type(getattr(text, "max_position_embeddings", None)) is not int:
        raise _refused(folder, name, "its configuration has no max_position_embeddings")
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            reason = f"layer_types has {kind!r}, and only layers of attention are implemented"
            raise _refused(folder, name, reason)
    rope = getattr(text, "rope_parameters", None) or {}
    for found in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        original = found.get("original_max_position_embeddings") or text.max_position_embeddings
        if found.get("rope_type") in _SCALINGS_BY_LENGTH and original < text.max_position_embeddings:
            allowed = "with model_impl='transformers', one whose frequencies do not change with the length of a batch"
            raise unsupported("rope_parameters.rope_type", found["rope_type"], allowed)
    # Attention computes these factors from the length of a cache, and does not know the positions of rows.
    length = getattr(text, "floor_scale", None)
    if getattr(text, "attn_temperature_tuning", None) and length is not None and length <= text.max_position_embeddings:
        allowed = f"with model_impl='transformers', false; set model_impl='auto', or max_position_embeddings < {length}"
        raise unsupported("attn_temperature_tuning", text.attn_temperature_tuning, allowed)
    return str(name)


def _load(folder: Path, config: PreTrainedConfig, dtype: torch.dtype, load_format: str) -> Any:
    """Return the model as transformers loads it. Raises CheckpointError if weights are missing or have other shapes."""
    auto: Any = AutoModelForCausalLM
    if load_format == "dummy":
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return auto.from_config(config, dtype=dtype).eval()
    placement = Checkpoint(folder).placement  # names what is wrong with its files
    copied = placement.stale | placement.ambiguous.keys()
    if copied:
        reason = f"{min(copied)} is in several of its files, and transformers does not go by the index"
        raise CheckpointError(f"{folder}: {reason}; remove the copies that the index does not name")
    try:
        model, info = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as fault:
        raise CheckpointError(f"{folder}: transformers could not load it: {type(fault).__name__}: {fault}") from fault
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            some = ", ".join(sorted(map(str, info[kind]))[:3])
            what = "missing" if kind == "missing_keys" else "of another shape than config.json makes them"
            raise CheckpointError(f"{folder}: {some} (of {len(info[kind])}) are {what}")
    return model.eval()


def _adapted(module: PreTrainedModel, positions: int, stops: tuple[int, ...], vocab_size: int) -> GenericModel:
    """Replace the module's attention by specrs' own, and compare the logits of both. Raises UnsupportedModelError if
    the model cannot be served; its message is only the reason, without the name of the model."""
    decoder: Any = module._modules[decoder_name(module)]
    if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        raise UnsupportedModelError("it takes no position_ids")
    if module.dtype == torch.float64 and module._can_set_experts_implementation():
        module.set_experts_implementation("eager")  # torch's grouped product has no float64
    ids = torch.arange(1, min(PROBE, positions) + 1) * 7 % vocab_size
    with torch.inference_mode(), _silent():
        expected = module(input_ids=ids.unsqueeze(0), use_cache=False, return_dict=True).logits[0]
        module.set_attn_implementation(ATTENTION)
        try:
            model = GenericModel(module, GenericFacts(_shapes(decoder), positions, stops, vocab_size))
            found = _fed(model, ids)
        except UnsupportedModelError:
            raise
        except Exception as fault:
            raise UnsupportedModelError(
                f"with its attention replaced it fails ({type(fault).__name__}: {short(str(fault))})"
            ) from fault
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    routes = module.dtype == torch.bfloat16 and any("experts" in name for name, _ in module.named_modules())
    if not error <= (TOLERANCE_WITH_EXPERTS if routes else TOLERANCE[module.dtype]):
        raise UnsupportedModelError(f"with its attention replaced its logits differ, by {error:.2g} of their norm")
    return model


def _unfit(kind: type[PreTrainedModel]) -> str | None:
    """Return the reason why the class `kind` cannot be served, as far as its code shows; None if there is none."""
    if getattr(kind, "_is_stateful", False):
        return "it has recurrent layers, whose state takes no drafts back"
    if not kind._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface"
    file = sys.modules[kind.__module__]
    own = [name for name, item in vars(file).items() if _is_own_cache(item, kind.__module__)]
    return f"it has a cache of its own, {own[0]}" if own else None


def _is_own_cache(item: object, file: str) -> bool:
    return isinstance(item, type) and item.__module__ == file and issubclass(item, Cache)


def _shapes(decoder: Any) -> tuple[LayerShape, ...]:
    probe = Probe()
    with attending(probe):
        decoder(
            input_ids=torch.zeros((1, 1), dtype=torch.int64),
            position_ids=torch.zeros((1, 1), dtype=torch.int64),
            use_cache=False,
            return_dict=True,
        )
    if not probe.shapes:
        raise UnsupportedModelError("no layer of it attends through transformers' AttentionInterface")
    return tuple(probe.shapes)


def _fed(model: GenericModel, ids: Tensor) -> Tensor:
    """Return the logits of `ids`, computed in two passes over blocks in reverse order."""
    block_size, n = 4, len(ids)
    blocks = -(-n // block_size)
    cache = model.allocate_cache(blocks, block_size)
    table = torch.arange(blocks - 1, -1, -1).unsqueeze(0)
    found = []
    for start, end in ((0, n // 2), (n // 2, n)):
        at = torch.arange(start, end)
        inputs = PassInputs(
            input_ids=ids[start:end],
            positions=at,
            slots=table[0, at // block_size] * block_size + at % block_size,
            q_start=torch.tensor([0, end - start]),
            block_table=table,
            max_q_len=end - start,
            max_context=n,
        )
        found.append(model.compute_logits(model.forward(inputs, cache).final))
    return torch.cat(found)


@contextmanager
def _silent() -> Iterator[None]:
    """Silence transformers' progress bars, and its warnings about things that this module checks itself."""
    log: Any = transformers.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()

"""Speculative decoding with draft models, as production software. Importing this package does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrs.async_llm import AsyncLLM
    from specrs.config import EngineConfig
    from specrs.errors import (
        CheckpointError,
        EngineDeadError,
        EngineError,
        InvalidConfigError,
        InvalidRequestError,
        QueueFullError,
        SpecrsError,
        TokenizerMismatchError,
        UnsupportedConfigError,
        UnsupportedRequestError,
    )
    from specrs.llm import LLM
    from specrs.lora_request import LoRARequest
    from specrs.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        EngineStats,
        Logprob,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
        token_counts,
    )
    from specrs.pooling import PoolingParams
    from specrs.sampling import RequestOutputKind, SamplingParams
    from specrs.speculative_config import SpeculativeConfig
    from specrs.structured.params import StructuredOutputsParams

    __version__: str

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "LoRARequest": "lora_request",
    "RequestOutputKind": "sampling",
    "SamplingParams": "sampling",
    "StructuredOutputsParams": "structured.params",
    "EngineConfig": "config",
    "SpeculativeConfig": "speculative_config",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "EngineStats": "outputs",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "ScoringOutput": "outputs",
    "ScoringRequestOutput": "outputs",
    "token_counts": "outputs",
    "PoolingParams": "pooling",
    "CheckpointError": "errors",
    "EngineDeadError": "errors",
    "EngineError": "errors",
    "InvalidConfigError": "errors",
    "InvalidRequestError": "errors",
    "QueueFullError": "errors",
    "SpecrsError": "errors",
    "TokenizerMismatchError": "errors",
    "UnsupportedConfigError": "errors",
    "UnsupportedRequestError": "errors",
}
"""For each public name, the module that has it. A module is imported when one of its names is first used."""

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "InvalidConfigError",
    "InvalidRequestError",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SpecrsError",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "TokenizerMismatchError",
    "UnsupportedConfigError",
    "UnsupportedRequestError",
    "__version__",
    "token_counts",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("specrs")
    elif name in _HOME:
        value = getattr(import_module(f"specrs.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'specrs' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

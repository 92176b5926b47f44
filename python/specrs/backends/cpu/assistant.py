"""Loader of Gemma 4's assistants for native passes on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from specrs.arrays import Array
from specrs.backends.cpu.weights import NativeReader, head_matrix
from specrs.drafters.assistant.native import NativeAssistant
from specrs.drafters.assistant.reader import AssistantFiles, AssistantReader
from specrs.drafters.method import WHERE
from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.native_decoder import NativeDecoder, rows_of
from specrs.models.stored import NativeWeight, StackedWeight


def load_assistant(files: AssistantFiles, target: DecoderFacts) -> NativeAssistant:
    """Load an assistant in the dtype of `target`.

    Raises UnsupportedConfigError for a target that torch computes, and CheckpointError for tensors that are missing,
    unknown or misshapen, before the first is read.
    """
    if not isinstance(target, NativeDecoder):
        reason = "with a model it is not implemented for a target that torch computes; use dtype='float32' or " + (
            "'bfloat16', enforce_eager=False and tensor_parallel_size=1"
        )
        raise invalid(UnsupportedConfigError, WHERE + "method", "mtp", reason)
    return NativeAssistant(NativeAssistantReader(files, target).load(target.cache_dtype))


class NativeAssistantReader(NativeReader, AssistantReader[Array, NativeWeight, np.dtype[Any]]):
    """Reads an assistant's tensors for native passes. Matrices stay mapped if they are bf16; norms become float32."""

    def __init__(self, files: AssistantFiles, target: NativeDecoder) -> None:
        self.checkpoint = files.tensors
        self.files, self.target = files, target

    def matrix(self, name: str) -> Array:
        """Return the matrix `name`: in place if it is bf16, else converted to the target's dtype."""
        return head_matrix(self.files.tensors.mapped(name), self.target.dtype)

    def lm_head(self, name: str, ids: Array, *, first: bool) -> NativeWeight:
        """Return the LM head, the tensor `name`: all of it if `ids` are its first rows, else a copy of the rows
        `ids`."""
        whole = StackedWeight((self.matrix(name),))
        return whole if first else rows_of(whole, ids)

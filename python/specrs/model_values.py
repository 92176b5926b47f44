"""Values of options that a target and a draft model share: where the model is, and how it is stored in memory."""

from __future__ import annotations

from specrs.options import Choice, Text

DEFAULT_CPU_KV_CACHE_BYTES = 4 << 30
"""Default size of the KV cache on a CPU in bytes. The pool is mapped lazily, so unused blocks cost no memory."""
DEFAULT_MAX_NUM_SEQS = 256
"""Default of `max_num_seqs`."""
DEFAULT_DISK_CACHE_BYTES = 16 << 30
"""Default of `kv_cache_disk_bytes`, the size of a prefix cache on disk."""
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
INTEGERS_AT_LOAD = ("int8", "int4", "q8_0", "q4_0", "q4_k")
"""Types of integers that 16-bit and 32-bit weights can be quantized to while they load."""
AT_LOAD = ("fp8", *INTEGERS_AT_LOAD)
"""Quantization methods that can also quantize 16-bit and 32-bit weights while they load. `models.quantization.table`
repeats them, because models do not import settings; a test compares the two."""
QUANTIZATIONS = (*AT_LOAD, "compressed-tensors", "gptq", "awq", "mxfp4", "gguf")
MODEL_PATH = Text("a folder or a hub id")
QUANTIZATION = Choice(QUANTIZATIONS, unsupported=True)
CACHE_DTYPE = Choice(KV_CACHE_DTYPES, {"fp8": "fp8_e4m3"}, unsupported=True)

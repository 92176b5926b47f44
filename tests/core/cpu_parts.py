"""Small parts of the native pass, of numpy arrays. Holds no tests."""

from __future__ import annotations

import numpy as np
from specrs import core

VOCAB, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 11, 8, 12, 2, 1, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
}


def arrays(seed: int = 0) -> dict[str, object]:
    """Return the arrays that `CpuWeights` takes besides sizes: one layer of random numbers."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    layer = {
        "input_norm": matrix(HIDDEN),
        "qkv": [(matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), None)],
        "q_norm": matrix(HEAD_DIM),
        "k_norm": matrix(HEAD_DIM),
        "o": [(matrix(HIDDEN, HEADS * HEAD_DIM), matrix(HIDDEN))],
        "post_attention_norm": matrix(HIDDEN),
        "gate_up": [(matrix(INTERMEDIATE, HIDDEN), None), (matrix(INTERMEDIATE, HIDDEN), None)],
        "down": [(matrix(HIDDEN, INTERMEDIATE), None)],
    }
    return {
        "embedding": matrix(VOCAB, HIDDEN),
        "layers": [layer],
        "final_norm": matrix(HIDDEN),
        "lm_head": [(matrix(VOCAB, HIDDEN), None)],
        "frequencies": np.array([1.0, 0.01], np.float32),
    }


def weights(**others: object) -> core.CpuWeights:
    """Return weights of `arrays()`, with some arrays replaced by `others`."""
    return core.CpuWeights(**(SIZES | arrays() | others))  # type: ignore[arg-type]


def kv_layers(num_blocks: int = 4, block_size: int = 4, count: int = 1) -> list[np.ndarray]:
    """Return layers of a KV cache."""
    return [np.zeros((num_blocks + 1, 2, KV_HEADS, block_size, HEAD_DIM), np.float32) for _ in range(count)]


def scheduler(**fields: object) -> core.Scheduler:
    """Return a scheduler for one request of at most 8 tokens, with 4 blocks of 4 tokens. `fields` replace or add
    settings. The scheduler holds no row state: `state()` makes arrays that fit the default sizes."""
    settings = {"max_num_seqs": 1, "max_model_len": 8, "num_blocks": 4, "block_size": 4, "max_num_batched_tokens": 4}
    return core.Scheduler(**(settings | fields))  # type: ignore[arg-type]


def state() -> dict[str, np.ndarray]:
    """Return row state for one row and the reserved one, with 8 positions in 2 blocks."""
    ones = ("num_tokens", "draft_len", "draft_start", "limit", "min_len", "prompt_len", "seeds")
    shapes = {"tokens": 9, "block_table": 2, "stop_ids": core.MAX_STOP_IDS}
    made: dict[str, np.ndarray] = {name: np.zeros(2, np.int64) for name in ones}
    made |= {name: np.zeros((2, width), np.int64) for name, width in shapes.items()}
    made["active"] = np.zeros(2, np.bool_)
    made["params"] = np.zeros((2, len(core.PARAM_COLUMNS)), np.float32)
    return made


def model(pool: core.CpuPool | None = None) -> tuple[core.CpuDecoder, core.CpuKVCache]:
    """Return a decoder and its KV cache."""
    return core.CpuDecoder(weights(), pool or core.CpuPool(1)), core.CpuKVCache(kv_layers())

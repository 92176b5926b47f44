"""Logits of every family against transformers, however the tokens are fed."""

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, LLAMA3_ROPE, LONG_ROPE, YARN_ROPE, edit_json, make_checkpoint
from hf_reference import load
from specrs.backends.cpu.weights import load_native
from specrs.core import CpuPool, InvalidBufferError
from specrs.kernels.rms_norm import rms_norm
from specrs.models.torch_arrays import to_torch
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from models.harness import Feeder

VOCAB = 211
LENGTH = 75
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.6}
"""Absolute tolerance by dtype. The logits of these models have a standard deviation of 2."""

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
LONG_ROPE_OF_12 = LONG_ROPE | {field: LONG_ROPE[field][:6] for field in ("short_factor", "long_factor")}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "untied": ("qwen3", {"tie": False}),
    "one KV head": ("qwen3", {"kv_heads": 1, "group": 5}),
    "as many KV heads": ("llama", {"kv_heads": 4, "group": 1, "head_dim": 20, "hidden": 64}),
    "attention bias": ("qwen3", {"attention_bias": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie": False}),
    "llama3 RoPE": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear RoPE": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "dynamic RoPE": ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}}),
    "yarn RoPE": ("qwen3", {"rope_parameters": YARN_ROPE}),
    "yarn RoPE, not truncated": ("mistral", {"rope_parameters": YARN_ROPE | {"truncate": False, "beta_fast": 8.0}}),
    "yarn RoPE with weights": ("llama", {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 2.0}}),
    "yarn RoPE with a weight of 0": ("llama", {"rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.0}}),
    "long RoPE": ("llama", {"rope_parameters": LONG_ROPE}),
    "windows": ("mistral", {"sliding_window": 9}),
    "growing queries and windows": ("ministral3", {"sliding_window": 9, "tie": False}),
    "part of a head rotated": ("phi3", {"head_dim": 16, "sliding_window": 9, "rope_parameters": PARTIAL_ROPE}),
    "long RoPE of a part": ("phi3", {"head_dim": 16, "rope_parameters": PARTIAL_ROPE | LONG_ROPE_OF_12}),
    "long RoPE of a part, no window": (
        "phi3",
        {"head_dim": 16, "rope_parameters": PARTIAL_ROPE | LONG_ROPE_OF_12, "tie": False},
    ),
    "multipliers and biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie": False}),
    "windows without RoPE": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "no_rope_layers": [0, 1, 0],
            "layers": 3,
            "mlp_bias": True,
        },
    ),
    "plain layers and experts": (
        "qwen3_moe",
        {"layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False, "tie": False},
    ),
    "experts and windows": ("mixtral", {"sliding_window": 9, "num_experts_per_tok": 1}),
    "gpt-oss, no biases of attention": (
        "gpt_oss",
        {"rope_parameters": YARN_ROPE | {"truncate": False}, "layers": 3, "attention_bias": False, "tie": False},
    ),
    "no norm before": ("olmo2", {"kv_heads": 2, "group": 1, "attention_bias": True, "tie": False}),
    "every fourth layer full": ("olmo3", {"layers": 5, "rope_parameters": YARN_ROPE, "tie": False}),
    "bias of the output alone": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "every third layer full": (
        "gemma3_text",
        {"layers": 4, "sliding_window_pattern": 3, "attention_bias": True, "rope_parameters": LINEAR_ROPE},
    ),
    "windows of later layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "layers": 3},
    ),
    "windows by name": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "large theta": ("mistral", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "large eps": ("qwen2", {"rms_norm_eps": 0.3}),
    "sharded": ("qwen3", {"max_shard_size": "100KB", "tie": False}),
    "bf16 file": ("llama", {"dtype": torch.bfloat16}),
    "layers": ("qwen3", {"layers": 4, "head_dim": 2, "hidden": 34, "intermediate": 33}),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def make(folder: Path, name: str) -> Path:
    family, fields = VARIANTS[name]
    return make_checkpoint(folder / name.replace(" ", "_"), family, vocab=VOCAB, seed=4, **fields)


@functools.cache
def model(folder: Path, name: str, dtype: torch.dtype) -> TorchDecoder:
    return load_model(make(folder, name), dtype=dtype)


def tokens(length: int = LENGTH, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@functools.cache
def expected(folder: Path, name: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return logits `[LENGTH, vocab]` of transformers for `tokens(LENGTH, seed)`."""
    with torch.inference_mode():
        logits: Tensor = load(make(folder, name), dtype)(torch.tensor([tokens(LENGTH, seed)])).logits[0]
    return logits


def assert_logits(logits: Tensor, reference: Tensor, dtype: torch.dtype, name: str = "") -> None:
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    atol = TOLERANCE[dtype]
    if VARIANTS.get(name, [""])[0] in ("gemma3_text", "gpt_oss", "llama4_text"):
        # Gemma's logits are twice as large; and in float64, too, transformers has products with norms' weights, and
        # Llama 4's rotation, in fp32.
        atol = 1e-4 if dtype == torch.float64 else 2 * atol
    torch.testing.assert_close(logits.double(), reference.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("name", VARIANTS)
def test_prompt_at_once(folder: Path, name: str) -> None:
    ids = tokens()
    logits = Feeder(model(folder, name, torch.float64)).feed_chunks(ids, [LENGTH])
    assert_logits(logits, expected(folder, name, torch.float64), torch.float64, name)


PIECES = [
    "qwen3",
    "llama3 RoPE",
    "qwen2",
    "mistral",
    "ministral3",
    "windows",
    "windows of later layers",
    "olmo2",
    "every fourth layer full",
    "bias of the output alone",
    "part of a head rotated",
    "granite",
    "windows without RoPE",
    "every third layer full",
    "qwen3_moe",
    "experts and windows",
    "gpt_oss",
    "llama4_text",
]


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize(
    "chunks", [[1] * LENGTH, [40, 33, 2], [5] * 15, [1, 34, 35, 5]], ids=["decode", "chunks", "verify", "mixed"]
)
def test_prompt_in_pieces(folder: Path, name: str, block_size: int, chunks: list[int]) -> None:
    feeder = Feeder(model(folder, name, torch.float64), block_size=block_size)
    logits = feeder.feed_chunks(tokens(), chunks)
    assert_logits(logits, expected(folder, name, torch.float64), torch.float64, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunks", [[LENGTH], [20, 6, 6, 1, 1, 1, 40]], ids=["at once", "pieces"])
def test_other_dtypes(folder: Path, name: str, dtype: torch.dtype, chunks: list[int]) -> None:
    logits = Feeder(model(folder, name, dtype)).feed_chunks(tokens(), chunks)
    assert_logits(logits, expected(folder, name, dtype), dtype, name)


@pytest.mark.parametrize("seed", range(6))
def test_mixed_batches(folder: Path, seed: int) -> None:
    """Check mixed batches of five requests: chunks, decode and verification rows, masked rows, rows without a slot."""
    rng = random.Random(seed)
    feeder = Feeder(model(folder, "qwen3", torch.float64), num_requests=5, block_size=rng.choice([2, 8, 16]), seed=seed)
    texts = {b: tokens(LENGTH, b) for b in range(5)}
    done = dict.fromkeys(range(5), 0)
    while any(done[b] < LENGTH for b in done):
        batch = rng.sample(
            [b for b in done if done[b] < LENGTH], k=rng.randint(1, sum(n < LENGTH for n in done.values()))
        )
        rows: dict[int, list[tuple[int, int]]] = {}
        no_slot = set()
        for b in batch:
            count = min(rng.choice([0, 1, 1, 2, 6, 6, 40]), LENGTH - done[b])
            fed = [(texts[b][p], p) for p in range(done[b], done[b] + count)]
            if done[b] and count and rng.random() < 0.3:  # as the first draft pass does: fed again, KV already there
                fed.insert(0, (texts[b][done[b] - 1], done[b] - 1))
                no_slot.add((b, done[b] - 1))
            for _ in range(rng.choice([0, 0, 1, 2])):
                fed.insert(rng.choice([0, len(fed)]), (0, -1))
            rows[b] = fed
            done[b] += count
        if not any(rows.values()):
            continue
        logits = feeder.feed(rows, no_slot=frozenset(no_slot))
        assert logits.isfinite().all()
        at = 0
        for b, fed in rows.items():
            for _, position in fed:
                if position >= 0:
                    reference = expected(folder, "qwen3", torch.float64, b)[position]
                    assert_logits(logits[at], reference, torch.float64)
                at += 1


def test_rejected_tokens_are_overwritten(folder: Path) -> None:
    """Check that KV of rejected drafts, which stays, is overwritten by the next pass before it is read."""
    feeder = Feeder(model(folder, "llama", torch.float64), block_size=4)
    ids = tokens()
    feeder.feed_chunks(ids[:20], [20])
    wrong = [(ids[20], 20), *[(7, p) for p in range(21, 26)]]
    feeder.feed({0: wrong})
    logits = feeder.feed({0: [(ids[p], p) for p in range(21, 24)]})
    assert_logits(logits, expected(folder, "llama", torch.float64)[21:24], torch.float64)


def test_a_pass_writes_its_slots_only(folder: Path) -> None:
    feeder = Feeder(model(folder, "qwen3", torch.float64), num_requests=2, block_size=4)
    feeder.feed({0: [(1, 0), (2, 1)]})
    before = [layer.clone() for layer in feeder.cache.layers]
    feeder.feed({0: [(3, 2), (0, -1)], 1: [(5, -1)]})
    block, offset = int(feeder.table[0, 0]), 2
    for old, new in zip(before, feeder.cache.layers, strict=True):
        assert new[block, :, :, offset].isfinite().all()
        old[block, :, :, offset] = new[block, :, :, offset]
        torch.testing.assert_close(new[:-1], old[:-1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_only_masked_rows(folder: Path, dtype: torch.dtype) -> None:
    """Check a pass of masked rows only, as in a warm-up: every slot and position is -1."""
    feeder = Feeder(model(folder, "qwen3", dtype), num_requests=2)
    assert feeder.feed({0: [(0, -1)] * 3, 1: [(0, -1)]}).isfinite().all()
    for layer in feeder.cache.layers:
        assert layer[:-1].isnan().all()


def test_weights_of_a_checkpoint_in_layout_4(folder: Path, tmp_path: Path) -> None:
    """Check a checkpoint in layout 4: `rope_theta`, `rope_scaling`, `torch_dtype` instead of `rope_parameters`,
    `dtype`."""
    path = make_checkpoint(tmp_path, "llama", vocab=VOCAB, seed=4, rope_parameters=LLAMA3_ROPE)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    edit_json(
        path / "config.json",
        remove=("rope_parameters", "dtype"),
        rope_theta=LLAMA3_ROPE["rope_theta"],
        rope_scaling=scaling,
        torch_dtype="float32",
    )
    logits = Feeder(load_model(path, dtype="float64")).feed_chunks(tokens(), [LENGTH])
    assert_logits(logits, expected(folder, "llama3 RoPE", torch.float64), torch.float64)


PLAIN_READS = ["qwen3", "untied", "llama biases", "qwen2", "olmo2", "phi3", "granite", "smollm3", "gemma3_text"]


@pytest.mark.parametrize("name", PLAIN_READS)
def test_num_parameters_are_those_a_pass_reads(folder: Path, name: str) -> None:
    reference = load(make(folder, name))
    count = sum(parameter.numel() for parameter in reference.parameters())  # counts tied weights once
    if not reference.config.tie_word_embeddings:
        count -= reference.get_input_embeddings().weight.numel()
    assert model(folder, name, torch.float64).num_parameters == count


@pytest.mark.parametrize("name", ["qwen3", "untied", "olmo2", "phi3", "smollm3"])
def test_attention_ratio_is_that_of_multiplications(folder: Path, name: str) -> None:
    """Check the attention ratio against multiplications that torch counts in transformers' passes over 40 and 80
    tokens; attention's grow with the square. In such small models norms, biases and RoPE's angles are a few percent."""
    reference = load(make(folder, name)).eval()
    reference.set_attn_implementation("eager")
    counts = []
    for length in (40, 80):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            reference.model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
        counts.append(counter.get_total_flops() / length)
    position = (counts[1] - counts[0]) / 40
    ratio = model(folder, name, torch.float64).attention_ratio
    assert ratio == pytest.approx(position / (counts[0] - 40 * position), rel=0.1)


def test_attention_ratio_counts_layers_that_attend_to_all(folder: Path) -> None:
    config = model(folder, "gemma3_text", torch.float64).config
    full = config.windows.count(None)
    assert 0 < full < config.num_layers
    assert config.attention_ratio == pytest.approx(
        replace(config, windows=()).attention_ratio * full / config.num_layers
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "plain layers and experts", "gpt_oss"])
def test_num_parameters_of_experts(folder: Path, name: str) -> None:
    """Check the parameters that rows read: the chosen experts for one row, all for many rows."""
    reference, config = load(make(folder, name)), model(folder, name, torch.float64).config
    sizes = {name: parameter.numel() for name, parameter in reference.named_parameters()}
    if not config.tie_word_embeddings:
        sizes.pop("model.embed_tokens.weight")
    assert config.experts is not None
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - of_experts
    assert of_experts > 0
    assert config.num_parameters == others + of_experts * 2 / 5
    # Two rows, each with two of five experts: of an expert both, with (3 / 5)^2, know nothing.
    assert config.num_parameters_read(2) == pytest.approx(others + of_experts * (1 - 9 / 25))
    assert config.num_parameters_read(1000) == pytest.approx(sum(sizes.values()))


def test_as_many_experts_as_choices_make(folder: Path) -> None:
    """Check `Experts.expected` against random choices."""
    experts = model(folder, "qwen3_moe", torch.float64).config.experts
    assert experts is not None
    for rows in (1, 2, 4):
        drawn = torch.rand(20000, rows, experts.count, generator=torch.Generator().manual_seed(rows))
        chosen = drawn.topk(experts.per_token, dim=-1).indices.flatten(1)
        different = torch.zeros(20000, experts.count).scatter_(1, chosen, 1.0).sum(1)
        assert float(different.mean()) == pytest.approx(experts.expected(rows), abs=0.03)


@pytest.mark.parametrize("name", ["qwen3", "llama biases"])
@pytest.mark.parametrize("hidden_layers", [(0, 1), (1, 0, 1), (1,)])
def test_entries_of_layers(folder: Path, name: str, hidden_layers: tuple[int, ...]) -> None:
    """Check the residual stream at the entries of layers against `hidden_states` of transformers."""
    ids = tokens(30)
    with torch.inference_mode():
        reference = load(make(folder, name))(torch.tensor([ids]), output_hidden_states=True).hidden_states
    feeder = Feeder(model(folder, name, torch.float64), hidden_layers=hidden_layers)
    feeder.feed({0: [(ids[p], p) for p in range(20)]})
    feeder.feed({0: [(ids[p], p) for p in range(20, 30)]})
    assert feeder.entries is not None
    expected = torch.stack([reference[layer][0, 20:] for layer in hidden_layers], dim=1)
    torch.testing.assert_close(feeder.entries, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rows", [10, 75], ids=["a tile", "two tiles"])
@pytest.mark.parametrize("hidden_layers", [(0, 1), (1, 0, 1), (1,), (2,)])
def test_entries_of_native_passes(folder: Path, hidden_layers: tuple[int, ...], rows: int) -> None:
    """Check hidden states at the entries of layers in native passes. transformers applies the norm after the last
    layer, so the test does, too."""
    ids = tokens(rows)
    with torch.inference_mode():
        reference = load(make(folder, "qwen3"), torch.float32)(torch.tensor([ids]), output_hidden_states=True)
    native = load_native(make(folder, "qwen3"), dtype="float32")
    feeder = Feeder(native, hidden_layers=hidden_layers)
    without = Feeder(native)
    fed: dict[int, list[tuple[int, int]]] = {0: list(zip(ids, range(rows), strict=True))}
    assert torch.equal(feeder.feed(fed), without.feed(fed))
    assert without.entries is None
    assert feeder.entries is not None
    found = feeder.entries
    if hidden_layers == (2,):
        found = rms_norm(found, to_torch(native.weights.final_norm), native.config.rms_norm_eps)
    expected = torch.stack([reference.hidden_states[layer][0] for layer in hidden_layers], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_layer_that_is_none(folder: Path) -> None:
    native = load_native(make(folder, "qwen3"), dtype="float32")
    with pytest.raises(InvalidBufferError, match=r"hidden_layers=4: must be from 0 to 3"):
        Feeder(native, hidden_layers=(1, 4)).feed({0: [(1, 0)]})


def test_long_rope_depends_on_the_longest_text_of_an_engine(folder: Path) -> None:
    """Check longrope: up to 64 tokens here, transformers uses the short factors, for all positions."""
    short = load_model(make(folder, "long RoPE"), dtype="float64", max_model_len=64)
    ids = tokens(64)
    with torch.inference_mode():
        reference = load(make(folder, "long RoPE"), torch.float64)(torch.tensor([ids])).logits[0]
    assert_logits(Feeder(short).feed_chunks(ids, [40, 24]), reference, torch.float64)
    long = Feeder(model(folder, "long RoPE", torch.float64)).feed_chunks(ids, [64])
    assert not torch.allclose(long, reference, atol=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_native_passes_of_families(folder: Path, name: str) -> None:
    native = load_native(make(folder, name), dtype="float32")
    for model in (native, native.on_pool(CpuPool(2))):
        found = Feeder(model).feed_chunks(tokens(), [5, 35, 1, 1, 33])
        assert_logits(found, expected(folder, name, torch.float64), torch.float32)

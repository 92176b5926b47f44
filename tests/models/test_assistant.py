"""Native passes of Gemma 4's assistants: their logits against transformers' own module, planted faults, and errors that
name the field."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from assistant_reference import KINDS, Script, load_target, make_assistant
from checkpoints import edit_json, make_checkpoint, make_gemma4
from gemma4_reference import float64
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from specrs.arrays import Array
from specrs.backends.cpu.assistant import load_assistant
from specrs.backends.cpu.weights import load_native
from specrs.core import CpuPool
from specrs.drafters.assistant import config as assistant_config
from specrs.drafters.assistant.files import open_assistant
from specrs.drafters.assistant.native import NativeAssistant
from specrs.drafters.assistant.weights import AssistantFacts
from specrs.errors import CheckpointError, InvalidConfigError, SpecrsError, UnsupportedModelError
from specrs.models.native_decoder import NativeDecoder
from specrs.models.native_inputs import NativeInputs

VOCAB, LENGTH, DRAFTS, WINDOW = 61, 26, 4, 8
TOKENS = random.Random(1).choices(range(VOCAB), k=LENGTH)
BOUND = 6e-5
"""Largest difference of native logits from those in float64, relative to the largest logit."""
VARIANTS = ("gemma4", "gemma4, keys are values", "gemma4, all of it", "gemma4, experts and embeddings")
F, S = "full_attention", "sliding_attention"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("assistant")
    for variant in VARIANTS:
        make_assistant(made / f"{variant}'s", make_gemma4(made / variant, variant), seed=2)
    return made


@cache
def script(target: Path, assistant: Path) -> Script:
    with float64():
        return Script(assistant, load_target(target))


@torch.inference_mode()
def expected(script: Script, length: int) -> tuple[list[int], Array]:
    """Return the drafts of transformers' module after the first `length` tokens of `TOKENS`, and their logits `[DRAFTS,
    V]`."""
    with float64():
        states = script.target(torch.tensor([TOKENS[:length]]), output_hidden_states=True, use_cache=False)
        drafts, logits = script.draft([states.hidden_states[-1][0]], TOKENS[:length], DRAFTS)
    return drafts, logits.numpy()


def assistant_of(path: Path, target: Any, size: int | None = None) -> NativeAssistant:
    return load_assistant(open_assistant(str(path), target, revision=None, size=size, counts=None), target)


def run(
    head: NativeAssistant, target: NativeDecoder, lengths: list[int], drafts: list[list[int]], *, shift: int = 0
) -> list[Array]:
    """Feed the target one request for each of `lengths`, then run the assistant's passes over all requests. Return the
    logits `[DRAFTS, Vd]` of each request. The passes are fed `drafts`, not what the assistant itself would draft.
    `shift` plants a mistake: rows stand this many positions later."""
    size, width = 4, -(-max(lengths) // 4)
    cache = target.allocate_cache(len(lengths) * width + 1, size)
    for layer in cache.layers:
        layer[...] = np.nan
    table = np.random.default_rng(3).permutation(len(lengths) * width).reshape(len(lengths), width)
    states = []
    for i, length in enumerate(lengths):
        at = np.arange(length - 1)
        slots = table[i, at // size] * size + at % size
        ids = np.array(TOKENS[: length - 1])
        inputs = NativeInputs(ids, at, slots, np.array([0, length - 1]), table[i : i + 1].copy())
        entries = target.forward(inputs, cache, head.aux_layer_ids).entries
        assert entries is not None
        states.append(head.fuse(entries[-1:])[0])
    hidden, found = np.stack(states), []
    positions = np.array([length - 2 + shift for length in lengths])
    rows = np.arange(len(lengths) + 1)
    for i in range(DRAFTS):
        ids = np.array([TOKENS[length - 1] if i == 0 else drafts[at][i - 1] for at, length in enumerate(lengths)])
        inputs = NativeInputs(ids, positions, np.full(len(lengths), -1), rows, table)
        hidden, final = head.forward(inputs, hidden, cache)
        found.append(head.compute_logits(final))
    return list(np.stack(found, axis=1))


def far(found: Array, known: Array) -> float:
    """Return the largest difference between `found` and `known`, relative to the largest number of `known`."""
    assert np.isfinite(found).all()
    return float(np.abs(found.astype(np.float64) - known).max() / np.abs(known).max())


@settings(max_examples=12)
@given(
    st.sampled_from(VARIANTS),
    st.sampled_from([KINDS, [S, F], [F], [F, S, S, F], [S, S, S, F]]),
    st.sampled_from([{}, {"hidden": 64, "heads": 2}, {"heads": 8, "hidden": 24}, {"initializer_range": 0.4}]),
    st.integers(0, 3),
    st.lists(st.sampled_from([2, 3, 9, 10, 11, 12, LENGTH]), min_size=1, max_size=3),
)
def test_the_logits_of_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    variant: str,
    kinds: list[str],
    shape: dict[str, Any],
    seed: int,
    lengths: list[int],
) -> None:
    """Check the logits of all drafts against transformers, before and after the window of 8 begins to hide
    positions."""
    made = tmp_path_factory.mktemp("assistant")
    path = make_assistant(
        made / "assistant", make_gemma4(made / "target", variant, seed=seed), seed=seed, kinds=kinds, **shape
    )
    reference = script(made / "target", path)
    known = [expected(reference, length) for length in lengths]
    target = load_native(made / "target")
    found = run(assistant_of(path, target), target, lengths, [drafts for drafts, _ in known])
    for own, (_, logits) in zip(found, known, strict=True):
        assert far(own, logits) <= BOUND


def test_the_formulas(folder: Path) -> None:
    """Check transformers' module against the formulas, written out in float64 for one layer without a window."""
    path = make_assistant(folder / "one", folder / "gemma4", kinds=[F], seed=5)
    reference = script(folder / "gemma4", path)
    w = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
    c = json.loads((path / "config.json").read_text())["text_config"]
    heads, dim, layer, n = c["num_attention_heads"], 32, "model.layers.0.", LENGTH

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * w[name]

    with float64(), torch.inference_mode():
        drafts, logits = expected(reference, n)
        keys, values = (x[0] for x in reference.keys_and_values(TOKENS[:-1])[F])
        out = reference.target(torch.tensor([TOKENS[:-1]]), output_hidden_states=True, use_cache=False)
        state, rows = out.hidden_states[-1][0, -1], []
        table = reference.target.model.embed_tokens.weight
        for i in range(DRAFTS):
            token = TOKENS[-1] if i == 0 else drafts[i - 1]
            h = w["pre_projection.weight"] @ torch.cat([table[token] * len(table[token]) ** 0.5, state])
            q = (w[f"{layer}self_attn.q_proj.weight"] @ norm(h, f"{layer}input_layernorm.weight")).view(heads, dim)
            q = norm(q, f"{layer}self_attn.q_norm.weight")
            # A quarter of the 32 features turn: pairs (j, j + 16) for j < 4.
            angle = (n - 1) * 500.0 ** (-torch.arange(0, 32, 2) / 32.0) * (torch.arange(16) < 4)
            cos, sin = angle.cos(), angle.sin()
            q = torch.cat([q[:, :16] * cos - q[:, 16:] * sin, q[:, 16:] * cos + q[:, :16] * sin], dim=1)
            group = heads // len(keys)
            attended = [
                torch.softmax(keys[head // group] @ q[head], 0) @ values[head // group] for head in range(heads)
            ]
            x = w[f"{layer}self_attn.o_proj.weight"] @ torch.cat(attended)
            h = h + norm(x, f"{layer}post_attention_layernorm.weight")
            x = norm(h, f"{layer}pre_feedforward_layernorm.weight")
            gate, up = (w[f"{layer}mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
            x = w[f"{layer}mlp.down_proj.weight"] @ (torch.nn.functional.gelu(gate, approximate="tanh") * up)
            h = (h + norm(x, f"{layer}post_feedforward_layernorm.weight")) * w[f"{layer}layer_scalar"]
            final = norm(h, "model.norm.weight")
            state = w["post_projection.weight"] @ final
            rows.append(w["model.embed_tokens.weight"] @ final)
    # transformers' angles are float32.
    assert far(torch.stack(rows).numpy(), logits) < 3e-6


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_native_bits_depend_on_nothing(folder: Path, threads: int) -> None:
    """Check that logits have the same bits with any number of threads and with other requests in the pass."""
    target = load_native(folder / "gemma4")
    head, lengths = assistant_of(folder / "gemma4's", target), [LENGTH, 2, 11]
    fed = [[7, 8, 9, 10], [1, 2, 3, 4], [5, 5, 5, 5]]
    known = run(head, target, lengths[:1], fed[:1])
    found = run(head.on_pool(CpuPool(threads)), target, lengths, fed)
    assert np.array_equal(known[0], found[0])


def test_fewer_ids(folder: Path) -> None:
    target = load_native(folder / "gemma4")
    fed = [[7, 8, 9, 10]]
    whole, some = (run(assistant_of(folder / "gemma4's", target, size), target, [9], fed)[0] for size in (None, 20))
    assert np.array_equal(whole[:, :20], some)
    assert assistant_of(folder / "gemma4's", target, 20).vocab_size == 20


def _first_source(own: Any, layer: int, text: Any, target: Any) -> int:
    """Return the first of the target's layers with the same window. This is a fault: `_source` returns the last."""
    with_keys = [i for i, sizes in enumerate(target.varied) if sizes.source is None]
    return next(i for i in with_keys if target.windows[i] == own.windows[layer])


def _with(**fields: Any) -> Any:
    """Return a faulty `parse_assistant_config`, which replaces `fields` of `AssistantConfig.layers`. A function as the
    value is called with the right layers."""
    parse = assistant_config.parse_assistant_config

    def parsed(raw: Any, target: Any) -> Any:
        made = parse(raw, target)
        given = {name: value(made.layers) if callable(value) else value for name, value in fields.items()}
        return replace(made, layers=replace(made.layers, **given))

    return parsed


FILES = "specrs.drafters.assistant.files.parse_assistant_config"
FAULTS: dict[str, tuple[Any, ...]] = {
    "keys and values of the wrong layer": (assistant_config, "_source", _first_source),
    "embedding not scaled": (FILES, _with(embedding_multiplier=1.0)),
    "logits capped, as the target's are": (FILES, _with(final_logit_softcapping=5.0)),
    "one position too few in the window": (
        FILES,
        _with(windows=lambda c: tuple(window and window - 1 for window in c.windows)),
    ),
    "the state before the final norm": (
        AssistantFacts,
        "aux_layer_ids",
        property(lambda head: (head.weights.target_layers,)),
    ),
    "another activation": (FILES, _with(activation="silu")),
}


@pytest.mark.parametrize("fault", [*FAULTS, "position too late", "position too early"])
def test_planted_faults_are_noticed(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that logits are no longer those of transformers if a part of the pass is wrong."""
    variant = "gemma4, keys are values"  # each kind has several layers with keys and values
    drafts, logits = expected(script(folder / variant, folder / f"{variant}'s"), LENGTH - 1)
    if fault in FAULTS:
        monkeypatch.setattr(*FAULTS[fault])
    target = load_native(folder / variant)
    head = assistant_of(folder / f"{variant}'s", target)
    if fault == "position too late":
        found = run_late(head, target, drafts)
    else:
        found = run(head, target, [LENGTH - 1], [drafts], shift=-1 if fault == "position too early" else 0)[0]
    assert far(found, logits) > 30 * BOUND


def run_late(head: NativeAssistant, target: NativeDecoder, drafts: list[int]) -> Array:
    """Return the logits of drafts whose rows stand one position too late, after the target was fed one token more."""
    later = [TOKENS[LENGTH - 2], *drafts]
    table = np.arange(8)[None]
    cache = target.allocate_cache(9, 4)
    at = np.arange(LENGTH - 1)
    inputs = NativeInputs(np.array(TOKENS[: LENGTH - 1]), at, at, np.array([0, LENGTH - 1]), table)
    entries = target.forward(inputs, cache, head.aux_layer_ids).entries
    assert entries is not None
    hidden, found = head.fuse(entries[-2:-1]), []
    for i in range(DRAFTS):
        inputs = NativeInputs(np.array([later[i]]), at[-1:], np.full(1, -1), np.array([0, 1]), table)
        hidden, final = head.forward(inputs, hidden, cache)
        found.append(head.compute_logits(final)[0])
    return np.stack(found)


def edit_text(path: Path, **fields: Any) -> None:
    """Change fields of `text_config` in the config.json of the assistant at `path`."""
    text = json.loads((path / "config.json").read_text())["text_config"]
    edit_json(path / "config.json", text_config=text | fields)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"backbone_hidden_size": 48},
            CheckpointError,
            r"backbone_hidden_size=48: must be 64, the target's hidden_size",
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            UnsupportedModelError,
            r"architectures=.*'Gemma4AssistantForCausalLM'",
        ),
        ({"text_config": None}, CheckpointError, r"text_config=None: must be an object"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModelError, r"quantization_config=.*null"),
        ({"text": {"vocab_size": 60}}, CheckpointError, r"text_config\.vocab_size=60: must be 61, the target's"),
        ({"text": {"sliding_window": 9}}, CheckpointError, r"text_config\.sliding_window=9: must be 8, the target's"),
        ({"text": {"head_dim": 8}}, CheckpointError, r"text_config\.head_dim of layer 0=8: must be 16, as the keys"),
        (
            {"text": {"num_attention_heads": 3, "num_key_value_heads": 1}},
            CheckpointError,
            r"text_config\.num_attention_heads=3: must be a multiple of the target's 2 KV heads, which layer 0 attends",
        ),
        (
            {"text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61}},
            UnsupportedModelError,
            r"text_config\.hidden_size_per_layer_input=8: not implemented; allowed: 0",
        ),
        (
            {"text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}},
            UnsupportedModelError,
            r"text_config\.enable_moe_block=True: not implemented; allowed: false",
        ),
        ({"text": {"num_kv_shared_layers": 2}}, UnsupportedModelError, r"num_kv_shared_layers=2: .*allowed: 3"),
        (
            {"text": {"rope_parameters": None}},
            CheckpointError,
            r"text_config\.rope_parameters=None: must be the target's",
        ),
        ({"text": {"hidden_size": 0}}, CheckpointError, r"text_config\.hidden_size=0"),
    ],
)
def test_wrong_configurations(
    folder: Path, tmp_path: Path, fields: dict[str, Any], error: type[SpecrsError], message: str
) -> None:
    target = load_native(folder / "gemma4")
    path = make_assistant(tmp_path / "assistant", folder / "gemma4")
    edit_text(path, **fields.pop("text", {}))
    edit_json(path / "config.json", **fields)
    with pytest.raises(error, match=message):
        assistant_of(path, target)


def test_a_target_without_a_layer_of_the_kind(folder: Path, tmp_path: Path) -> None:
    """Check that an assistant with a windowed layer is rejected for a target whose layers all attend all positions."""
    target = make_gemma4(tmp_path / "full", "gemma4, keys are values", layer_types=[F, F], layers=2)
    with pytest.raises(
        CheckpointError, match=r"text_config\.layer_types=.*must be layers of kinds that the target has"
    ):
        assistant_of(folder / "gemma4's", load_native(target))


def test_wrong_targets_and_files(folder: Path, tmp_path: Path) -> None:
    other = load_native(make_checkpoint(tmp_path / "qwen3", "qwen3", vocab=VOCAB, hidden=64))
    message = r"speculative_config\.model=.*: must be None with method='mtp' and a Qwen3ForCausalLM: assistants are for"
    with pytest.raises(InvalidConfigError, match=message):
        assistant_of(folder / "gemma4's", other)
    target = load_native(folder / "gemma4")
    (tmp_path / "file.gguf").write_bytes(b"")
    with pytest.raises(InvalidConfigError, match=r"must be a folder or hub id of safetensors files"):
        assistant_of(tmp_path / "file.gguf", target)
    path = make_assistant(tmp_path / "assistant", folder / "gemma4")
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in ("pre_projection.weight", "model.layers.1.self_attn.q_norm.weight"):
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, file)
        with pytest.raises(CheckpointError, match=name):
            assistant_of(path, target)
    save_file(tensors | {"model.layers.0.extra": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.extra"):
        assistant_of(path, target)
    save_file(tensors | {"post_projection.weight": torch.zeros(63, 40)}, file)
    with pytest.raises(CheckpointError, match=r"post_projection\.weight"):
        assistant_of(path, target)


def test_centroids_are_not_read(folder: Path, tmp_path: Path) -> None:
    """Check that an assistant with centroids loads, and that all ids are scored."""
    path = make_assistant(tmp_path / "assistant", folder / "gemma4", ordered=True, seed=2)
    assert "masked_embedding.token_ordering" in load_file(path / "model.safetensors")
    target, fed = load_native(folder / "gemma4"), [[7, 8, 9, 10]]
    own, other = (run(assistant_of(one, target), target, [9], fed)[0] for one in (path, folder / "gemma4's"))
    assert own.shape == other.shape


def test_the_assistant_of_the_12b_model(folder: Path, tmp_path: Path) -> None:
    """Check that an assistant of Gemma 4 12B, whose text configuration has no fields of embeddings of layers, gives the
    bits of one of the other sizes."""
    target, fed = load_native(folder / "gemma4"), [[7, 8, 9, 10]]
    path = Path(shutil.copytree(folder / "gemma4's", tmp_path / "assistant"))
    text = json.loads((path / "config.json").read_text())["text_config"]
    for field in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
        del text[field]
    text["model_type"] = "gemma4_unified_text"
    edit_json(path / "config.json", architectures=["Gemma4UnifiedAssistantForCausalLM"], text_config=text)
    own, other = (run(assistant_of(one, target), target, [9], fed)[0] for one in (path, folder / "gemma4's"))
    assert np.array_equal(own, other)

"""Small models in a GPU's layout with interpreted kernels and buffers full of NaN. Holds no tests."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import GEMMA4, LLAMA3_ROPE, LONG_ROPE, make_checkpoint, make_gemma4
from kernels.cuda.tolerance import assert_near
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.kernels.linear import DenseWeight, Weight
from specrs.models.base import HiddenStates
from specrs.models.decoder_weights import ExpertWeights, SharedWeights
from specrs.models.delta_net import FULL, LINEAR
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.short_conv import CONV
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model
from specrs.models.torch_weights import TorchExperts, TorchLayer, TorchWeights
from torch import Tensor

from .harness import Feeder

LONG_ROPE_OF_4 = LONG_ROPE | {
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 6.0],
    "partial_rotary_factor": 0.5,
}
"""RoPE that rotates half of a head of 16 features and scales cosines."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {"tie": False}),
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "ministral3": ("ministral3", {"tie": False}),
    "windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 7, "layers": 4}),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}),
    "gemma3": ("gemma3_text", {"sliding_window": 7, "kv_heads": 1}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {"attention_bias": True}),
    "phi3": ("phi3", {"rope_parameters": LONG_ROPE_OF_4, "sliding_window": 11, "hidden": 64}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "mixtral": ("mixtral", {"sliding_window": 7}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 7, "tie": False}),
    "llama4": ("llama4_text", {"layers": 4, "num_experts_per_tok": 2}),
    "llama4 without experts": ("llama4_text", {"moe_layers": [], "attention_bias": True}),
    "hybrid": ("qwen3_5_text", {"layer_types": [LINEAR, FULL, LINEAR], "layers": 3}),
    "hybrid with experts": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {"layer_types": [FULL, LINEAR, FULL], "layers": 3, "mlp_only_layers": [1]}),
    "lfm2": ("lfm2", {"layer_types": [CONV, FULL, CONV], "layers": 3, "conv_L_cache": 4}),
    "lfm2_moe": ("lfm2_moe", {"layer_types": [CONV, FULL, CONV], "layers": 3}),
    "one KV head": ("qwen3", {"kv_heads": 1, "group": 5, "head_dim": 20}),
}
LENGTH = 90


@functools.cache
def load(folder: Path, name: str, dtype: torch.dtype) -> TorchDecoder:
    if name in GEMMA4:
        path = folder / name.replace(" ", "_")
        if not path.exists():
            make_gemma4(path, name, vocab=83)
        return load_model(path, dtype=dtype)
    family, fields = FAMILIES[name]
    shape = {"hidden": 40, "intermediate": 56, "vocab": 83, "kv_heads": 2, "group": 2, "head_dim": 16} | fields
    path = folder / name.replace(" ", "_")
    if not path.exists():
        make_checkpoint(path, family, **shape)
    return load_model(path, dtype=dtype)


def as_on_a_gpu(model: TorchDecoder) -> TorchWeights:
    """Return the model's weights in the layout that `pack` gives them on a GPU."""

    def layer(w: TorchLayer) -> TorchLayer:
        linears = {name: dense(getattr(w, name), model.weights.dtype) for name in ("qkv", "o", "gate_up", "down")}
        own = w.addition
        if own is not None:
            gate, projection = (dense(each, model.weights.dtype) for each in (own.gate, own.projection))
            own = dataclasses.replace(own, gate=gate, projection=projection)
        return dataclasses.replace(
            w, experts=None if w.experts is None else experts(w.experts), addition=own, **linears
        )

    def experts(w: TorchExperts) -> TorchExperts:
        gate_up, down = (tuple(dense(one, model.weights.dtype) for one in every) for every in (w.gate_up, w.down))
        stacked = torch.stack([one.weight for one in gate_up]), torch.stack([one.weight for one in down])
        biases = [
            torch.stack([one.bias for one in of if one.bias is not None])
            for of in (gate_up, down)
            if of[0].bias is not None
        ]
        both, shared = (biases[0], biases[1]) if biases else None, w.shared
        if shared is not None:
            shared = SharedWeights(
                None if shared.gate is None else dense(shared.gate, model.weights.dtype),
                *(dense(one, model.weights.dtype) for one in (shared.gate_up, shared.down)),
            )
        router = dense(w.router, model.weights.dtype)
        return ExpertWeights(router, gate_up, down, stacked, both, shared, w.scales, norms=w.norms, bias=w.bias)

    weights = model.weights
    layers, embedding = tuple(map(layer, weights.layers)), weights.layer_embedding
    if embedding is not None:
        embedding = dataclasses.replace(embedding, projection=dense(embedding.projection, model.weights.dtype))
    return dataclasses.replace(
        weights, layers=layers, lm_head=dense(weights.lm_head, model.weights.dtype), layer_embedding=embedding
    )


def dense(w: Weight, dtype: torch.dtype) -> DenseWeight:
    return DenseWeight(w.dequantized().to(dtype), w.bias)


class Poisoned(CudaDecoder):
    """A decoder with every buffer except counters set to NaN before every pass."""

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        self.poison()
        hidden = super().forward(inputs, kv_cache, hidden_layers)
        assert not self.workspace.counters.any()
        return HiddenStates(*(None if x is None else x.clone() for x in hidden))  # type: ignore[arg-type]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        self.poison()
        out = torch.full((hidden.shape[0], self.vocab_size + 3), torch.nan)[:, :-3]
        return super().compute_logits(hidden, out)

    def poison(self: CudaDecoder) -> None:
        buffers = [getattr(self.workspace, f.name) for f in dataclasses.fields(self.workspace)]
        if self.workspace.experts is not None:
            buffers += self.workspace.experts.tensors
        if self.states is not None:
            buffers += self.states.buffers
        for buffer in buffers:
            if isinstance(buffer, Tensor) and buffer.is_floating_point():
                buffer.fill_(torch.nan)


def on_device(model: TorchDecoder, num_hidden_layers: int = 0, *, is_draft: bool = False) -> Poisoned:
    made = Poisoned.allocate(
        as_on_a_gpu(model),
        max_rows=LENGTH,
        max_seqs=4,
        num_hidden_layers=num_hidden_layers,
        ranks=model.ranks,
        num_drafts=8,
    )
    made = made.for_draft() if is_draft else made
    assert isinstance(made, Poisoned)
    if made.states is not None:
        for memory in made.states.memory:
            memory.fill_(torch.nan)
    return made


def outputs(model: Any, run: Callable[[Feeder], list[Tensor]]) -> Tensor:
    """Return the logits of everything that `run` feeds to three requests, over blocks of 8 positions that begin as
    NaN."""
    torch.manual_seed(0)
    return torch.cat(run(Feeder(model, num_requests=3, block_size=8, max_len=LENGTH + 6)))


def compare(
    folder: Path, name: str, run: Callable[[Feeder], list[Tensor]], *, is_draft: bool = False, ulps: float = 16
) -> None:
    """Compare the logits of everything that `run` feeds with the CPU's in float64, as `assert_near` does."""
    decoder = load(folder, name, torch.float32)
    exact = outputs(load(folder, name, torch.float64), run)
    assert_near(outputs(on_device(decoder, is_draft=is_draft), run), exact, outputs(decoder, run), ulps=ulps)


def span(start: int, end: int) -> list[tuple[int, int]]:
    """Return (token, position) pairs of positions from `start` to `end`."""
    return [(7 * p % 83, p) for p in range(start, end)]

"""Training by `train_hybrid.py`: the trained model equals transformers' and specrs's, and an interrupted training
continues."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hf_reference import load
from module_files import load_file
from mtp_reference import Script
from transformers import Qwen3_5TextConfig

SCRIPTS = Path(__file__).parents[2] / "scripts"
LENGTH, PASSES = 32, 3
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}


@pytest.fixture(scope="module")
def modules() -> Any:
    """The script's module, loaded after the modules that it imports."""
    for name in ("eagle3_text", "train_eagle3", "train_pair"):
        load_file(name, SCRIPTS / f"{name}.py")
    return load_file("train_hybrid", SCRIPTS / "train_hybrid.py")


@pytest.fixture
def script(modules: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with a small model, short sequences, and fp32 products."""
    monkeypatch.setattr(modules, "SEQ_LEN", LENGTH)
    monkeypatch.setattr(modules, "BATCH", 2)
    monkeypatch.setattr(modules, "CHUNK", 8)
    monkeypatch.setattr(modules, "in_bf16", contextlib.nullcontext)
    fields = {name: value for name, value in modules.CONFIG.to_dict().items() if name != "layer_types"}
    monkeypatch.setattr(modules, "CONFIG", Qwen3_5TextConfig(**fields | SHAPE))
    return modules


def trainer(script: Any, out: Path) -> Any:
    """Return a trainer over random tokens."""
    out.mkdir(exist_ok=True)
    if not (out / "tokens.npy").exists():
        np.save(out / "tokens.npy", np.random.default_rng(0).integers(0, 2048, 4000).astype(np.uint16))
    return script.Trainer(out, compiled=False)


def close(found: torch.Tensor, known: torch.Tensor) -> None:
    torch.testing.assert_close(found, known, rtol=0, atol=2e-4)


def test_the_checkpoint_has_the_logits_of_training(script: Any, tmp_path: Path) -> None:
    """Check the written checkpoint against the logits of training: of the target, and of head rows that read states
    left by earlier rows."""
    made = trainer(script, tmp_path)
    torch.manual_seed(0)
    for parameter in made.hybrid.parameters():
        noise = torch.randn(parameter.shape) * (0.2 if parameter.ndim == 2 else 0.5)
        parameter.data = (parameter.data + noise).bfloat16().float()
    target = load(made.write(), torch.float32)
    reference = Script(target)
    ids = made.batch(0, LENGTH)
    with torch.inference_mode():
        known = [target(row[None], output_hidden_states=True, use_cache=False) for row in ids]
        found = list(made.hybrid.drafts(ids))
        close(made.hybrid.logits(made.hybrid.model(ids)), torch.cat([k.logits for k in known]))
        for j, (drafted, labels) in enumerate(found):
            assert drafted.shape == labels.shape == (2, LENGTH - 1 - j, 2048)
            close(labels[0], known[0].logits[0, 1 + j :])
            for start in (0, 5, LENGTH - PASSES - 1):
                hidden, tokens = known[0].hidden_states[-1][0, : start + 1], ids[0, 1:]
                for _ in range(j):
                    left, _ = reference.run(hidden, tokens[: len(hidden)], torch.arange(len(hidden)))
                    hidden = torch.cat([hidden, left[-1:]])
                _, logits = reference.run(hidden, tokens[: len(hidden)], torch.arange(len(hidden)))
                close(drafted[0, start], logits[-1])


class Cut(Exception):
    """Raised to end a run in the middle."""


@pytest.mark.parametrize("stage", ["target", "head"])
def test_training_goes_on_where_it_was_cut_off(
    script: Any, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that training continues where it was cut off: weights, optimizers, clock and sequences give the result of
    an uninterrupted run."""
    now = SimpleNamespace(steps=0, cut=0)
    monkeypatch.setattr(script.time, "monotonic", lambda: 1000.0 + 10.0 * now.steps)
    batch = script.Trainer.batch

    def counted(self: Any, step: int, length: int) -> torch.Tensor:
        now.steps += 1
        if now.steps == now.cut:
            raise Cut
        ids: torch.Tensor = batch(self, step, length)
        return ids

    monkeypatch.setattr(script.Trainer, "batch", counted)
    states = []
    for cut in (0, 11):
        now.steps, now.cut = 0, cut
        out = tmp_path / str(cut)
        if cut:
            with pytest.raises(Cut):
                trainer(script, out).train(stage, 3.0)
        trainer(script, out).train(stage, 3.0)
        states.append(torch.load(out / f"{stage}.pt", weights_only=True))
        assert (states[-1]["step"], states[-1]["used"]) == (18, 180.0)
    started = trainer(script, tmp_path / "0").hybrid.state_dict()
    for name, tensor in states[0]["hybrid"].items():
        assert torch.equal(states[1]["hybrid"][name], tensor)
        is_trained = stage == "target" or name.startswith("mtp.")
        assert torch.equal(started[name], tensor) != is_trained, name

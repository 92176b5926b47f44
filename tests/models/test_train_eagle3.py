"""Training of EAGLE-3 heads: its unrolled passes equal those of drafting, row by row. Also a whole run over a GGUF
file, whose target writes the chats."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, write_tokenizer
from eagle3_reference import Head
from gguf_files import write_gguf
from module_files import load_file
from safetensors.torch import load_file as load_tensors
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).parents[2] / "scripts"
ROWS, PASSES, HIDDEN = 9, 4, 24


@pytest.fixture(scope="module")
def text_script() -> Any:
    return load_file("eagle3_text", SCRIPTS / "eagle3_text.py")


@pytest.fixture(scope="module")
def script(text_script: Any) -> Any:
    """The training script as a module. It imports the script that generates its training texts."""
    return load_file("train_eagle3", SCRIPTS / "train_eagle3.py")


def test_a_row_of_pass_j_is_that_of_a_draft_of_depth_j(script: Any) -> None:
    torch.manual_seed(0)
    shape = script.Shape(
        hidden=HIDDEN, intermediate=20, heads=4, kv_heads=2, head_dim=6, eps=1e-5, theta=100.0, layer_ids=[1, 2]
    )
    made = script.Head(shape, torch.rand(HIDDEN) + 0.5, torch.randn(11, HIDDEN))
    for parameter in made.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.3)
    reference = Head.__new__(Head)
    reference.tensors = {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}
    reference.layer, reference.heads, reference.kv_heads, reference.head_dim = "midlayer.", 4, 2, 6
    reference.eps, reference.theta, reference.lm_head = 1e-5, 100.0, reference.tensors["lm_head.weight"]
    reference.flags, reference.fc_norm = {"norm_before_residual": False, "norm_output": False}, False
    reference.embedding = torch.randn(50, HIDDEN)
    tokens, entries = torch.randint(0, 50, (ROWS,)), torch.randn(ROWS, 2 * HIDDEN)
    with torch.inference_mode():
        every = torch.ones(1, ROWS, dtype=torch.bool)
        found = list(made(entries[None], reference.embedding[tokens][None], PASSES, every))
        fused = linear(entries, reference.tensors["fc.weight"])
        for j in range(PASSES):
            for i in range(j, ROWS):
                hidden = fused[: i - j + 1]  # true rows; then each what the one before has left
                for _ in range(j):
                    n = len(hidden)
                    left, _ = reference.run(hidden, tokens[:n], torch.arange(n))
                    hidden = torch.cat([hidden, left[-1:]])
                _, logits = reference.run(hidden, tokens[: i + 1], torch.arange(i + 1))
                torch.testing.assert_close(found[j][i], logits[-1], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("learned", "batch_size"), [(10, 3), (7, 7), (5, 12)])
def test_all_sequences_are_learned_from_before_any_twice(script: Any, learned: int, batch_size: int) -> None:
    trainer = SimpleNamespace(learned=learned, args=SimpleNamespace(batch_size=batch_size))
    drawn = torch.cat([script.Trainer.sequences(trainer, step) for step in range(20)]).tolist()
    assert len(drawn) == 20 * batch_size
    epochs = [drawn[at : at + learned] for at in range(0, len(drawn) - learned, learned)]
    assert all(sorted(epoch) == list(range(learned)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_over_a_gguf_file_and_its_own_chats(
    script: Any, text_script: Any, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a run over a GGUF file and its own chats: texts and hidden states are kept, a second run reuses them, and
    both heads are equal."""
    source = make_checkpoint(tmp_path / "target", "llama", vocab=330, layers=6, head_dim=16, hidden=96)
    write_tokenizer(source, 330)
    path = write_gguf(source, tmp_path / "target.gguf", tokenizer__chat_template=TEMPLATE)
    out = tmp_path / "out"
    monkeypatch.setattr(text_script, "PART", 16)
    given = {"num-prompts": 20, "num-plain": 0, "prompt-tokens": 128, "new-tokens": 12, "passes": 2, "batch-size": 4}
    sizes = [str(item) for name, value in given.items() for item in (f"--{name}", value)]
    argv = ["train_eagle3.py", "--target", str(path), "--chats", "--keep-states", "--out", str(out), *sizes]
    learning = ["--draft-vocab-size", "100", "--steps", "12", "--optimizer", optimizer]
    monkeypatch.setattr("sys.argv", [*argv, *learning])
    script.main()

    chats = [json.loads(line)["prompt"] for line in (out / "chats.jsonl").read_text().splitlines()]
    assert len(chats) == 20
    assert all(chat.startswith("<u>") and chat.endswith("<a>") for chat in chats)
    text = load_tensors(out / "text" / "0.safetensors")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    length = text["ids"].shape[1]
    hidden = torch.from_file(str(out / "states" / "hidden"), size=20 * length * 3 * 96, dtype=torch.bfloat16)
    chosen = torch.from_file(str(out / "states" / "chosen"), size=20 * length, dtype=torch.int32).view(20, length)
    read = [row for row in range(16) if chosen[row, 0] > 0]
    assert read  # of 12 steps of 4
    row, n = read[0], int(text["lengths"][read[0]])
    with torch.no_grad():
        made = model(text["ids"][row : row + 1, :n].long(), output_hidden_states=True)
    expected = torch.cat([made.hidden_states[i] for i in (2, 3, -1)], dim=-1)[0]
    torch.testing.assert_close(hidden.view(20, length, -1)[row, :n].float(), expected, rtol=2**-8, atol=1e-3)
    assert (chosen[row, :n] - 1).tolist() == made.logits[0].argmax(-1).tolist()

    head = load_tensors(out / "head" / "model.safetensors")
    assert head["lm_head.weight"].shape == (100, 96)
    written = (out / "chats.jsonl").read_text()
    monkeypatch.setattr("specrs.llm.LLM.generate", None)
    script.main()  # nothing is left to write, nor to learn
    assert (out / "chats.jsonl").read_text() == written
    again = load_tensors(out / "head" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in head.items())

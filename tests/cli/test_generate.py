"""`specrs generate` on the bundled pair: transformers' text, streamed, and figures that agree with it."""

import io
import subprocess
import sys

import pytest
import torch
from specrs.cli import main
from specrs.pair import TARGET
from specrs.pair.prompts import PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = PROMPTS[0]
TOKENS = 24


@pytest.fixture(scope="module")
def expected() -> str:
    """Return the greedy continuation in float64 by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float64)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, inputs.input_ids.shape[1] :]
    return str(tokenizer.decode(ids))


class Recorder(io.StringIO):
    """A stdout that keeps what was written before each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []

    def flush(self) -> None:
        self.flushed.append(self.getvalue())


def figures(text: str) -> dict[str, str]:
    return {name: value.strip() for name, value in (line.split(":", 1) for line in text.splitlines() if line)}


@pytest.mark.parametrize("drafts", [0, 3])
def test_text_figures_and_streaming(
    drafts: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdout = Recorder()
    monkeypatch.setattr(sys, "stdout", stdout)
    options = [f"--speculative-config.num_speculative_tokens={drafts}", "--dtype", "float64"]
    assert main(["generate", "--prompt", PROMPT, "--max-tokens", str(TOKENS), *options]) == 0
    assert stdout.getvalue() == expected + "\n"
    parts = [text for text in dict.fromkeys(stdout.flushed) if text]
    assert len(parts) > TOKENS // (drafts + 1) // 2
    assert all(expected.startswith(text) for text in parts[:-1])

    shown = figures(capsys.readouterr().err)
    assert shown["Generated tokens"] == f"{TOKENS} (length)"
    assert float(shown["Output token throughput (tok/s)"]) > 0
    if drafts:
        length = 1 + int(shown["Accepted tokens"]) / int(shown["Drafts"])
        assert shown["Acceptance length"] == f"{length:.2f}"
        assert len(shown["Per-position acceptance (%)"].split()) == drafts
        passes = TOKENS - int(shown["Accepted tokens"])
        assert shown["Tokens per pass of the target"] == f"{TOKENS / passes:.2f}"
    else:
        assert "Drafts" not in shown


def test_prompt_from_stdin(expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert main(["generate", "--max_tokens", str(TOKENS), "--dtype=float64"]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_stop(expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    word = expected.split()[2]
    assert main(["generate", "--prompt", PROMPT, "--max-tokens", str(TOKENS), "--dtype=float64", "--stop", word]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected[: expected.index(word)] + "\n"
    assert figures(captured.err)["Generated tokens"].endswith("(stop)")


def test_sampled_text_is_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    def sampled(seed: int) -> str:
        argv = ["generate", "--prompt", PROMPT, "--max-tokens", "16", "--temperature=0.9", "--top-p=0.95", "--top-k=50"]
        assert main([*argv, "--min-p=0.01", f"--seed={seed}"]) == 0
        return capsys.readouterr().out

    first = sampled(1)
    assert sampled(1) == first
    assert sampled(2) != first


def test_a_reader_that_leaves_is_no_error() -> None:
    command = "from specrs.cli import main; import sys; sys.exit(main())"
    argv = [sys.executable, "-c", command, "generate", "--prompt", PROMPT, "--max-tokens", "64", "--ignore-eos"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0

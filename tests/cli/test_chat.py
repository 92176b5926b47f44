"""`specrs chat` on the bundled pair: turns and history, commands, input from a pipe, and a session in a terminal."""

import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from specrs.cli import main
from specrs.cli.chat.commands import NAMES, obey
from specrs.cli.chat.conversation import Conversation
from specrs.errors import InvalidRequestError
from specrs.llm import LLM
from specrs.pair import TARGET
from specrs.sampling import SamplingParams

SETTINGS = ["--max-model-len", "256", "--threads", "1"]
FIRST, SECOND = "def add(a, b):", "def sub(a, b):"
TOKENS = 12
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS}
ECHO = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        dtype="float32", max_model_len=256, max_num_seqs=1, threads=1, speculative_config={"num_speculative_tokens": 3}
    )


@pytest.fixture
def chat(llm: LLM) -> Conversation:
    return Conversation(llm, GREEDY, None, None)


def continued(llm: LLM, text: str, tokens: int = TOKENS) -> str:
    """Return the greedy continuation of `text` by the engine, without a conversation."""
    (output,) = llm.generate(text, SamplingParams(temperature=0.0, max_tokens=tokens), use_tqdm=False)
    return output.outputs[0].text


def test_each_turn_goes_on_from_the_ones_before(llm: LLM, chat: Conversation) -> None:
    """Check that each turn continues from the turns before. The pair's template joins contents with newlines."""
    first = "".join(chat.answer(FIRST))
    assert first == continued(llm, FIRST)
    assert "".join(chat.answer(SECOND)) == continued(llm, f"{FIRST}\n{first}\n{SECOND}")
    assert [turn["role"] for turn in chat.messages] == ["user", "assistant"] * 2
    chat.reset()
    assert "".join(chat.answer(SECOND)) == continued(llm, SECOND)


def test_an_answer_is_streamed(chat: Conversation) -> None:
    assert len([part for part in chat.answer(FIRST) if part]) > 2


def test_the_system_prompt_and_another_template(llm: LLM) -> None:
    chat = Conversation(llm, GREEDY, ECHO, "Be brief.")
    assert "".join(chat.answer(FIRST)) == continued(llm, f"[system]Be brief.[user]{FIRST}")


def test_a_closed_answer_is_kept_and_the_engine_goes_on(llm: LLM, chat: Conversation) -> None:
    answer = chat.answer(FIRST)
    part = next(answer)
    while not part:
        part = next(answer)
    answer.close()
    assert chat.messages[-1]["role"] == "assistant"
    assert part in chat.messages[-1]["content"]
    assert not llm.engine.has_unfinished()
    assert "".join(chat.answer(SECOND))


def test_a_conversation_that_is_too_long_is_left_as_it_was(chat: Conversation) -> None:
    list(chat.answer(FIRST))
    kept = list(chat.messages)
    with pytest.raises(InvalidRequestError, match="256"):
        list(chat.answer("x = 1\n" * 200))
    assert chat.messages == kept


def test_drafts_can_be_turned_off_and_on(chat: Conversation) -> None:
    drafted = []
    for word in ("off", "on"):
        assert obey(chat, f"/speculation {word}") == f"Drafts are {word}."
        list(chat.answer(FIRST))
        assert chat.last is not None
        drafted.append(chat.last.metrics.drafts)
    assert drafted[0] == 0
    assert drafted[1] > 0


def test_commands(chat: Conversation) -> None:
    list(chat.answer(FIRST))
    assert obey(chat, "/reset") == "The conversation is empty."
    assert chat.messages == []
    assert obey(chat, "/system") == "No system prompt is set."
    obey(chat, "/system  Be brief. ")
    assert obey(chat, "/system") == chat.system == "Be brief."
    assert obey(chat, "/speculation maybe") == "/speculation maybe: must be on or off"
    assert obey(chat, "/speculation") == "Drafts are on."
    assert obey(chat, "/rest") == "/rest: there is no such command; did you mean /reset?; /help lists the commands"
    assert obey(chat, "/exit") is None
    listed = obey(chat, "/help") or ""
    assert all(name in listed for name in NAMES)


def test_an_engine_without_a_drafter_says_so() -> None:
    llm = LLM(dtype="float32", max_model_len=64, max_num_seqs=1, threads=1, load_format="dummy")
    chat = Conversation(llm, GREEDY, None, None)
    assert obey(chat, "/speculation") == "Drafts are off."
    assert "without --no-speculation" in (obey(chat, "/speculation on") or "")
    assert "".join(chat.answer(FIRST))


def test_lines_of_a_pipe_are_answered_and_figures_go_to_stderr(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{FIRST}\n\n/reset\ndef sub\\\n(a, b):\n/exit\nnot read\n"))
    assert main(["chat", *SETTINGS, "--max-tokens", str(TOKENS), "--no-speculation"]) == 0
    out, err = capsys.readouterr()
    assert out == continued(llm, FIRST) + "\n" + continued(llm, "def sub\n(a, b):") + "\n"
    figures = [line for line in err.splitlines() if line.startswith(f"{TOKENS} tokens; ")]
    assert len(figures) == 2
    shape = r".* first after \d+\.\d\d s, then \d+\.\d tokens/s; nothing drafted; cut by --max-tokens or the context"
    assert all(re.fullmatch(shape, line) for line in figures)


def test_flags_come_before_the_checkpoints_values_and_these_before_greedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_p": 0.9}))
    made: list[Mapping[str, Any]] = []

    class Recorded(Conversation):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self.params)

    monkeypatch.setattr("specrs.cli.chat.conversation.Conversation", Recorded)
    for argv in (["--top-p", "0.5", str(folder)], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        assert main(["chat", *argv, *SETTINGS, "--no-speculation"]) == 0
    assert made == [
        {"temperature": 0.7, "max_tokens": None, "top_p": 0.5},
        {"temperature": 0.0, "max_tokens": None},
    ]


def test_a_bad_line_of_a_pipe_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x = 1\\\n" * 300))
    assert main(["chat", *SETTINGS, "--no-speculation"]) == 2
    assert "256" in capsys.readouterr().err


IN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C in it interrupts this process
from specrs.cli import main
sys.exit(main())
"""


class Session:
    """The command `specrs chat` in a pseudo-terminal, and all that it wrote."""

    def __init__(self, *argv: str) -> None:
        self.keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, "chat", *argv],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"},
        )
        os.close(screen)
        self.shown, self._read = "", 0

    def until(self, wanted: str) -> str:
        """Wait until the screen shows `wanted` after what was waited for before. Return what was written up to it."""
        while wanted not in self.shown[self._read :]:
            assert select.select([self.keyboard], [], [], 120)[0], f"{wanted!r} did not come: {self.shown!r}"
            self.shown += os.read(self.keyboard, 65536).decode()
        end = self.shown.index(wanted, self._read) + len(wanted)
        text = self.shown[self._read : end]
        self._read = end
        return text

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def until_waiting(self) -> None:
        """Wait until the command sleeps, because `input()` notices a signal only while it waits for a key."""
        state = Path(f"/proc/{self.process.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            os.sched_yield()


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Session("--threads", "1")
    yield made
    made.process.kill()
    made.process.wait()
    os.close(made.keyboard)


def test_a_session_in_a_terminal(llm: LLM, session: Session, tmp_path: Path) -> None:
    """Check line editing, an answer and its figures, Ctrl-C in an answer and at the prompt, and Ctrl-D.

    Also check that typed text stays in the process: no history file is written.
    """
    greeting = session.until(">>> ")
    assert "drafts: draft_model, auto per step. /help lists the commands" in greeting
    session.type("/elp\x01\x1b[Ch\n")  # Ctrl-A, right, h: readline makes /help of it
    assert "/speculation [on, off]" in session.until(">>> ")

    session.type(f"{FIRST}\n")
    session.until("\n")  # the echo
    answer = session.until("Return a string")
    assert continued(llm, FIRST).startswith(answer.replace("\r\n", "\n"))
    session.type("\x03")
    assert "ended by Ctrl-C" in session.until(">>> ")
    session.type("nothing")
    session.until("nothing")
    session.until_waiting()
    session.type("\x03")
    session.until("Ctrl-D or /exit ends the chat.")
    session.until(">>> ")
    session.type("\x04")
    assert session.process.wait(60) == 0
    assert [path for path in tmp_path.rglob("*") if "history" in path.name] == []

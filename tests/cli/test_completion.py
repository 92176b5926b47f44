"""`specrs completion`: what bash completes with the script, and that each script has every command and flag."""

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from specrs.cli.completion import SHELLS, script

from .test_help import COMMANDS

PRESS_TAB = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_shtab_specrs specrs "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD - 1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the file with each shell's script."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(script(shell))
    return {shell: folder / shell for shell in SHELLS}


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("specrs ge", ["generate"]),
        ("specrs serve --max-num-", ["--max-num-batched-tokens", "--max-num-queued-reqs", "--max-num-seqs"]),
        ("specrs serve --dtype b", ["bfloat16"]),
        ("specrs chat --kv-cache-dtype fp8_e4", ["fp8_e4m3"]),
        ("specrs bench s", ["serve", "sweep"]),
        ("specrs bench sweep --dry", ["--dry-run"]),
        ("specrs completion f", ["fish"]),
        ("specrs serve --headl", [""]),
    ],
)
def test_bash_completes(scripts: dict[str, Path], typed: str, completed: list[str]) -> None:
    code = PRESS_TAB.format(script=scripts["bash"], words=shlex.join(typed.split(" ")))
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == completed
    assert done.stderr == ""


def test_bash_completes_files_as_models(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    code = PRESS_TAB.format(script=scripts["bash"], words=f"specrs chat {tmp_path}/sm")
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{tmp_path}/small.gguf"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_flag_that_the_help_shows(scripts: dict[str, Path], shell: str) -> None:
    text = scripts[shell].read_text()
    # fish writes them without dashes, after -l
    found = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)|\s-l ([a-z][\w-]*)", text))
    flags = {name for pair in found for name in pair if name}
    for command, made in COMMANDS.items():
        assert command.split()[-1] in text
        for action in made._actions:
            names = {flag.removeprefix("--") for flag in action.option_strings if flag.startswith("--")}
            if action.help != argparse.SUPPRESS:
                assert names <= flags, command
    assert "headless" not in flags, "the help does not show it"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_reads_its_script(scripts: dict[str, Path], shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", str(scripts[shell])], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

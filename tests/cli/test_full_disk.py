"""Commands whose output does not fit on the disk end with one line and an exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "generate": "generate --prompt word --max-tokens 4",
    "bench": "bench acceptance --num-prompts 2 --output-len 4",
    "forecast": "forecast --draft-ms 1 --target-ms 10 --acceptance-rates 0.6,0.4",
    "demo": "demo --k 1 --max-tokens 4",
}
CODE = "import sys; from specrs.cli import main; sys.exit(main())"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_line_and_an_exit_code(name: str) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", CODE, *COMMANDS[name].split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    told = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert [line.partition(": error: ")[2] for line in told] == ["output: No space left on device"], done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_neither_can_be_written() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", CODE, *COMMANDS["forecast"].split()]
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 1

"""The cost of imports: torch takes seconds, so commands that answer at once must not load it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "triton", "matplotlib", "aiohttp", "pyarrow"}


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    "code",
    [
        "import specrs",
        "import specrs; specrs.__version__; specrs.SamplingParams; dir(specrs)",
        "import specrs.core",
        "import specrs.pair, specrs.pair.prompts",
        "import specrs.cli",
        "from specrs.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from specrs.cli import main\ntry: main(['demo', '--help'])\nexcept SystemExit: pass",
        "from specrs.cli import main\ntry: main(['bench', 'serve', '--help'])\nexcept SystemExit: pass",
        "from specrs.cli import main\ntry: main(['forecast', '--help'])\nexcept SystemExit: pass",
        "import specrs.forecast",
        "from specrs.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass",
        "from specrs.cli import main\nmain(['doctor'])",
        "from specrs.cli import main\nmain(['completion', 'bash'])",
        "from specrs.cli import main\ntry: main(['generate', '--max-tokens', 'x'])\nexcept SystemExit: pass",
    ],
)
def test_stays_light(code: str, tmp_path: Path) -> None:
    done = python(f"{code}\nimport sys\nprint('loaded', *sorted({HEAVY!r} & set(sys.modules)))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded"


def test_kernels_have_one_name() -> None:
    assert python("import specrs.kernels", ROOT).returncode == 0
    done = python("import kernels", ROOT)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("ImportError: import specrs.kernels, not kernels")


def test_a_command_imports_no_other(tmp_path: Path) -> None:
    """Check that a command imports no other command: all modules and parsers together take a tenth of a second."""
    code = """
import sys
from specrs.cli import COMMANDS, main
try: main(['generate', '--max-tokens', 'x'])
except SystemExit: pass
modules = {name: f"specrs.cli.{name.replace('-', '_')}" for name in COMMANDS}
print(*(name for name, module in modules.items() if module in sys.modules))
"""
    assert python(code, tmp_path).stdout.split() == ["generate"]

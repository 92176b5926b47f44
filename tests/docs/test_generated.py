"""Each page that a script `scripts/NAME_page.py` prints is `docs/NAME.md`, as `make generate` writes it."""

import re
from http import HTTPStatus
from pathlib import Path

import pytest
from module_files import load_file
from specrs.server import errors

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*_page.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_the_page_is_what_its_script_prints(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(script.parent)
    printed = load_file(script.stem, script).page()
    page = ROOT / f"docs/{script.stem.removesuffix('_page')}.md"
    assert page.read_text() == printed, "run `make generate`"
    assert "run `make generate` after a change" in printed


def test_make_generate_writes_these_pages() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "$(patsubst scripts/%_page.py,%,$(wildcard scripts/*_page.py))" in makefile


def test_the_page_of_errors_has_each_status_of_the_server() -> None:
    listed = re.findall(r"^\| (\d{3}) \| `\w+` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert [HTTPStatus(int(code)) for code in listed] == sorted(errors._TYPES)

"""docs/cli.md has a section for each command. tests/docs/test_generated.py compares the page with its script."""

import re
from pathlib import Path

from specrs.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/cli.md"


def test_each_command_has_a_section_and_a_link_to_it() -> None:
    text = PAGE.read_text()
    headings = re.findall(r"^## `specrs ([\w-]+)`$", text, re.MULTILINE)
    assert headings == list(COMMANDS)
    assert re.findall(r"^\| \[`([\w-]+)`\]\(#specrs-\1\)", text, re.MULTILINE) == headings

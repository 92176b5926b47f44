"""docs/configuration.md has a row for each option. tests/docs/test_generated.py compares the page with its script."""

import re
from pathlib import Path

from module_files import load_file
from specrs.options import options_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/configuration.md"
made = load_file("configuration_page", ROOT / "scripts/configuration_page.py")


def test_the_page_has_a_row_for_each_option() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \| .* \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [name for _, owner, _ in made.SECTIONS for name in options_of(owner)]

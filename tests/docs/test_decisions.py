"""Records of decisions are short and have the parts context, choice, cost and status, in this order."""

import re
from pathlib import Path

import pytest

DECISIONS = Path(__file__).parents[2] / "docs/decisions"
PAGES = sorted(page.stem for page in DECISIONS.glob("*.md") if page.stem != "README")
"""Names of all decision pages but the table of contents."""
PARTS = ["Context", "Choice", "Cost", "Status"]
MAX_WORDS = 250
"""Maximum number of words of a record, without tables."""


@pytest.mark.parametrize("name", PAGES)
def test_each_record_has_its_four_parts(name: str) -> None:
    _, *records = re.split(r"^## ", (DECISIONS / f"{name}.md").read_text(), flags=re.MULTILINE)
    assert records
    for record in records:
        title = record.splitlines()[0]
        assert re.search(r" \(2\d{3}-\d\d-\d\d\)$", title), title
        assert re.findall(r"^\*\*(\w+)\.\*\* \S", record, re.MULTILINE) == PARTS, title
        prose = re.sub(r"^\|.*$", "", record, flags=re.MULTILINE)
        assert len(prose.split()) <= MAX_WORDS, title

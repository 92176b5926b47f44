"""Pages for users are short and plain: words of the README, words of a sentence, and what every such page has."""

import re
from pathlib import Path

import pytest
from module_files import load_file

ROOT = Path(__file__).parents[2]
prose = load_file("prose", ROOT / "scripts/prose.py")
README = ROOT / "README.md"
FOLDERS = ("get_started", "guides", "concepts")
DOCS = ROOT / "docs"
USER_PAGES = [
    README,
    DOCS / "architecture.md",
    *(page for name in FOLDERS for page in sorted(DOCS.glob(f"{name}/*.md"))),
]
PLAIN_PAGES = [*USER_PAGES, DOCS / "start.md", DOCS / "cli.md", DOCS / "configuration.md"]
"""Pages that must have short sentences: pages for users, the first page about the code, and two generated pages."""


def names(pages: list[Path]) -> list[str]:
    return [page.relative_to(ROOT).as_posix() for page in pages]


def test_the_readme_has_at_most_1200_words() -> None:
    assert prose.measure(README.read_text()).words <= 1200


@pytest.mark.parametrize("page", PLAIN_PAGES, ids=names(PLAIN_PAGES))
def test_sentences_are_short(page: Path) -> None:
    found = prose.measure(page.read_text())
    assert len(found.sentences) >= 5
    assert found.median <= 16
    assert found.long <= 0.05


@pytest.mark.parametrize("name", ["cli", "configuration"])
def test_meanings_in_tables_are_short(name: str) -> None:
    """Check the sentences in tables: most text of these pages is the last column of a table, which `measure` leaves
    out."""
    cells = re.findall(r"\| ((?:\\\||[^|])+) \|$", (DOCS / f"{name}.md").read_text(), re.MULTILINE)
    found = prose.measure("\n\n".join(dict.fromkeys(cells)))
    assert len(found.sentences) >= 200
    assert found.median <= 16
    assert found.long == 0


@pytest.mark.parametrize("page", USER_PAGES[1:], ids=names(USER_PAGES[1:]))
def test_a_page_says_for_whom_it_is_and_what_comes_next(page: Path) -> None:
    first, *_, last = page.read_text().partition("\n")[2].strip().split("\n\n")
    assert re.match(r"For (anybody|readers) ", first)
    assert last.startswith("**Next:** ")
    assert "](" in last


@pytest.mark.parametrize("page", USER_PAGES, ids=names(USER_PAGES))
def test_commits_stay_in_benchmarks(page: Path) -> None:
    """Check that no commit hash is on a page for users. A hash has a digit and a letter, which other words of these
    pages do not combine."""
    found = re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b", page.read_text())
    assert found == []


def test_every_page_is_in_the_navigation() -> None:
    """Check that the navigation names every page, and none twice."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nhooks:")[0]
    listed = re.findall(r"[\w/]+\.md", nav)
    there = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(["index.md", *there])


def test_statistics_of_a_page() -> None:
    text = """# A title of many words that is not counted

One two three. Four five: six `seven eight. nine` ten! See [this page](https://example.org/a.b) now?

```sh
not counted at all.
```

| not | counted. |
| --- | --- |

- An item
  of five words
- One e.g. more
"""
    assert prose.measure(text).sentences == (3, 7, 4, 5, 3)
    long = " ".join(["word"] * 36) + ". Short one.\n"
    assert prose.measure(long).long == 0.5
    assert prose.measure("").median == 0


@pytest.mark.parametrize("folder", prose.CODE)
def test_no_docstring_starts_with_a_banned_word(folder: str) -> None:
    checked = prose.banned_starts(ROOT / folder)
    assert checked
    assert [f"{path}:{line}: {text}" for path, found in checked.items() for line, text in found] == []


def test_docstrings_that_start_with_a_banned_word_are_found() -> None:
    source = '''"""Likewise a module."""

X = 1
"""Of a constant."""


class A:
    """The same as B."""

    y: int
    """Office hours are no banned word."""

    def f(self) -> None:
        """See above."""
'''
    assert [line for line, _ in prose.banned_docstrings(source)] == [1, 4, 8, 14]


def test_doc_comments_that_start_with_a_banned_word_are_found() -> None:
    source = """//! Of a module.

/// The same as B,
/// Of which this line is no start.
pub struct A {
    /// Office hours are no banned word.
    pub x: u32,
    /// Likewise.
    pub y: u32,
    // As in ordinary comments.
}
"""
    assert prose.banned_doc_comments(source) == [(1, "Of a module."), (3, "The same as B,"), (8, "Likewise.")]


def test_files_of_all_kinds_are_checked(tmp_path: Path) -> None:
    for name in ("a.py", "b.pyi", "deep/c.py", "d.rs", "target/made.rs", "e.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("/// See A.\n" if name.endswith(".rs") else '"""See A."""\n')
    found = prose.banned_starts(tmp_path)
    names = ["a.py", "b.pyi", "d.rs", "deep/c.py"]
    assert found == {tmp_path / name: [(1, "See A.")] for name in names}

"""Statistics of specrs's prose: words per sentence, words per page, docstrings that start with a banned word. Changes
no file.

    python scripts/prose.py                       # every page: words, sentences, median, share above 35 words
    python scripts/prose.py README.md docs/gpu.md # these pages
    python scripts/prose.py --docstrings          # docstrings per file that start with a banned word

Prose is what is left without code blocks, tables, headings, HTML and pictures. A link counts as its text, a code span
as its words. A sentence ends at `.`, `!` or `?` before white space, at an empty line and with a list item. A colon
inside a paragraph ends none.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
LONG = 35
"""Words above which a sentence counts as long."""
BANNED = ("Of", "Those", "That", "The same", "Like", "As", "See", "Likewise", "What")
"""Words with which no docstring starts: each refers to something that the docstring itself does not name."""
CODE = ("python", "kernels", "tests", "benches", "scripts", "examples", "rust", "fuzz")
"""Folders whose docstrings and Rust doc comments are checked."""

_STARTS = re.compile(rf"(?:{'|'.join(BANNED)})\b")
_QUOTED = re.compile(rf"[\"']\s*{_STARTS.pattern}")
_DOC_COMMENT = re.compile(r"\s*(//[/!])\s*(.*)")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|etc|al)\.")


@dataclass(frozen=True)
class Prose:
    """Word counts of one page. `words` counts the whole file as `wc -w` does, code and tables included."""

    words: int
    sentences: tuple[int, ...]

    @property
    def median(self) -> float:
        """Median number of words of a sentence; 0 for a page without prose."""
        return median(self.sentences) if self.sentences else 0.0

    @property
    def long(self) -> float:
        """Share of sentences with more than `LONG` words, from 0 to 1."""
        return sum(words > LONG for words in self.sentences) / max(len(self.sentences), 1)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page in Markdown, with links reduced to their text."""
    text = re.sub(r"^ *```.*?^ *```", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"`([^`]+)`", lambda match: re.sub(r"[.!?|#]", "-", match[1]), text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(\||#|!!!|:::|---).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(?:[-*+]|\d+\.) +", "\n\n", text, flags=re.MULTILINE)
    text = _ABBREVIATION.sub(r"\1", text)
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])[)*_\"]*\s+", " ".join(paragraph.split())):
            if re.search(r"\w", sentence):
                yield sentence


def measure(text: str) -> Prose:
    """Count the words of a page and of each of its sentences."""
    counts = tuple(len([word for word in one.split() if re.search(r"\w", word)]) for one in sentences(text))
    return Prose(len(text.split()), counts)


def banned_docstrings(source: str) -> list[tuple[int, str]]:
    """List `(line, first line)` of docstrings that start with a banned word. Constants and fields have some, too."""
    found = []
    if not _QUOTED.search(source):  # parsing every file takes seconds
        return found
    for node in ast.walk(ast.parse(source)):
        for each in getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                text = each.value.value.strip()
                if _STARTS.match(text):
                    found.append((each.lineno, text.splitlines()[0]))
    return sorted(found)


def banned_doc_comments(source: str) -> list[tuple[int, str]]:
    """List `(line, first line)` of Rust doc comments, `///` or `//!`, that start with a banned word."""
    found, before = [], ""
    for number, line in enumerate(source.splitlines(), 1):
        kind, text = match.groups() if (match := _DOC_COMMENT.match(line)) else ("", "")
        if kind and kind != before and _STARTS.match(text):
            found.append((number, text))
        before = kind
    return found


def banned_starts(folder: Path) -> dict[Path, list[tuple[int, str]]]:
    """Return the banned docstrings and doc comments of every Python and Rust file in `folder`; empty lists included."""
    checks = {".py": banned_docstrings, ".pyi": banned_docstrings, ".rs": banned_doc_comments}
    return {
        path: checks[path.suffix](path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*"))
        if path.suffix in checks and "target" not in path.relative_to(folder).parts
    }


def pages() -> list[Path]:
    """Return every page: README.md, CONTRIBUTING.md and those in docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages; default: all")
    parser.add_argument("--docstrings", action="store_true", help="count docstrings that start with a banned word")
    args = parser.parse_args()
    if args.docstrings:
        counts = {
            path.relative_to(ROOT): len(found)
            for folder in CODE
            for path, found in banned_starts(ROOT / folder).items()
        }
        for name, count in sorted(counts.items(), key=lambda row: -row[1]):
            if count:
                print(f"{count:5} {name}")
        print(f"{sum(counts.values()):5} in all")
        return
    print(f"{'words':>6} {'sentences':>9} {'median':>6} {'> ' + str(LONG):>6}  page")
    for path in args.pages or pages():
        prose = measure(path.read_text(encoding="utf-8"))
        name = path.resolve().relative_to(ROOT)
        print(f"{prose.words:6} {len(prose.sentences):9} {prose.median:6.0f} {prose.long:6.0%}  {name}")


if __name__ == "__main__":
    main()

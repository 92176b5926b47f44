"""Hooks of the docs site: README.md is its first page, and files of the repository that pages link to are copied.

Changes no page: a link that leaves docs/ names a file that is copied, or becomes what it says where it is a folder.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PICTURE = re.compile(r'(\bsrc(?:set)?=)"docs/')
"""Pattern of a picture in README.md in HTML, which has one for light and one for dark pages."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def _folder(page: str) -> Path:
    """Return the folder of a page's source."""
    return ROOT if page == "index.md" else (ROOT / "docs" / page).parent


def _outside(page: str, text: str) -> dict[str, Path]:
    """Return the links of a page to files of the repository outside docs/: target by link text."""
    found = {}
    for _, _, target, _ in LINK.findall(text):
        path = (_folder(page) / target).resolve()
        if "://" not in target and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs"):
            found[target] = path
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, and what pages link to."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme))
    linked = set()
    for file in files.documentation_pages():
        linked |= {path for path in _outside(file.src_uri, file.content_string).values() if path.is_file()}
    for path in sorted(linked):
        name = f"files/{path.relative_to(ROOT).as_posix()}"
        if path.suffix == ".md":
            name += ".txt"  # not a page of the site
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that leave docs/, so that they lead to the added files, and links of README.md, so that they lead
    to pages of the site."""
    name = page.file.src_uri
    outside = _outside(name, markdown)
    up = "../" * name.count("/")

    def turned(match: re.Match[str]) -> str:
        mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if target in outside:
            path = outside[target]
            suffix = ".txt" if path.suffix == ".md" else ""
            to = f"{up}files/{path.relative_to(ROOT).as_posix()}{suffix}"
            return f"{mark}[{text}]({to})" if path.is_file() else text
        if name == "index.md" and target.startswith("docs/"):
            return f"{mark}[{text}]({target.removeprefix('docs/')}{anchor})"
        return match[0]

    markdown = LINK.sub(turned, markdown)
    return PICTURE.sub(r'\1"', markdown) if name == "index.md" else markdown

"""The picture of docs/architecture.md is what its script draws, and names folders that are there."""

import re
from pathlib import Path
from xml.etree import ElementTree

from module_files import load_file

ROOT = Path(__file__).parents[2]
made = load_file("architecture_picture", ROOT / "scripts/architecture_picture.py")


def test_the_picture_is_what_the_script_draws() -> None:
    assert made.PICTURE.read_text() == made.svg(), "python scripts/architecture_picture.py"
    ElementTree.fromstring(made.svg())


def test_names_lie_in_their_boxes_and_boxes_in_the_picture() -> None:
    for box in made.BOXES:
        assert 0 <= box.x < box.x + box.width <= made.WIDTH
        assert 0 <= box.y < box.y + box.height <= made.HEIGHT
        for text, pixels in ((box.name, 8.5), (box.does, 6.5), (box.folder, 6.5)):  # a letter of 15 or 13 pixels
            assert len(text) * pixels <= box.width, text


def test_folders_are_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    named = {box.folder for box in made.BOXES if box.folder} | set(re.findall(r"^\| \[([\w/-]+)\]", page, re.MULTILINE))
    assert len(named) >= 10
    assert [name for name in named if not (ROOT / name).exists()] == []

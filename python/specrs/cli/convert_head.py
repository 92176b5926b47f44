"""`specrs convert-head`: converts pickled weights of a drafting head to safetensors. Starts no engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from specrs.extras import require

DESCRIPTION = (
    "Convert an EAGLE-3 head with pickled weights (.bin, .pt, .pth) to a folder with safetensors and config.json. "
    "specrs loads heads from such folders, never from pickles. Torch's weights-only loader reads the pickles: "
    "it rebuilds tensors and runs no code."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs convert-head`."""
    parser.add_argument("source", metavar="SOURCE", help="folder or hub id of the head")
    parser.add_argument("output", metavar="FOLDER", type=Path, help="folder to write; must not have safetensors")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def run(arguments: argparse.Namespace) -> None:
    """Convert the weights. Raises `SpecrsError` if they cannot be read or written."""
    require("torch", "transformers", "specrs convert-head")
    from specrs.models.pickles import convert_pickles

    count = convert_pickles(arguments.source, arguments.output, arguments.revision)
    print(f"{count} tensors in {arguments.output}")

"""`specrs convert-head`: pickled weights of a drafting head as safetensors. Starts no engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from specrs.extras import require

SUMMARY = "convert a pickled EAGLE-3 head to safetensors"
DESCRIPTION = (
    "Write the pickled weights (.bin, .pt, .pth) of a head, and its config.json, as a folder with safetensors, which "
    "is what engines read. Pickles are read by torch's weights-only loader, which rebuilds tensors and runs no code."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("source", metavar="SOURCE", help="folder or hub id of the head")
    parser.add_argument("output", metavar="FOLDER", type=Path, help="folder to write; must not have safetensors")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def run(arguments: argparse.Namespace) -> None:
    """Convert. Raises `SpecrsError` for what cannot be read."""
    require("torch", "transformers", "specrs convert-head")
    from specrs.models.pickles import convert_pickles

    count = convert_pickles(arguments.source, arguments.output, arguments.revision)
    print(f"{count} tensors in {arguments.output}")

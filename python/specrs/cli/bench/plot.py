"""`specrs bench plot`: the figures of a sweep's parquet file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specrs.cli.bench import options
from specrs.extras import require

SUMMARY = "figures from a parquet file of a sweep"
DESCRIPTION = (
    "Draw a sweep: 1 speed-up of draft models against concurrency, 2 speed-up against K, 3 other methods against "
    "concurrency, 4 methods at the same K, 5 acceptance length against K, 6 token throughput, 7 99th percentiles of "
    "TTFT, TPOT and ITL."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="parquet file of specrs bench sweep")
    parser.add_argument("--figures", type=options.counts, metavar="LIST", help="which; default: all, 1 to 7")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="default: the file's name without .parquet")
    parser.add_argument("--format", default="png", help="of the files: one of png, svg, pdf; default: png")
    parser.add_argument("--k", type=int, help="K of figures 4, 6 and 7; default: where speed-ups are highest")


def run(arguments: argparse.Namespace) -> None:
    """Draw. Raises `InvalidConfigError` for a file without the columns or the rows that figures need."""
    from specrs.bench.figures import FIGURES, Sweep, draw
    from specrs.bench.results import arrivals_warning, read

    require("matplotlib", "bench", "specrs bench plot")
    rows = read(arguments.file)
    sweep = Sweep(rows, arguments.k)
    folder = arguments.output_dir or arguments.file.with_suffix("")
    paths, left_out = draw(sweep, arguments.figures or FIGURES, folder, arguments.format)
    for path in paths:
        print(path)
    for reason in left_out:
        print(f"left out: {reason}")
    if (warning := arrivals_warning(rows)) is not None:
        print(warning, file=sys.stderr)

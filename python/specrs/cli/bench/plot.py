"""`specrs bench plot`: charts from a sweep's parquet file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specrs.cli.bench import options
from specrs.cli.option_flags import K_FLAGS
from specrs.extras import require

SUMMARY = "figures from a parquet file of a sweep"
DESCRIPTION = (
    "Draw figures of a sweep. Figures 1 and 3 show the speed-up by concurrency, of draft models and of other "
    "methods. Figures 2 and 5 show speed-up and acceptance length by K. Figure 4 compares methods at the same K. "
    "Figure 6 shows token throughput, and figure 7 the 99th percentiles of TTFT, TPOT and ITL."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs bench plot`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="parquet file of specrs bench sweep")
    parser.add_argument("--figures", type=options.counts, metavar="LIST", help="figures to draw; default: all, 1 to 7")
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder of the pictures; default: the file's name without .parquet",
    )
    parser.add_argument("--format", default="png", help="format of the files: one of png, svg, pdf; default: png")
    parser.add_argument(*K_FLAGS, type=int, help="K of figures 4, 6 and 7; default: where speed-ups are highest")


def run(arguments: argparse.Namespace) -> None:
    """Draw the charts. Raises `InvalidConfigError` if the file lacks columns or rows that they need."""
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

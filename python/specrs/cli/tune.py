"""`specrs tune`: times kernel configurations on this machine's GPU and writes the table. Changes no running engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from specrs.errors import InvalidConfigError, check_int, invalid_config

SUMMARY = "time kernel configurations for models on this GPU"
DESCRIPTION = (
    "Time the configurations of the matrix products of one or more models on this machine's CUDA device, and write the "
    "fastest into the table that every engine on such a device reads. Only config.json of a model is needed. An "
    "engine reads the table when it starts; without an entry for its GPU and shape it takes safe defaults."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--model", action="append", required=True, help="checkpoint folder or hub id; may be repeated")
    parser.add_argument("--revision", help="branch, tag or commit of hub ids")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), bfloat16 or float32; default: auto")
    parser.add_argument("--rows", type=int, default=6, help="rows of a product, 1 to 64; default: 6, as K = 5 verifies")
    parser.add_argument("--output", type=Path, help="the table to write; default: the one in the package")


def run(arguments: argparse.Namespace) -> None:
    """Time and write. Raises `SpecrsError` for what can't be done here."""
    rows = check_int(InvalidConfigError, "rows", arguments.rows, 1, 64)
    import torch

    if not torch.cuda.is_available():
        raise invalid_config("device", "cuda", "specrs tune times kernels on a CUDA device, and torch finds none here")
    from tqdm import tqdm

    from specrs.kernels.cuda.configs import TABLE, LinearShape
    from specrs.kernels.cuda.device import limits_of
    from specrs.kernels.cuda.tuning import DeviceTimer, candidates, select, write_table
    from specrs.models.cuda.workspace import linear_shapes
    from specrs.models.loader import load_config, resolve_dtype

    device = torch.device("cuda")
    limits = limits_of(device)
    shapes: dict[str, LinearShape] = {}
    for source in arguments.model:
        config = load_config(source, revision=arguments.revision)
        dtype = resolve_dtype(arguments.dtype, config, device)
        shapes |= {shape.key: shape for shape in linear_shapes(config, dtype).values()}
    output = arguments.output or TABLE
    timer = DeviceTimer(rows, limits, device)
    for shape in tqdm(shapes.values(), desc="Tuning", unit="shape"):
        best, seconds, before = select(shape, candidates(shape, limits), timer)
        write_table(output, limits.name, {shape: best})  # each at once: a run that is cut off keeps what it has
        tqdm.write(f"{shape.key:<40} {1e6 * seconds:8.1f} us, default {1e6 * before:8.1f} us: {best}")
    print(f"{len(shapes)} shapes for {limits.name} in {output}")

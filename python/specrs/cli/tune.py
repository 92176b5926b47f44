"""`specrs tune`: times kernel configurations on this machine's GPU and writes the table. Changes no running engine."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from specrs.backends.cuda.device import CUDA_DTYPES, KIND, require_packages
from specrs.cli.option_flags import add_flags
from specrs.engine_options import DTYPES, EngineOptions
from specrs.errors import InvalidConfigError, check_int, invalid_config
from specrs.options import one_of

if TYPE_CHECKING:
    import torch

    from specrs.kernels.cuda.configs import LinearShape
    from specrs.models.config import ModelConfig

_DTYPES = tuple(name for name in DTYPES if name != "float64")
"""Dtypes in which a GPU computes."""
_PARTS = ("few", "many")
DESCRIPTION = (
    "Time the matrix products of one or more models on this machine's CUDA device, experts included. Write the "
    "fastest configurations into a table, and for products of 65 to 2,048 rows the fastest of cuBLAS, cuBLASLt (with "
    "the extra `cublaslt`) and our kernel. An engine reads the table when it starts; without an entry for its GPU "
    "and shape it takes safe defaults. With --tensor-parallel-size the shapes are those of one rank. Of a model, only "
    "config.json is needed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs tune`."""
    parser.add_argument("--model", action="append", required=True, help="checkpoint folder or hub id; may be repeated")
    add_flags(parser, EngineOptions, "tune")
    parser.add_argument(
        "--dtype", default="auto", help=f"type to compute in: {one_of(_DTYPES)}; default: auto, the checkpoint's"
    )
    parser.add_argument("--rows", type=int, default=6, help="rows of a product, 1 to 64; default: 6, as K = 5 verifies")
    parser.add_argument(
        "--only", choices=_PARTS, help="products of few rows, to 64, or of many, 65 to 2,048; default: both"
    )
    parser.add_argument("--jobs", type=int, help="processes that compile ahead; default: as many as cores")
    parser.add_argument("--output", type=Path, help="the table to write; default: the one in the package")


def run(arguments: argparse.Namespace) -> None:
    """Time the configurations and write the table. Raises `SpecrsError` if there is no GPU that can run them, or a file
    cannot be written."""
    rows = check_int(InvalidConfigError, "rows", arguments.rows, 1, 64)
    size = arguments.tensor_parallel_size
    ranks = 1 if size is None else check_int(InvalidConfigError, "tensor_parallel_size", size, 1, 1024)
    jobs = None if arguments.jobs is None else check_int(InvalidConfigError, "jobs", arguments.jobs, 1, 1024)
    require_packages("specrs tune")
    import torch

    if not torch.cuda.is_available():
        raise invalid_config("device", KIND, "specrs tune times kernels on a CUDA device, and torch finds none here")

    from specrs.backends.cuda.providers import checked_providers
    from specrs.kernels.cuda.configs import TABLE
    from specrs.kernels.cuda.device import limits_of
    from specrs.models.errors import without_states
    from specrs.models.loader import load_config, resolve_dtype
    from specrs.models.shards import check_divides
    from specrs.models.torch_arrays import TORCH_DTYPES

    device = torch.device(KIND)
    limits = limits_of(device)
    shapes: dict[str, LinearShape] = {}
    for source in arguments.model:
        config = load_config(source, revision=arguments.revision)
        without_states(config, "on a GPU")
        dtype = TORCH_DTYPES[resolve_dtype(arguments.dtype, config, CUDA_DTYPES)]
        check_divides(config, source, "tensor_parallel_size", ranks)
        shapes |= {shape.key: shape for shape in rank_shapes(config, dtype, device, ranks)}
    output = arguments.output or TABLE
    if output.exists():
        checked_providers(output)  # before minutes of timing
    if arguments.only != "many":
        tune_few(shapes, rows, jobs, output)
    if arguments.only != "few":
        tune_many(shapes, output)
    print(f"{len(shapes)} shapes for {limits.name} in {output}")


def rank_shapes(config: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: int) -> list[LinearShape]:
    """Return the products with the part of the weights that each of `ranks` ranks holds. Raises UnsupportedModelError
    for a model that several ranks cannot compute on GPUs."""
    from specrs.backends.cuda.experts import expert_shapes
    from specrs.backends.cuda.workspace import layer_shapes
    from specrs.models.shards import Shard, check_gpu_parts

    if ranks > 1:
        check_gpu_parts(config, "tensor_parallel_size", ranks)
    held = Shard(0, ranks).of_config(config)
    shapes = layer_shapes(held, dtype, device)
    shapes["lm_head"] = [replace(shape, n=-(-config.vocab_size // ranks)) for shape in shapes["lm_head"]]
    return [*chain.from_iterable(shapes.values()), *expert_shapes(held, dtype).values()]


def tune_few(shapes: Mapping[str, LinearShape], rows: int, jobs: int | None, output: Path) -> None:
    """Time the configurations of products of up to 64 rows, and write the fastest into the table."""
    import torch
    from tqdm import tqdm
    from triton.runtime import driver

    from specrs.backends.cpu.threads import physical_cores
    from specrs.kernels.cuda.compile_ahead import compile_ahead
    from specrs.kernels.cuda.device import limits_of
    from specrs.kernels.cuda.tuning import DeviceTimer, compile_trial, trials, tune, write_table

    device = torch.device(KIND)
    limits = limits_of(device)
    work = trials(shapes.values(), rows, limits)
    target = driver.active.get_current_target()
    compiled = compile_ahead(compile_trial, work, target, jobs or physical_cores())
    bar = tqdm(compiled, desc="Compiling and timing", total=len(work), unit="kernel")
    for tuned in tune(bar, work, DeviceTimer(rows, limits, device)):
        key = tuned.shape.key
        for cut, error in tuned.failed:
            tqdm.write(f"{key}: {cut} does not compile: {error}")
        if math.isinf(tuned.seconds):
            tqdm.write(f"{key}: no configuration runs here")
            continue
        write_table(output, limits.name, {tuned.shape: tuned.config})  # after each, so that an interrupt loses none
        us, default_us = 1e6 * tuned.seconds, 1e6 * tuned.default_seconds
        tqdm.write(f"{key:<40} {us:8.1f} us, default {default_us:8.1f} us: {tuned.config}")


def tune_many(shapes: Mapping[str, LinearShape], output: Path) -> None:
    """Time who computes products of 65 to 2,048 rows fastest, and write it into the table."""
    import torch

    from specrs.backends.cuda.cublaslt import CublasLt
    from specrs.backends.cuda.many_rows import ManyRowsTimer, measure
    from specrs.backends.cuda.providers import write_providers
    from specrs.extras import has, install_command
    from specrs.kernels.cuda.device import limits_of

    device = torch.device(KIND)
    limits = limits_of(device)
    if not has("cublaslt"):
        print(f"cuBLASLt is not timed; {install_command('cublaslt')}")
    timer = ManyRowsTimer(limits, device, CublasLt.load(device))
    for measured in measure(shapes.values(), timer):
        write_providers(output, limits.name, {measured.shape: {measured.rows: measured.choice}})
        times = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in measured.by_provider.items())
        print(f"{measured.shape.key:<32} {measured.rows:5} rows: {times}: {measured.choice.provider}")

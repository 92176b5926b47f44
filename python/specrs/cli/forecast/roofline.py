"""`specrs forecast --roofline`: predicts passes, K and batch sizes of a pair on a GPU that need not be present.
Measures nothing."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specrs.backends.cuda.device import require_packages
from specrs.cli.output import write_json
from specrs.errors import InvalidConfigError, check_int, invalid_config

if TYPE_CHECKING:
    from specrs.forecast import Forecast
    from specrs.forecast.roofline import Pass, Roofline

_LONGEST_CONTEXT = 1 << 24


def run(arguments: argparse.Namespace) -> None:
    """Print, draw and write the forecast. Raises `InvalidConfigError` for an option that is missing or wrong."""
    require_packages("specrs forecast --roofline")
    from specrs.backends.cuda.providers import Providers
    from specrs.cli.forecast.one_model import acceptance
    from specrs.forecast import forecast, lengths_beyond, lengths_up_to, report
    from specrs.forecast.roofline import Roofline, gpu_of
    from specrs.models.errors import about, with_equal_layers, without_interleaved_rope, without_states
    from specrs.models.loader import load_config
    from specrs.pair import DRAFT, TARGET

    gpu = replace(gpu_of(arguments.roofline), products=arguments.products)
    if arguments.model is not None and arguments.draft_model is None:
        raise invalid_config("--draft-model", None, "must be given with --model")
    known = acceptance(arguments)
    lengths = lengths_up_to(arguments.max_k or max(known), known)
    context = check_int(InvalidConfigError, "--context", arguments.context, 1, _LONGEST_CONTEXT)
    target = load_config(arguments.model or TARGET)
    with about("draft_model", "revision"):
        draft = load_config(arguments.draft_model or DRAFT)
    for config in (target, draft):
        without_states(config, "for specrs forecast --roofline")
        with_equal_layers(config, "for specrs forecast --roofline")
        without_interleaved_rope(config, "for specrs forecast --roofline")
    size = arguments.draft_vocab_size
    if size is not None:
        size = check_int(InvalidConfigError, "--draft-vocab-size", size, 1, draft.vocab_size)
    if arguments.products is not None and not Providers.of(gpu.torch_name, arguments.products).entries:
        raise invalid_config(
            "--products",
            str(arguments.products),
            f"must have entries for {gpu.torch_name} in many_rows; run specrs tune there, or leave it out",
        )
    roofline = Roofline(
        gpu,
        target,
        draft,
        arguments.quantization,
        arguments.draft_quantization,
        context,
        arguments.kv_cache_dtype,
        size,
    )
    batches = arguments.batch
    model = roofline.cost_model(batches, len(lengths))
    print(f"{gpu.name}: {gpu.tb_per_s:g} TB/s, {gpu.bf16_tflops:g} bf16 TFLOPS; {context} positions a request")
    print(_passes(roofline, batches[0], len(lengths)))
    beyond = lengths_beyond(len(lengths), known)
    found = [forecast(model, lengths, batch, f"{gpu.name}, batch {batch}", beyond) for batch in batches]
    print("\n" + report.table(found[0]))
    if len(found) > 1:
        print("\n" + _batches(roofline, found))
        print(report.break_even(model.break_even_batch(lengths), batches))
    needed = roofline.memory_gb(batches[-1])
    if needed > gpu.memory_gb:
        print(f"\n{needed:.0f} GB of weights and KV at batch {batches[-1]} do not fit in {gpu.memory_gb:g} GB")
    if arguments.plot is not None:
        from specrs.forecast.plot import draw

        draw(found[:2], arguments.plot, title=f"Forecast for one {gpu.name}")
        print(f"\npicture: {arguments.plot}")
    if arguments.json is not None:
        write_json("--json", arguments.json, _record(roofline, found, len(lengths)))


def _passes(roofline: Roofline, batch: int, k: int) -> str:
    """Return a table with a row for each kind of pass."""
    lines = [f"{'pass':<28}{'rows':>6}{'kernels':>9}{'GB':>9}{'TFLOP':>9}{'ms':>9}"]
    for name, work in _kinds(roofline, batch, k).items():
        lines.append(
            f"{name:<28}{work.rows:>6}{work.kernels:>9}{work.bytes / 1e9:>9.2f}{work.flops / 1e12:>9.3f}"
            f"{work.ms(roofline.gpu):>9.2f}"
        )
    lines.append(f"an iteration at K = {k} has {roofline.kernels(batch, k)} kernels and one launch")
    return "\n".join(lines)


def _kinds(roofline: Roofline, batch: int, k: int) -> dict[str, Pass]:
    return {
        "draft": roofline.draft_pass(batch),
        "target": roofline.target_pass(batch, 0),
        f"target verifying K = {k}": roofline.target_pass(batch, k),
    }


def _batches(roofline: Roofline, found: list[Forecast]) -> str:
    """Return a table with a row for each batch size."""
    lines = [f"{'batch':>6}{'GB':>8}{'K = 0 (ms)':>12}{'best K':>8}{'TPOT (ms)':>11}{'speed-up':>10}{'tokens/s':>11}"]
    for item in found:
        best = item.best
        lines.append(
            f"{item.batch:>6}{roofline.memory_gb(item.batch):>8.1f}{item.rows[0].itl_ms:>12.2f}{best.k:>8}"
            f"{best.tpot_ms:>11.3f}{best.speedup:>9.3f}x{1e3 * item.batch / best.tpot_ms:>11.0f}"
        )
    return "\n".join(lines)


def _record(roofline: Roofline, found: list[Forecast], k: int) -> dict[str, Any]:
    from specrs.forecast import report

    gpu = roofline.gpu
    return {
        "gpu": gpu.name,
        "context": roofline.context,
        "passes": [
            {
                "batch": item.batch,
                "pass": name,
                "rows": work.rows,
                "kernels": work.kernels,
                "bytes": work.bytes,
                "flops": work.flops,
                "ms": work.ms(gpu),
            }
            for item in found
            for name, work in _kinds(roofline, item.batch, k).items()
        ],
        "forecasts": [report.record(item) for item in found],
    }

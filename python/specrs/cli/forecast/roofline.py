"""`specrs forecast --roofline`: predicts passes, K and batch sizes of a pair on a GPU that need not be present.
Measures nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from specrs.backends.cuda.device import require_packages
from specrs.cli.output import write_json
from specrs.errors import InvalidConfigError, check_int, invalid_config

if TYPE_CHECKING:
    from specrs.forecast import Forecast
    from specrs.forecast.roofline import Pass, Roofline
    from specrs.forecast.steady import SteadyState

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
    served = _lengths(arguments)
    context = check_int(InvalidConfigError, "--context", arguments.context, 1, _LONGEST_CONTEXT)
    if served is not None:
        context = served[0] + served[1] // 2
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
    loads: list[_Load] = []
    if served is not None:
        loads = _loads(roofline, batches, lengths, *served)
        print("\n" + _loads_table(loads, *served))
    needed = roofline.memory_gb(batches[-1])
    if needed > gpu.memory_gb:
        print(f"\n{needed:.0f} GB of weights and KV at batch {batches[-1]} do not fit in {gpu.memory_gb:g} GB")
    if arguments.plot is not None:
        from specrs.forecast.plot import draw

        draw(found[:2], arguments.plot, title=f"Forecast for one {gpu.name}")
        print(f"\npicture: {arguments.plot}")
    if arguments.json is not None:
        write_json("--json", arguments.json, _record(roofline, found, loads, len(lengths)))


@dataclass(frozen=True, slots=True)
class _Load:
    """Predictions for one number of requests that are replaced when they end."""

    states: list[SteadyState]
    """At K = 0, 1, ...."""
    auto_k: int
    """K that `auto` chooses."""

    @property
    def best(self) -> SteadyState:
        """State of the best K that drafts."""
        return max(self.states[1:], key=lambda state: state.tokens_per_s)


def _lengths(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """Return `--input-len` and `--output-len`, or None if neither is given. Raises `InvalidConfigError` for one without
    the other, for a wrong value, and for a context next to them."""
    given = {"--input-len": arguments.input_len, "--output-len": arguments.output_len}
    if all(value is None for value in given.values()):
        return None
    for name, other in zip(given, reversed(given), strict=True):
        if given[name] is None:
            raise invalid_config(name, None, f"must be given with {other}")
        check_int(InvalidConfigError, name, given[name], 1, _LONGEST_CONTEXT)
    if arguments.context != arguments.parser.get_default("context"):
        reason = "has no meaning with --output-len, by which requests have their mean length; leave it out"
        raise invalid_config("--context", arguments.context, reason)
    return arguments.input_len, arguments.output_len


def _loads(
    roofline: Roofline, batches: Sequence[int], lengths: Sequence[float], input_len: int, output_len: int
) -> list[_Load]:
    """Return the predictions for each number of requests in `batches`."""
    from specrs.forecast.steady import StepCosts, auto_k, shares_of, steady_state
    from specrs.model_values import DEFAULT_MAX_NUM_SEQS

    shares, seqs = shares_of(lengths), max(DEFAULT_MAX_NUM_SEQS, *batches)
    costs = [StepCosts.of_engine(roofline, k, input_len, max_num_seqs=seqs) for k in range(len(lengths) + 1)]
    return [
        _Load([steady_state(each, batch, output_len, shares) for each in costs], auto_k(costs, batch, shares))
        for batch in batches
    ]


def _loads_table(loads: Sequence[_Load], input_len: int, output_len: int) -> str:
    """Return a table of the throughput without drafts, at the best K, and at the K that `auto` chooses."""
    lines = [
        f"requests that are replaced when they end: {input_len} tokens in, {output_len} out; tokens/s",
        f"{'requests':>8}{'K = 0':>12}{'best K':>8}{'':>10}{'ratio':>9}{'auto':>6}{'':>10}{'ratio':>9}"
        "  steps with prompts that need no pass of their own",
    ]
    for load in loads:
        plain, best, auto = load.states[0], load.best, load.states[load.auto_k]
        lines.append(
            f"{plain.concurrency:>8}{plain.tokens_per_s:>12,.0f}"
            f"{best.k:>8}{best.tokens_per_s:>10,.0f}{best.tokens_per_s / plain.tokens_per_s:>8.2f}x"
            f"{auto.k:>6}{auto.tokens_per_s:>10,.0f}{auto.tokens_per_s / plain.tokens_per_s:>8.2f}x"
            f"  K = 0: {plain.merged:.0%}, best K: {best.merged:.0%}"
        )
    return "\n".join(lines)


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


def _record(roofline: Roofline, found: list[Forecast], loads: list[_Load], k: int) -> dict[str, Any]:
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
        "steady": [
            {
                "concurrency": load.best.concurrency,
                "best_k": load.best.k,
                "auto_k": load.auto_k,
                "states": [asdict(state) for state in load.states],
            }
            for load in loads
        ],
    }

"""`specrs forecast`: predicts the speed-up at every K from pass times, from a sweep, or from measurements on this
machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from specrs.cli.arguments import MergeSettings, drafts_list, floats, pairs, sizes
from specrs.cli.option_flags import K_FLAGS, MODEL, add_flags, add_speculation_flags, drafting_flag
from specrs.engine_options import EngineOptions
from specrs.errors import InvalidConfigError, check_int, invalid_config
from specrs.model_values import AT_LOAD, KV_CACHE_DTYPES
from specrs.options import one_of

DESCRIPTION = (
    "Forecast time per output token, TPOT = (T_d * K + T_t) / AL, and the speed-up of every K. T_d and T_t are "
    "the times of a pass of draft and target. They are given, fitted to the ITL of a sweep, measured here, or "
    "computed for a GPU. The acceptance lengths AL are given or measured."
)

_CACHED = tuple(name for name in KV_CACHE_DTYPES if name != "float16")
"""Types of the KV cache that a bf16 model may have."""
_CONTEXT = 1024
_GIVEN = {"vanilla_ms", "compare", "names", "acceptance_lengths", "acceptance_rates"}
_USES = {
    "--sweep": {"sweep", "fit_k", "draft_model", "concurrency"},
    "--measure": {
        "measure", "model", "draft_model", "speculative_config", "k", "max_tokens", "num_prompts", "rounds", "dtype",
        "device", "threads", "compare", "names",
    },
    "--itl": {"itl", *_GIVEN},
    "--roofline": {
        "roofline", "model", "draft_model", "batch", "context", "quantization", "draft_quantization",
        "draft_vocab_size", "kv_cache_dtype", "products", "acceptance_lengths", "acceptance_rates", "input_len",
        "output_len",
    },
    "--target-ms": {"target_ms", "draft_ms", "observed_tpot", "model", *_GIVEN},
}  # fmt: skip
"""For each source of times, the options that only apply to it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the source of pass times, the source of acceptance, and the output."""
    times = parser.add_argument_group("times")
    times.add_argument("--draft-ms", type=float, metavar="MS", help="T_d, a pass of the draft")
    times.add_argument("--target-ms", type=float, metavar="MS", help="T_t, a pass of the target")
    times.add_argument("--vanilla-ms", type=float, metavar="MS", help="TPOT without drafts; default: T_t")
    times.add_argument(
        "--observed-tpot",
        type=pairs,
        metavar="K=MS",
        help="as in 4=10.46: instead of --draft-ms, the T_d that this TPOT implies",
    )
    times.add_argument("--itl", type=pairs, metavar="K=MS,...", help="instead of both: a line through ITL at several K")
    times.add_argument(
        "--compare", type=floats, metavar="T_d,T_t[,VANILLA]", help="a second cost model, set next to the first"
    )
    times.add_argument("--names", default="inside,alone", help="names of the two cost models; default: inside,alone")
    accepted = parser.add_argument_group("acceptance")
    accepted.add_argument(
        "--acceptance-lengths",
        metavar="LIST",
        help="AL at K = 1, 2, ... as in 1.8,2.4,2.9, or at some K as in 1=1.8,4=3.28; a geometric curve gives the rest",
    )
    accepted.add_argument(
        "--acceptance-rates", type=floats, metavar="LIST", help="shares accepted per position instead"
    )
    sweep = parser.add_argument_group("from a sweep")
    sweep.add_argument("--sweep", type=Path, metavar="FILE", help="parquet file of specrs bench sweep")
    sweep.add_argument(
        "--fit-k",
        type=drafts_list,
        metavar="LIST",
        help="look at the rows of these K only, and compare with the others",
    )
    sweep.add_argument("--draft-model", help="drafter whose rows are read; default: each; with --measure: the draft")
    sweep.add_argument(
        "--concurrency", type=int, help="concurrency whose rows are read, with a table of every K; default: each"
    )
    computed = parser.add_argument_group("computed for a GPU")
    computed.add_argument(
        "--roofline",
        metavar="GPU",
        help="times from bytes, flops and kernels of --model and --draft-model on a GPU: one of H100, H200, B200, RTX "
        "4090, DGX Spark; config.json of a model is enough",
    )
    computed.add_argument(
        "--batch",
        type=sizes,
        default=[1, 4, 16, 64, 256],
        metavar="LIST",
        help="requests of a batch; default: 1,4,16,64,256",
    )
    computed.add_argument(
        "--input-len",
        type=int,
        metavar="N",
        help="tokens of a prompt: also predict the throughput of a server whose requests are replaced when they end",
    )
    computed.add_argument("--output-len", type=int, metavar="N", help="tokens of an output, with --input-len")
    computed.add_argument(
        "--context",
        type=int,
        default=_CONTEXT,
        help=f"positions of a request; default: {_CONTEXT}, with --input-len the mean of a request",
    )
    for name, of in (("--quantization", "target"), ("--draft-quantization", "draft")):
        shown = f"type of the {of}'s projections; {one_of(AT_LOAD)}; default: bf16"
        computed.add_argument(name, choices=AT_LOAD, help=shown)
    computed.add_argument("--draft-vocab-size", type=int, metavar="N", help="ids that the draft drafts; default: all")
    computed.add_argument(
        "--kv-cache-dtype",
        choices=_CACHED,
        default="auto",
        help=f"type of the KV cache; {one_of(_CACHED)}; default: auto, bf16",
    )
    computed.add_argument(
        "--products",
        type=Path,
        metavar="FILE",
        help="table of products that specrs tune wrote for this GPU; default: the one in the package",
    )
    measured = parser.add_argument_group("measured here")
    measured.add_argument("--measure", action="store_true", help="each model alone and inside speculation, batch 1")
    measured.add_argument(
        "--model",
        help=f"target: {MODEL}; default: the bundled pair, in float32. With --target-ms, T_t is the time of one row. A "
        "verification adds the time of the experts that its other rows read",
    )
    measured.add_argument(
        "--speculative-config", "-sc", action=MergeSettings, metavar="JSON", help="how to draft, without K (see --k)"
    )
    add_speculation_flags(measured, "forecast", own_k=True)
    measured.add_argument(
        *K_FLAGS, type=drafts_list, default=[1, 3, 5], metavar="LIST", help="K to run; default: 1,3,5"
    )
    measured.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt; default: 128")
    measured.add_argument("--num-prompts", type=int, default=4, help="number of bundled prompts; default: 4")
    measured.add_argument("--rounds", type=int, default=3, help="times that the settings take turns; default: 3")
    add_flags(measured, EngineOptions, "forecast")
    parser.add_argument("--max-k", type=int, help="largest K of the forecast; default: the largest measured or given")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw TPOT against K, and the regression")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file that the numbers are also written to")


def run(arguments: argparse.Namespace) -> None:
    """Forecast and print. Raises `InvalidConfigError` for an option that is missing or wrong."""
    if arguments.plot is not None:
        from specrs.cli.output import check_picture

        check_picture(arguments.plot)
    if arguments.max_k is not None:
        check_int(InvalidConfigError, "--max-k", arguments.max_k, 1, 64)
    sources = {
        "--sweep": arguments.sweep is not None,
        "--measure": arguments.measure,
        "--itl": arguments.itl is not None,
        "--target-ms": arguments.target_ms is not None,
        "--roofline": arguments.roofline is not None,
    }
    given = [name for name, present in sources.items() if present]
    if len(given) != 1:
        found = f"not {' and '.join(given)} together" if given else "none is given"
        raise InvalidConfigError(f"pass times: must come from one of {', '.join(sources)}; {found}")
    for option in sorted(vars(arguments).keys() & set().union(*_USES.values()) - _USES[given[0]]):
        value = getattr(arguments, option)
        if value != arguments.parser.get_default(option):
            flag = f"--{option.replace('_', '-')}"
            if option == "speculative_config":
                flag, value = drafting_flag(value)
            raise invalid_config(flag, value, f"has no meaning with {given[0]}; leave it out")
    if arguments.sweep is not None:
        from specrs.cli.forecast import sweep

        sweep.run(arguments)
    elif arguments.roofline is not None:
        from specrs.cli.forecast import roofline

        roofline.run(arguments)
    else:
        from specrs.cli.forecast import one_model

        one_model.run(arguments)

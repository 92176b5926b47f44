"""`specrs bench acceptance`: acceptance lengths over a data set, for several K and temperatures."""

from __future__ import annotations

import argparse
from pathlib import Path

from specrs.cli.arguments import drafts_list, floats
from specrs.cli.bench import options
from specrs.cli.option_flags import K_FLAGS, drafter_without_k
from specrs.cli.output import write_json

SUMMARY = "acceptance length over a data set, by K and temperature"
DESCRIPTION = (
    "Complete a data set at several K and temperatures on an engine in this process. Report the acceptance "
    "length, the acceptance rate, and the share of drafts accepted up to each position."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs bench acceptance`."""
    options.add_engine(parser, own_k=True)
    options.add_dataset(parser, "bundled", "50")
    parser.add_argument(
        *K_FLAGS, type=drafts_list, default=[1, 3, 5], metavar="LIST", help="numbers of draft tokens; default: 1,3,5"
    )
    parser.add_argument(
        "--temperature", type=floats, default=[0.0, 1.0], metavar="LIST", help="temperatures; default: 0,1"
    )
    options.add_sampling(parser, top_p=1.0)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    parser.add_argument("--skip-chat-template", action="store_true", help="send instructions as text to continue")
    parser.add_argument(
        "--output-json", type=Path, metavar="FILE", help="JSON file that the numbers are also written to"
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print. Raises `SpecrsError` for wrong options, and if a request is rejected."""
    from specrs.bench import datasets
    from specrs.bench.offline import acceptance
    from specrs.speculative_config import for_repeats

    config = options.dataset(arguments, "bundled", 50)
    drafter = for_repeats(drafter_without_k(arguments))  # of the same prompts at every K and temperature
    speculative = {**drafter, "num_speculative_tokens": max(arguments.k)}
    llm = options.engine(arguments, speculative_config=speculative)
    assert llm.tokenizer is not None
    samples = datasets.load(config, llm.tokenizer)
    params = options.sampling_params(arguments, samples)
    prompts = options.prompts(samples, llm.tokenizer, not arguments.skip_chat_template)
    points = acceptance(llm, prompts, params, arguments.k, arguments.temperature, not arguments.disable_tqdm)
    engine = llm.engine.config
    assert engine.speculative_config is not None
    method = engine.speculative_config.method
    # Of a list the drafters: each row counts the drafts of all of them.
    target, draft = _name(engine.target), _name(engine.draft or method) if "," not in method else method
    width = max(len(target), len(draft), 6) + 2
    print(f"{config.label}, {config.num_prompts} prompts")
    print(
        f"{'Target':<{width}}{'Draft':<{width}}{'K':>3}{'Temperature':>13}{'AL':>7}{'rate (%)':>10}   per position (%)"
    )
    for point in points:
        statistics = point.figures
        shares = " ".join(f"{100 * share:5.1f}" for share in statistics.per_position[: point.k])
        print(
            f"{target:<{width}}{draft:<{width}}{point.k:>3}{point.temperature:>13.1f}{statistics.acceptance_length:>7.2f}"
            f"{100 * statistics.acceptance_rate:>10.1f}   {shares}"
        )
    if arguments.output_json is not None:
        rows = [
            {
                "target": target,
                "draft": draft,
                "k": point.k,
                "temperature": point.temperature,
                "acceptance_length": point.figures.acceptance_length,
                "acceptance_rate": point.figures.acceptance_rate,
                "per_position": point.figures.per_position[: point.k],
                "drafts": point.figures.drafts,
            }
            for point in points
        ]
        write_json("--output-json", arguments.output_json, {"dataset": config.label, "rows": rows})


def _name(model: str) -> str:
    from specrs.pair import DRAFT, EAGLE3, TARGET

    if Path(model) in (TARGET, DRAFT, EAGLE3):
        return f"bundled {Path(model).name}"
    return model.rstrip("/").rpartition("/")[2]

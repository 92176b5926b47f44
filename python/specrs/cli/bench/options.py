"""Options that several kinds of measurement share: data sets, engines, and output files. Measures nothing."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.bench.client import BACKENDS
from specrs.cli.option_flags import add_flag, add_flags, add_speculation_flags, given_options
from specrs.engine_options import EngineOptions
from specrs.errors import InvalidConfigError, invalid_config
from specrs.options import one_of, options_of
from specrs.sampling import SamplingParams

if TYPE_CHECKING:
    from specrs.bench.datasets import DatasetConfig, Sample
    from specrs.llm import LLM
    from specrs.tokenizer import Tokenizer


BACKEND = f"API of the server: {one_of(BACKENDS)}; openai and vllm are completions; default: openai"
"""Help text of flags that name the API to measure."""


def add_dataset(parser: argparse.ArgumentParser, default: str, num_prompts: str) -> None:
    """Add the flags that choose the prompts, under vLLM's names."""
    from specrs.bench.datasets import NAMES

    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--dataset-name",
        choices=NAMES,
        default=None,
        help=f"source of the prompts: {one_of(NAMES)}; hf: a hub data set, or a file in a known format. Files of the "
        f"last four have one format each; default: {default}, or hf with --dataset-path",
    )
    group.add_argument("--dataset-path", metavar="PATH", help="a .json or .jsonl file, or a hub name")
    group.add_argument("--hf-split", help="split of a hub data set; default: train")
    group.add_argument("--hf-subset", help="subset of a hub data set")
    group.add_argument("--num-prompts", type=int, help=f"number of prompts; default: {num_prompts}")
    group.add_argument("--input-len", type=int, help="tokens that prompts are cut to; random prompts have as many")
    group.add_argument("--output-len", type=int, help="tokens to generate; default: the data set's")
    group.add_argument("--random-input-len", type=int, help="--input-len of random prompts; default: 1024")
    group.add_argument("--random-output-len", type=int, help="--output-len of random prompts; default: 128")
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="spread of random lengths; default: 0")
    group.add_argument("--seed", type=int, default=0, help="seed of the prompts and of arrivals; default: 0")


def dataset(arguments: argparse.Namespace, default: str, num_prompts: int) -> DatasetConfig:
    """Return the data set that the options name. Raises `InvalidConfigError` for options that contradict each other or
    lack a file."""
    from specrs.bench.datasets import DatasetConfig

    name = arguments.dataset_name or ("hf" if arguments.dataset_path else default)
    for option, value, given_by_default, kind in (
        ("--random-range-ratio", arguments.random_range_ratio, 0.0, "random"),
        ("--hf-split", arguments.hf_split, None, "hf"),
        ("--hf-subset", arguments.hf_subset, None, "hf"),
    ):
        if value != given_by_default and name != kind:
            raise invalid_config(option, value, f"is for --dataset-name {kind}")
    lengths = {}
    for field in ("input_len", "output_len"):
        given, own = getattr(arguments, field), getattr(arguments, f"random_{field}")
        option = f"--random-{field.replace('_', '-')}"
        if own is not None and name != "random":
            raise invalid_config(option, own, "is for --dataset-name random")
        if own is not None and given is not None and own != given:
            raise invalid_config(option, own, f"must agree with --{field.replace('_', '-')}={given}")
        lengths[field] = own if given is None else given
    return DatasetConfig(
        name=name,
        path=arguments.dataset_path,
        num_prompts=num_prompts if arguments.num_prompts is None else arguments.num_prompts,
        range_ratio=arguments.random_range_ratio,
        seed=arguments.seed,
        hf_split=arguments.hf_split,
        hf_subset=arguments.hf_subset,
        **lengths,
    )


def add_engine(parser: argparse.ArgumentParser, *, own_k: bool = False) -> None:
    """Add the flags of an engine in this process. Its prefix caching is off by default, so that no run speeds up the
    next. `own_k`: the command has `--k`."""
    group = parser.add_argument_group("engine")
    add_flags(group, EngineOptions, "bench", enable_prefix_caching=False)
    add_speculation_flags(group, "bench", own_k=own_k)


def add_sampling(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Add flags for some sampling parameters to `parser`. `defaults` maps each parameter's name to its default."""
    for name, default in defaults.items():
        add_flag(parser, options_of(SamplingParams)[name], default)


def engine(arguments: argparse.Namespace, **settings: Any) -> LLM:
    """Build the engine that the options describe, with prefix caching off unless the user asks for it. `settings`
    override options."""
    from specrs.cli.threads import set_torch_threads
    from specrs.llm import LLM

    bundled = arguments.model is None
    set_torch_threads(arguments.threads, bundled=bundled)
    values = given_options(arguments, EngineOptions, "bench")
    if bundled and values.get("dtype", "auto") == "auto":
        values["dtype"] = "float32"
    return LLM(**(values | settings))


def prompts(samples: Sequence[Sample], tokenizer: Tokenizer, template: bool = True) -> list[list[int]]:
    """Return the token ids of each sample. A user's turn goes through the chat template if there is one and `template`
    is set."""
    ids = []
    for sample in samples:
        if not isinstance(sample.prompt, str):
            ids.append(list(sample.prompt))
        elif sample.instruction and template and tokenizer.chat_template:
            text = tokenizer.render_chat([{"role": "user", "content": sample.prompt}])
            ids.append(tokenizer.encode(text, add_special_tokens=False))
        else:
            ids.append(tokenizer.encode(sample.prompt))
    return ids


def percentiles(text: str) -> list[float]:
    """Parse `50,99` as percentiles."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 0 to 100, such as 50,99")
    return values


def counts(text: str) -> list[int]:
    """Parse `1,4,8` as different integers of at least 0."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or len(set(values)) < len(values) or min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different integers, such as 1,4,8")
    return values


def trace_folder(path: Path) -> Path:
    """Create the folder for profiler traces and return it. Raises `InvalidConfigError` if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfigError(f"--profile-dir={path}: cannot be made: {error.strerror}") from None
    return path


def sampling_params(arguments: argparse.Namespace, samples: Sequence[Sample], **more: Any) -> list[SamplingParams]:
    """Return sampling parameters for each sample, each with its own seed. `more` are fields in addition to those of the
    options."""
    return [
        SamplingParams(
            top_p=arguments.top_p,
            max_tokens=sample.output_len,
            ignore_eos=arguments.ignore_eos,
            seed=arguments.seed + i,
            detokenize=False,
            **more,
        )
        for i, sample in enumerate(samples)
    ]

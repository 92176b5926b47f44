"""Options that several kinds of measurement share: data sets, engines, where numbers go. Checks nothing by itself."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.cli.arguments import MergeJSON, human_int
from specrs.errors import InvalidConfigError, invalid_config

if TYPE_CHECKING:
    from specrs.bench.datasets import DatasetConfig, Sample
    from specrs.llm import LLM
    from specrs.sampling import SamplingParams
    from specrs.tokenizer import Tokenizer


def add_dataset(parser: argparse.ArgumentParser, default: str, num_prompts: str) -> None:
    """Which prompts, by vLLM's names."""
    from specrs.bench.datasets import NAMES

    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--dataset-name",
        choices=NAMES,
        default=None,
        help="random tokens, the bundled prompts, a hub data set or file (hf), or a file of one form; "
        f"default: {default}, or hf with --dataset-path",
    )
    group.add_argument("--dataset-path", metavar="PATH", help="a .json or .jsonl file, or a hub name")
    group.add_argument("--hf-split", help="split of a hub data set; default: train")
    group.add_argument("--hf-subset", help="subset of a hub data set")
    group.add_argument("--num-prompts", type=int, help=f"default: {num_prompts}")
    group.add_argument("--input-len", type=int, help="cut prompts to so many tokens; random ones have as many")
    group.add_argument("--output-len", type=int, help="tokens to generate; default: the data set's")
    group.add_argument("--random-input-len", type=int, help="--input-len of random prompts; default: 1024")
    group.add_argument("--random-output-len", type=int, help="--output-len of random prompts; default: 128")
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="spread of random lengths; default: 0")
    group.add_argument("--seed", type=int, default=0, help="of the prompts and of arrivals; default: 0")


def dataset(arguments: argparse.Namespace, default: str, num_prompts: int) -> DatasetConfig:
    """The data set that the options name. Raises `InvalidConfigError`."""
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


def add_engine(parser: argparse.ArgumentParser) -> None:
    """An engine in this process, by vLLM's names."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", help="checkpoint folder or hub id; default: the bundled pair")
    group.add_argument("--revision", help="branch, tag or commit of the hub id")
    group.add_argument("--tokenizer", help="default: the model's")
    group.add_argument("--speculative-config", action=MergeJSON, metavar="JSON", help="as for specrs generate")
    group.add_argument("--device", default="auto", help="default: auto")
    group.add_argument("--dtype", default="auto", help="default: auto, float32 for the bundled pair")
    group.add_argument(
        "--max-model-len", type=human_int, help="tokens of prompt and output together; default: the model's"
    )
    group.add_argument("--max-num-seqs", type=int, default=256, help="requests at once; default: 256")
    group.add_argument(
        "--max-num-batched-tokens", type=human_int, default=2048, help="tokens of one launch; default: 2048"
    )
    group.add_argument("--gpu-memory-utilization", type=float, help="share of the GPU's memory to use")
    group.add_argument("--kv-cache-memory-bytes", type=int, help="bytes of KV cache")
    group.add_argument("--kv-cache-dtype", help="auto, fp8, fp8_e4m3 or fp8_e5m2; default: auto")
    group.add_argument("--block-size", type=int, help="positions of a KV block")
    group.add_argument("--num-gpu-blocks-override", type=int, help="KV blocks, whatever the device")
    group.add_argument("--launch-depth", type=int, help="launches planned and not yet settled, 1 or 2")
    group.add_argument("--model-impl", help="auto, specrs or transformers")
    group.add_argument("--quantization", "-q", help="int8 or int4, on a CPU; default: none")
    group.add_argument("--cpu-bf16-rows", action="store_true", help="on a CPU: products of bf16 pairs")
    group.add_argument("--cuda-fp8-rows", action="store_true", help="on a GPU: FP8 weights times rows in FP8")
    group.add_argument("--cpu-prefill", help="exact or torch: what computes long prompts on a CPU; default: exact")
    group.add_argument("--load-format", help="auto, safetensors, or dummy for random weights")
    group.add_argument("--tensor-parallel-size", "-tp", type=int, help="processes that compute the target together")
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=False)
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")


def engine(arguments: argparse.Namespace, **settings: Any) -> LLM:
    """The engine that the options describe. Prefix caching is off unless asked for, so that no run helps the next."""
    from specrs.cli.threads import few_threads
    from specrs.llm import LLM

    dtype = arguments.dtype
    if arguments.model is None:
        few_threads()
        dtype = "float32" if dtype == "auto" else dtype
    names = (
        "revision",
        "tokenizer",
        "speculative_config",
        "device",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_cache_dtype",
        "block_size",
        "num_gpu_blocks_override",
        "launch_depth",
        "load_format",
        "model_impl",
        "quantization",
        "cpu_bf16_rows",
        "cuda_fp8_rows",
        "cpu_prefill",
        "tensor_parallel_size",
        "enable_prefix_caching",
        "enforce_eager",
    )
    # what was not given is the engine's to choose
    values = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return LLM(model=arguments.model, dtype=dtype, **(values | settings))


def prompts(samples: Sequence[Sample], tokenizer: Tokenizer, template: bool = True) -> list[list[int]]:
    """Token ids of each sample; a user's turn goes through the chat template where there is one and it is wanted."""
    ids = []
    for sample in samples:
        if not isinstance(sample.prompt, str):
            ids.append(list(sample.prompt))
        elif sample.instruction and template and tokenizer.hf.chat_template:
            text = tokenizer.render_chat([{"role": "user", "content": sample.prompt}])
            ids.append(tokenizer.encode(text, add_special_tokens=False))
        else:
            ids.append(tokenizer.encode(sample.prompt))
    return ids


def percentiles(text: str) -> list[float]:
    """`50,99` as percentiles."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 0 to 100, such as 50,99")
    return values


def counts(text: str) -> list[int]:
    """`1,4,8` as different integers, none negative."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or len(set(values)) < len(values) or min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different integers, such as 1,4,8")
    return values


def trace_folder(path: Path) -> Path:
    """The folder for profiler traces, made. Raises `InvalidConfigError` where that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfigError(f"--profile-dir={path}: cannot be made: {error.strerror}") from None
    return path


def sampling_params(arguments: argparse.Namespace, samples: Sequence[Sample], **more: Any) -> list[SamplingParams]:
    """One for each sample, each with a seed of its own; `more` are fields beside those of the options."""
    from specrs.sampling import SamplingParams

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

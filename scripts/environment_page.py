"""Prints docs/environment.md: the environment variables that matter to specrs. See `make generate`.

`OWN` is their only list. tests/docs/test_environment.py compares it with what the code reads.
"""

from __future__ import annotations

from collections.abc import Iterator

HEAD = """# Environment variables

This page is generated from a table that a test compares with the code: run `make generate` after a change of the table.

For anybody who configures a process from outside, such as a container or a service unit. Most settings are flags:
[configuration](configuration.md) lists them.
"""
OWN = {
    "Engine and commands": {
        "SPECRS_NUM_THREADS": "CPU threads of the engine, if `threads` is not given. An empty value is an error.",
        "SPECRS_ISA": "Instruction set of native passes on a CPU: a name that `specrs doctor` lists, other than `amx`; "
        "it also shows the one in use. Default: the fastest that the processor has. Text does not change, except with "
        "`cpu_activations` of `bf16` or `cpu_prefill` of `amx`.",
        "OMP_NUM_THREADS": "Threads of torch, and of a rank without the setting above. `--threads` sets it. "
        "Without both, commands set it to 1 for the bundled pair.",
        "NO_COLOR": "`specrs chat` prints its figures in the ordinary colour.",
        "CC": "C compiler that Triton uses on a GPU. Default: `cc`, `gcc` or `clang`, whichever is there.",
    },
    "Server": {
        "SPECRS_API_KEY": "A key that requests may carry, next to those of `--api-key`.",
        "VLLM_API_KEY": "The same as `SPECRS_API_KEY`.",
        "VLLM_LOG_STATS_INTERVAL": "Seconds between two lines of statistics in the log. Default: 10.",
    },
    "Traces": {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "`grpc`, the default, or `http/protobuf`.",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "The protocol, if the variable above is not set.",
        "OTEL_SERVICE_NAME": "Name of the service in the traces. Default: `specrs`.",
        "OTEL_RESOURCE_ATTRIBUTES": "Attributes of the service; `service.name=...` among them replaces `specrs`.",
    },
    "Ranks under torchrun": {
        "RANK": "Rank of this process. torchrun sets this variable and the five below.",
        "WORLD_SIZE": "Number of ranks. It must equal `tensor_parallel_size`.",
        "LOCAL_RANK": "Number of this rank on its machine, and of its GPU.",
        "LOCAL_WORLD_SIZE": "Number of ranks on this machine. They share its cores and memory.",
        "MASTER_ADDR": "Address at which the ranks meet.",
        "MASTER_PORT": "Port at which the ranks meet.",
    },
    "NVIDIA Dynamo": {
        "DYN_DISCOVERY_BACKEND": "How workers find each other. Default: `etcd`.",
        "DYN_REQUEST_PLANE": "How requests travel. Default: `tcp`.",
    },
    "Benchmarks": {
        "OPENAI_API_KEY": "Key that `specrs bench` sends to the server that it measures.",
    },
}
"""Environment variables that specrs reads, with their meaning, by heading."""
OTHERS = {
    "HF_TOKEN": "huggingface_hub: token for gated and private models.",
    "HF_HOME": "huggingface_hub: folder of downloads and of the token. Default: `~/.cache/huggingface`.",
    "HF_HUB_CACHE": "huggingface_hub: folder of downloads. Default: `hub` in `HF_HOME`.",
    "HF_HUB_OFFLINE": "huggingface_hub: `1` uses what was downloaded before, and asks no server.",
    "HF_ENDPOINT": "huggingface_hub: address of the hub or of a mirror.",
    "CUDA_VISIBLE_DEVICES": "CUDA: the GPUs that a process sees.",
    "TRITON_CACHE_DIR": "Triton: folder of compiled kernels. Default: `~/.triton/cache`.",
    "OTEL_EXPORTER_OTLP_HEADERS": "OpenTelemetry: headers that traces are sent with.",
    "OTEL_TRACES_SAMPLER": "OpenTelemetry: which requests are traced.",
    "PROMETHEUS_DISABLE_CREATED_SERIES": "prometheus_client: `True` leaves out the metrics that end in `_created`.",
}
"""Environment variables that libraries read in the same process. No test checks this table."""


def page() -> str:
    """Return the text of the page."""
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    for title, variables in OWN.items():
        yield from table(f"## {title}\n", variables)
    yield from table("## Read by libraries\n\nspecrs leaves these to the libraries named here.\n", OTHERS)
    yield "Variables of tests are in [testing](testing.md)."


def table(intro: str, variables: dict[str, str]) -> Iterator[str]:
    """Yield `intro` and a table of `variables`."""
    yield f"{intro}\n| variable | meaning |\n| --- | --- |"
    yield from (f"| `{name}` | {meaning} |" for name, meaning in variables.items())
    yield ""


if __name__ == "__main__":
    print(page(), end="")

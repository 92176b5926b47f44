"""Packages that only some features need, and the error if one is missing. Imports none of them.

`pip install specrs` installs what a CPU needs. Each extra in pyproject.toml adds the packages of one feature.
"""

from __future__ import annotations

from importlib.util import find_spec

from specrs.errors import InvalidConfigError

EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cuda": ("NVIDIA GPUs", ("torch", "triton")),
    "cublaslt": ("products of many rows on NVIDIA GPUs, by algorithms of cuBLASLt", ("nvmath",)),
    "transformers": ("models that only transformers has code for, on a CPU", ("torch", "transformers")),
    "bench": ("load on a server, sweeps, pictures", ("aiohttp", "matplotlib", "pyarrow")),
    "kv-events": ("publishing what is in the prefix cache", ("zmq",)),
    "otel": ("traces of a server's requests", ("opentelemetry.sdk", "opentelemetry.exporter.otlp")),
    "ray": ("replicas as an application of Ray Serve", ("ray",)),
}
"""Extras of pyproject.toml by name. Each has its purpose, and the modules of its packages."""


def has(extra: str) -> bool:
    """Return True if all modules of an extra are installed. Imports none of them, except parent packages."""
    try:
        return all(find_spec(module) is not None for module in EXTRAS[extra][1])
    except ModuleNotFoundError:  # the package that a module would lie in
        return False


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra."""
    return f"pip install 'specrs[{extra}]'"


def require(package: str, extra: str, what: str) -> None:
    """Check that a package is installed, without importing it.

    `package` is its top-level module, `extra` the extra of pyproject.toml that installs it. `what` is the command or
    the field that needs it, such as `specrs tune` or `--plot=out.png`.

    Raises:
        InvalidConfigError: the package is missing. The message has the `pip install` line.
    """
    if find_spec(package) is None:
        raise missing(package, extra, what)


def missing(package: str, extra: str, what: str) -> InvalidConfigError:
    """Return the error that `require` raises. `package` is only shown here, and may be any name."""
    return InvalidConfigError(f"{what}: needs {package}; install it: {install_command(extra)}")

"""Packages that only some features need, and the error for a missing one. Imports none of them.

`pip install specrs` installs what a CPU needs. Each extra in pyproject.toml adds the packages of one feature.
"""

from __future__ import annotations

from importlib.util import find_spec

from specrs.errors import InvalidConfigError


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
    return InvalidConfigError(f"{what}: needs {package}; install it: pip install 'specrs[{extra}]'")

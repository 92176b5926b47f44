"""Packages that only some engines need, and the errors of engines that miss them. Imports none of them."""

from __future__ import annotations

import importlib.util

from specrs.errors import InvalidConfigError, UnsupportedConfigError, invalid


def is_installed(package: str) -> bool:
    """Return whether `package` can be imported. Does not import it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module of that name has no spec
        return False


def check_installed(
    packages: tuple[str, ...],
    field: str,
    value: object,
    why: str,
    extra: str,
    remedy: str,
    error: type[InvalidConfigError] = UnsupportedConfigError,
) -> None:
    """Raise `error` naming `field` where one of `packages` is missing: `why` it is needed, the extra that has it, and
    what works without."""
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        names = " and ".join(missing)
        raise invalid(error, field, value, f"{why} needs {names}; run pip install 'specrs[{extra}]', or {remedy}")

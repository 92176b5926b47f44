"""Reads a `curl` command line and returns the request that curl would send, without curl. Holds no tests.

From curl's manual: `-d` alone makes a POST of a form, and several are joined by `&`. `--json` sends and accepts JSON. A
given header replaces curl's own.
"""

from __future__ import annotations

import getopt
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_FORM = "application/x-www-form-urlencoded"
_JSON = "application/json"
_LONG = ["data=", "data-raw=", "data-binary=", "json=", "header=", "request=", "url=", "no-buffer", "silent", "fail"]
_SHORT = "d:H:X:NsfS"
_QUIET = {"-N", "--no-buffer", "-s", "--silent", "-S", "-f", "--fail"}
"""Options that change only what curl prints."""


@dataclass
class Request:
    """A request as sent to the server. `url` has a scheme; header names are in lower case."""

    method: str
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None

    @property
    def path(self) -> str:
        """Path and query of the URL."""
        parts = urlsplit(self.url)
        return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def read(words: Sequence[str]) -> Request:
    """Return the request that `curl` with these arguments sends. Raises `ValueError` for options that this reader does
    not know, and without a URL."""
    try:
        options, urls = getopt.gnu_getopt(list(words), _SHORT, _LONG)
    except getopt.GetoptError as fault:
        raise ValueError(f"curl {' '.join(words)}: {fault}") from None
    headers = {"accept": "*/*", "user-agent": "curl/8.5.0"}
    given: dict[str, str] = {}
    parts: list[str] = []
    method = None
    for option, value in options:
        if option in ("-d", "--data", "--data-raw", "--data-binary", "--json"):
            if value.startswith("@"):
                raise ValueError(f"{option} {value}: files are not read here")
            parts.append(("" if option == "--json" or not parts else "&") + value)
            headers |= {"content-type": _JSON, "accept": _JSON} if option == "--json" else {}
            headers.setdefault("content-type", _FORM)
        elif option in ("-H", "--header"):
            name, _, text = value.partition(":")
            given[name.strip().lower()] = text.strip()
        elif option in ("-X", "--request"):
            method = value
        elif option == "--url":
            urls.append(value)
        elif option not in _QUIET:
            raise ValueError(f"curl {option}: is not known here")
    if len(urls) != 1:
        raise ValueError(f"curl {' '.join(words)}: has {len(urls)} URLs")
    url = urls[0] if "://" in urls[0] else f"http://{urls[0]}"
    return Request(method or ("POST" if parts else "GET"), url, headers | given, "".join(parts).encode() or None)

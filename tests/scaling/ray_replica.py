"""A replica of Ray Serve that records which requests it gets. Holds no tests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrs.integrations.ray import Replica
from specrs.server import app

NOTES = "SPECRS_TEST_NOTES"
"""Environment variable with the path of a file, to which each replica adds a line per request: its process, and the
request's name."""


class NotingReplica(Replica):
    """Replica whose answers have ids that end in `@process`, so that a client sees which one answered."""

    def __init__(self, engine: Mapping[str, Any], server: Mapping[str, Any]) -> None:
        given = app._request_id

        def noted(scope: Any) -> str:
            name = given(scope)
            with Path(os.environ[NOTES]).open("a") as notes:
                notes.write(f"{os.getpid()} {name}\n")
            return f"{name}@{os.getpid()}"

        app._request_id = noted
        super().__init__(engine, server)


def given_to(notes: Path, process: int) -> set[str]:
    """Return the names of the requests that this process got."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    return {name for of, name in lines if of == str(process)}

"""Data files that are not committed. They are in the folder that SPECRS_DATA names; without it tests are skipped."""

import os
from pathlib import Path

import pytest


def data_file(name: str) -> Path:
    """Return the path of a data set. Skips the test if there is no folder; fails if the folder lacks the file."""
    folder = os.environ.get("SPECRS_DATA")
    if not folder:
        pytest.skip("SPECRS_DATA is not set: it names a folder with data sets that are not committed")
    path = Path(folder) / name
    assert path.is_file(), f"SPECRS_DATA={folder} has no {name}"
    return path

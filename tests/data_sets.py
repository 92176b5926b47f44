"""Files that are not committed: the folder named by SPECRS_DATA, or a skip that says so."""

import os
from pathlib import Path

import pytest


def data_file(name: str) -> Path:
    """The path of a data set; skips the test where the folder is not there, fails where the file is missing in it."""
    folder = os.environ.get("SPECRS_DATA")
    if not folder:
        pytest.skip("SPECRS_DATA is not set: it names a folder with data sets that are not committed")
    path = Path(folder) / name
    assert path.is_file(), f"SPECRS_DATA={folder} has no {name}"
    return path

"""Loads Python files that belong to no package as modules: scripts, benches, changed copies of a kernel. Holds no
tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_file(name: str, path: Path) -> ModuleType:
    """Load the file at `path` as the module `name`, and register it, because dataclasses look up their annotations
    there."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

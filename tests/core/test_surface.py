"""What the extension exports: names, classes, stubs, and what importing it costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import specrs
from specrs import _core, core

STUB = Path(specrs.__file__).with_name("_core.pyi")
EXPORTED = {name for name in dir(_core) if not name.startswith("_")}
CLASSES = sorted(name for name in EXPORTED if isinstance(getattr(_core, name), type))
ERRORS = [name for name in CLASSES if issubclass(getattr(_core, name), BaseException)]
PYCLASSES = [name for name in CLASSES if name not in ERRORS]


def test_every_exported_name_is_in_the_stub_and_in_specrs_core() -> None:
    tree = ast.parse(STUB.read_text())
    declared = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    declared |= {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert declared == EXPORTED
    assert set(core.__all__) == EXPORTED == set(_core.__all__)
    assert all(getattr(core, name) is getattr(_core, name) for name in EXPORTED)


def test_everything_in_the_stub_has_a_docstring() -> None:
    tree = ast.parse(STUB.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert [node.name for node in nodes if not ast.get_docstring(node)] == []


def test_the_classes_are_known() -> None:
    assert PYCLASSES == [
        "AcceptanceTracker",
        "BlockHasher",
        "BlockPool",
        "CachedDrafter",
        "CostModel",
        "Sampler",
        "Scheduler",
        "SlotMapper",
        "SpeculationPlanner",
    ]


INSTANCES = [
    core.AcceptanceTracker(3),
    core.BlockHasher(),
    core.BlockPool(2),
    core.CachedDrafter(max_model_len=8),
    core.CostModel([1], [0, 1], [[2.0, 3.0]]),
    core.Sampler(8),
    core.Scheduler(max_num_seqs=1, max_model_len=8, num_blocks=2, block_size=4, max_num_batched_tokens=4),
    core.SlotMapper(4),
    core.SpeculationPlanner(max_num_seqs=1, num_speculative_tokens=1, costs=core.CostModel([1], [0, 1], [[2.0, 3.0]])),
]


@pytest.mark.parametrize("instance", INSTANCES, ids=PYCLASSES)
def test_classes_are_frozen(instance: object) -> None:
    cls = type(instance)
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Derived", (cls,), {})
    readable = [name for name in dir(cls) if not name.startswith("_") and not callable(getattr(cls, name))]
    for name in [*readable, "anything"]:
        with pytest.raises(AttributeError):
            setattr(instance, name, 1)
    assert repr(instance).startswith(cls.__name__ + "(")


def test_pyclass_attributes_declare_frozen_in_rust() -> None:
    """Without `frozen`, two threads in one object raise instead of waiting for each other; only the source tells."""
    sources = (Path(__file__).parents[2] / "rust" / "py" / "src").glob("*.rs")
    attributes = [
        line.strip() for path in sources for line in path.read_text().splitlines() if line.startswith("#[pyclass")
    ]
    assert len(attributes) == len(PYCLASSES)
    assert all("frozen" in attribute for attribute in attributes)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_form_one_tree(name: str) -> None:
    error = getattr(_core, name)
    assert issubclass(error, core.SpecrsError)
    assert error.__module__ == "specrs._core"
    assert error.__doc__
    assert issubclass(error, ValueError) == (name in {"InvalidConfigError", "InvalidRequestError"})


def test_constants() -> None:
    assert (core.PLAN_IDLE, core.PLAN_LAUNCH, core.PLAN_SETTLE_FIRST) == (0, 1, 2)
    assert (core.FLAG_TARGET_NON_FINITE, core.FLAG_DRAFT_NON_FINITE, core.FLAG_CAPACITY) == (1, 2, 4)
    reasons = (core.FINISH_NONE, core.FINISH_STOP, core.FINISH_LENGTH, core.FINISH_ABORT, core.FINISH_ERROR)
    assert reasons == (0, 1, 2, 3, 4)
    purposes = (core.PURPOSE_DRAFT, core.PURPOSE_ACCEPT, core.PURPOSE_RECOVER, core.PURPOSE_GUMBEL)
    assert purposes == (0, 1, 2, 3)


def test_import_needs_no_torch() -> None:
    code = "import sys, specrs.core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

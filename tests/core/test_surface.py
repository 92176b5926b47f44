"""Exports of the extension: names, classes, stubs, and what importing it costs."""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import specrs
from specrs import _core, core

from core import cpu_parts

STUB = Path(specrs.__file__).with_name("_core.pyi")
ROOT = Path(__file__).parents[2]
EXPORTED = {name for name in dir(_core) if not name.startswith("_")}
CLASSES = sorted(name for name in EXPORTED if isinstance(getattr(_core, name), type))
ERRORS = [name for name in CLASSES if issubclass(getattr(_core, name), BaseException)]
PYCLASSES = [name for name in CLASSES if name not in ERRORS]


def test_every_exported_name_is_in_the_stub_and_in_specrs_core() -> None:
    tree = ast.parse(STUB.read_text())
    # Protocols are what callers implement: the extension has no such classes.
    nodes = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    declared = {node.name for node in nodes if not (isinstance(node, ast.ClassDef) and "Protocol" in _bases(node))}
    declared |= {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {name for name in declared if not name.startswith("_")} == EXPORTED
    assert set(core.__all__) == EXPORTED == set(_core.__all__)
    assert all(getattr(core, name) is getattr(_core, name) for name in EXPORTED)


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def test_everything_in_the_stub_has_a_docstring() -> None:
    tree = ast.parse(STUB.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert [node.name for node in nodes if not ast.get_docstring(node)] == []


def seen_by_a_host() -> tuple[core.RequestView, dict[type, object]]:
    """Return objects that only a scheduler makes: a view of a request, an event of each class, and a batch of
    events."""
    scheduler = core.Scheduler(
        max_num_seqs=1,
        max_model_len=8,
        num_blocks=2,
        block_size=4,
        max_num_batched_tokens=8,
        enable_kv_cache_events=True,
    )
    record, results, settled = (
        np.zeros(size, np.int64) for size in (scheduler.record_size, scheduler.results_size, scheduler.settled_size)
    )
    results[scheduler.results_layout()["num_emitted"][0]] = 1
    events: dict[type, object] = {}
    for request_id in range(3):
        scheduler.add_request(request_id, np.arange(request_id, request_id + 5), limit=7)
        view = scheduler.request(request_id)
        for reason in (core.FINISH_NONE, core.FINISH_LENGTH):
            assert scheduler.plan(record) == core.PLAN_STEP
            results[scheduler.results_layout()["finish_reason"][0]] = reason
            scheduler.settle(int(record[core.HEADER_FIELDS.index("step_id")]), results, settled)
            batch = scheduler.take_kv_event_batch()
            if batch is not None:
                events |= {type(event): event for event in [batch, *batch.events()]}
    scheduler.reset_prefix_cache()
    events |= {type(event): event for event in scheduler.take_kv_events()}
    return view, events


def store() -> core.KVStore:
    """Return a KV store in a temporary folder, which is deleted as soon as the store is open. Nothing is written to
    it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        sizes = {"max_bytes": 1 << 20, "segment_bytes": 1 << 16, "owner": os.geteuid()}
        return core.KVStore(folder, bytes(32), fresh_key=bytes(16), **sizes)


def test_the_classes_are_known() -> None:
    assert PYCLASSES == [
        "AcceptanceTracker",
        "AllBlocksCleared",
        "BlockHasher",
        "BlockPool",
        "BlockRemoved",
        "BlockStored",
        "CachedDrafter",
        "CostModel",
        "CpuDecoder",
        "CpuIteration",
        "CpuKVCache",
        "CpuLora",
        "CpuPool",
        "CpuWeights",
        "HiddenDrafter",
        "HostDrafter",
        "KVEventBatch",
        "KVStore",
        "NgramProposer",
        "Output",
        "Outputs",
        "PackedMatrix",
        "RequestSampling",
        "RequestView",
        "Sampler",
        "Scheduler",
        "SharedKVDrafter",
        "SlotMapper",
        "SpeculationPlanner",
        "SuffixCache",
        "TextDrafter",
        "TokenDecoder",
    ]


TOKENIZER = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
SEEN, EVENTS = seen_by_a_host()
INSTANCES = [
    core.AcceptanceTracker(3),
    EVENTS[core.AllBlocksCleared],
    core.BlockHasher(),
    core.BlockPool(2),
    EVENTS[core.BlockRemoved],
    EVENTS[core.BlockStored],
    core.CachedDrafter(max_model_len=8),
    core.CostModel([1], [0, 1], [[2.0, 3.0]]),
    cpu_parts.model()[0],
    core.CpuIteration(cpu_parts.scheduler(), cpu_parts.state(), cpu_parts.model()),
    core.CpuKVCache(cpu_parts.kv_layers()),
    core.CpuLora(cpu_parts.weights(), [{"qkv": [], "o": [], "gate_up": [], "down": [], "experts": []}]),
    core.CpuPool(1),
    cpu_parts.weights(),
    core.HiddenDrafter(max_model_len=8, max_draft_lag=4),
    core.HostDrafter("suffix", max_tree_depth=4),
    EVENTS[core.KVEventBatch],
    store(),
    core.NgramProposer(),
    core.Output(0, [1]),
    core.Outputs(),
    core.PackedMatrix("Q8_0", np.zeros((1, 34), np.uint8)),
    core.RequestSampling(),
    SEEN,
    core.Sampler(8),
    core.Scheduler(max_num_seqs=1, max_model_len=8, num_blocks=2, block_size=4, max_num_batched_tokens=4),
    core.SharedKVDrafter(max_model_len=8),
    core.SlotMapper(4),
    core.SpeculationPlanner(max_num_seqs=1, num_speculative_tokens=1, costs=core.CostModel([1], [0, 1], [[2.0, 3.0]])),
    core.SuffixCache(),
    core.TextDrafter(),
    core.TokenDecoder(TOKENIZER),
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
    """Check that every class declares `frozen` in Rust. Without it, two threads in one object raise instead of waiting
    for each other."""
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
    (declared,) = (node for node in ast.parse(STUB.read_text()).body if getattr(node, "name", "") == name)
    assert error.__doc__ == ast.get_docstring(declared)
    assert issubclass(error, ValueError) == (name in {"InvalidConfigError", "InvalidRequestError"})


def test_constants() -> None:
    assert (core.PLAN_IDLE, core.PLAN_STEP, core.PLAN_SETTLE_FIRST) == (0, 1, 2)
    assert (core.FLAG_TARGET_NON_FINITE, core.FLAG_DRAFT_NON_FINITE, core.FLAG_CAPACITY) == (1, 2, 4)
    assert (core.FLAG_NOTHING_DRAFTED, core.FLAG_NO_TOKEN_ALLOWED) == (8, 16)
    reasons = (core.FINISH_NONE, core.FINISH_STOP, core.FINISH_LENGTH, core.FINISH_ABORT, core.FINISH_ERROR)
    assert reasons == (0, 1, 2, 3, 4)
    assert (core.DRAFTERS, core.DRAFTER_DEVICE) == (("device", "ngram", "suffix", "prediction", "grammar"), 0)
    purposes = (core.PURPOSE_DRAFT, core.PURPOSE_ACCEPT, core.PURPOSE_RECOVER, core.PURPOSE_GUMBEL)
    assert purposes == (0, 1, 2, 3)


def test_import_needs_no_torch() -> None:
    code = "import sys, specrs.core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def rust_constants() -> dict[str, float]:
    """Return every plain number that `rust/core` names as a constant, by name. If the planner has the same name, its
    value counts."""
    sources = sorted((ROOT / "rust/core/src").rglob("*.rs"), key=lambda path: "planner" in path.parts)
    found: dict[str, float] = {}
    for path in sources:
        for name, value in re.findall(r"^(?:pub )?const (\w+): \w+ = ([\d_.]+);", path.read_text(), re.MULTILINE):
            found[name] = float(value.replace("_", ""))
    return found


def test_constants_in_the_stub_are_the_codes() -> None:
    """Check the constants in the stub against Rust's. The stub writes a tuned number as `0.5 % (`MARGIN`)` or `64
    (`PATIENCE`)`, so that this test finds it."""
    text, known = " ".join(STUB.read_text().split()), rust_constants()
    stated = re.findall(r"([\d.]+)( %)? \(`([A-Z_]{2,})`", text)
    assert {name for _, _, name in stated} >= {"MARGIN", "MIXED_MARGIN", "PROBE_SHARE", "TRIAL_SHARE"}
    for value, percent, name in stated:
        assert float(value) / (100 if percent else 1) == pytest.approx(known[name]), name
    assert len(re.findall(r"\d %", text)) == sum(bool(percent) for _, percent, _ in stated), "a share without its name"


def bounds() -> list[tuple[str, str, int, int]]:
    """Return class, setting, minimum and maximum for every range such as `1 to 65536` in a constructor's
    documentation."""
    found = []
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            new = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__new__"]
            text = " ".join((ast.get_docstring(new[0]) or "").split()) if new else ""
            for name, least, most in re.findall(r"\b([a-z_]+): [^.:]*?\b(\d+) to (\d{2,})\b", text):
                found.append((node.name, name, int(least), int(most)))
    return found


VALID = {
    "Output": {"request_id": 0, "prompt_token_ids": [1]},
    "Scheduler": {
        "max_num_seqs": 1, "max_model_len": 8, "num_blocks": 2, "block_size": 4, "max_num_batched_tokens": 4,
    },
    "SpeculationPlanner": {
        "max_num_seqs": 1, "num_speculative_tokens": 1, "costs": core.CostModel([1], [0, 1], [[2.0, 3.0]]),
    },
}  # fmt: skip


@pytest.mark.parametrize(("cls", "name", "least", "most"), bounds())
def test_bounds_in_the_stub_are_the_codes(cls: str, name: str, least: int, most: int) -> None:
    make = getattr(core, cls)
    make(**VALID[cls] | {name: least})
    for outside in (least - 1, most + 1):
        with pytest.raises(core.InvalidConfigError, match=name):
            make(**VALID[cls] | {name: outside})


def test_bounds_are_found() -> None:
    assert len(bounds()) >= 5

"""`specrs doctor`: what it finds on this machine and on made-up ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from specrs.cli import main
from specrs.cli.doctor import lines, machine, served
from specrs.core import cpu_instruction_sets
from specrs.instruction_sets import start_pool

GPU = {"name": "NVIDIA H100", "memory_GiB": 80.0, "compute_capability": "9.0", "driver": "570.1"}
MACHINE: dict[str, Any] = {"memory_GiB": {"total": 16.0, "available": 10.0}, "GPUs": []}


def test_the_findings_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["numpy"][0].isdigit()
    assert found["machine"]["instruction_sets"] == cpu_instruction_sets()
    assert found["machine"]["instruction_sets"][-1] == "portable"
    assert found["machine"]["instruction_set_in_use"] == start_pool(1).instructions
    assert 0 < found["machine"]["memory_GiB"]["available"] <= found["machine"]["memory_GiB"]["total"]
    assert "Llama 2" in found["serves"]["models"]


def test_the_text_has_what_the_json_has(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(len(line) <= 70 for line in text.splitlines())
    for part in ("versions", "machine", "serves"):
        assert all(name.replace("_", " ") in text for name in found[part])
    assert all(item["command"] in text for item in found["missing"])


def test_nvidia_smi_says_which_gpus_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 81920, 9.0, 570.1'\necho 'Tesla T4, 15360, 7.5, 570.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.gpus() == [GPU, GPU | {"name": "Tesla T4", "memory_GiB": 15.0, "compute_capability": "7.5"}]
    tool.write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    assert machine.gpus() == []


def test_a_container_has_the_memory_of_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{1 << 28}\n")
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", limit)
    assert machine.memory() == {"total": 0.2, "available": 0.2}
    limit.write_text("max\n")
    assert machine.memory()["total"] > 0.3


def test_a_cpu_serves_models_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_torch, dtypes in ((True, "float32, float64, bfloat16"), (False, "float32, bfloat16")):
        monkeypatch.setattr(served, "has", lambda extra, has_torch=has_torch: has_torch)
        found = served.serves(MACHINE)
        assert found["device"] == "CPU"
        assert found["dtypes"] == dtypes
    # four fifths of 10 GiB, at two bytes and at one
    assert found["parameters_that_fit"] == {"16 bit": "4.3 B", "int8": "8.6 B", "int4": "15.3 B"}


def test_a_gpu_serves_where_nothing_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "has", lambda extra: True)
    monkeypatch.setattr("specrs.backends.cuda.device.has_c_compiler", lambda: True)
    found = served.serves(MACHINE | {"GPUs": [GPU]})
    assert found["device"] == "GPU (NVIDIA H100)"
    assert "float16" in found["dtypes"]
    assert "float64" not in found["dtypes"]
    assert found["parameters_that_fit"]["16 bit"] == "34.4 B"
    assert served.absent(MACHINE | {"GPUs": [GPU]}) == []


def test_what_keeps_a_gpu_from_use_comes_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "has", lambda extra: False)
    monkeypatch.setattr("specrs.backends.cuda.device.has_c_compiler", lambda: False)
    old = GPU | {"compute_capability": "7.5"}
    assert served.serves(MACHINE | {"GPUs": [old]})["device"] == "CPU"
    commands = [item["command"] for item in served.absent(MACHINE | {"GPUs": [old]}) if item["what"] == "GPU"]
    assert commands == ["a GPU with 8.0", "pip install 'specrs[cuda]'", "apt-get install gcc"]
    others = [item["command"] for item in served.absent(MACHINE)]
    assert "pip install 'specrs[otel]'" in others
    assert "pip install 'specrs[cuda]'" not in others, "this machine has no GPU"


def test_nothing_missing_is_said() -> None:
    found = {"versions": {}, "machine": {}, "serves": {}, "missing": []}
    assert list(lines(found, 80))[-1] == "Nothing is missing"

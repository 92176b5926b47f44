"""specrs's host drafters inside a real vLLM, in an environment of its own that `make test-vllm` makes."""

import json
import os
import random
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("SPECRS_VLLM_PYTHON") or ROOT / ".venv-hosts/vllm/bin/python")
K, NEW = 5, 48


def custom(proposer: str) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for one of specrs's proposers."""
    path = f"specrs.integrations.vllm.{proposer}"
    return {"method": "custom_class", "model": path, "num_speculative_tokens": K}


RUNS = {
    "vanilla": None,
    "ngram": custom("NgramProposer"),
    "suffix": custom("SuffixProposer"),
    "best": custom("BestProposer"),
    "own suffix": {"method": "suffix", "num_speculative_tokens": K},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the texts and draft counts of each run of vLLM by its name, for more requests than rows and repetitive
    prompts."""
    assert PYTHON.exists(), f"{PYTHON}: run make test-vllm"
    rng = random.Random(0)
    prompts = []
    for i in range(6):
        part = [rng.randrange(5, 2000) for _ in range(20)]
        prompts.append(part * 3 + part[: 7 + i])
    model = str(ROOT / "python/specrs/pair/target")
    request = {"model": model, "prompts": prompts, "max_tokens": NEW, "max_num_seqs": 4, "runs": RUNS}
    # What an installed package has: vLLM finds our plugin by it.
    info = tmp_path_factory.mktemp("site") / "specrs-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specrs\nVersion: 0\n")
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    lines = [f"{name} = {target}" for name, target in plugins.items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{info.parent}"}
    environment.pop("OMP_NUM_THREADS", None)  # vLLM chooses its own
    # Not from the repository's root, where vLLM's children would find our folder `kernels`.
    done = subprocess.run(
        [str(PYTHON), str(HERE / "run_vllm.py")],
        input=json.dumps(request),
        env=environment,
        cwd=tmp_path_factory.mktemp("vllm"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in RUNS if name != "vanilla"])
def test_text_is_vllms_own(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert all(len(text) == NEW for text in result["texts"])
    assert result["texts"] == results["vanilla"]["texts"]
    assert result["faults"] == 0
    assert results["vanilla"]["drafts"] == 0
    assert 0 < result["accepted_tokens"] <= result["draft_tokens"] <= K * result["drafts"]


def test_who_drafted(results: dict[str, Any]) -> None:
    for name, speculative in RUNS.items():
        if speculative is not None and speculative["method"] == "custom_class":
            assert results[name]["drafter"] == speculative["model"]
    assert results["own suffix"]["drafter"].startswith("vllm.")
    assert results["own suffix"]["cache"] == "specrs.integrations.suffix_decoding"

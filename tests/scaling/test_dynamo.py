"""Two workers with Dynamo's frontend, found through files: text is that of `LLM`, although one worker is killed."""

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from specrs import LLM, SamplingParams
from specrs.pair import TARGET

from .replicas import ROOT, Router, environment_python, free_port
from .streams import MANY, Kill, Outcome, run_streams

ENGINE = {"model": str(TARGET), "dtype": "float32", "speculative_config": {"num_speculative_tokens": 3}}
BODY = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module")
def dynamo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Router, list[subprocess.Popen[bytes]]]]:
    """A frontend, and two workers that serve `pair`."""
    folder = tmp_path_factory.mktemp("dynamo")
    python, port = environment_python("dynamo"), free_port()
    environment = {
        **os.environ,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "PYTHONPATH": str(ROOT / "python"),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        python,
        "-m",
        "specrs.integrations.dynamo",
        "--engine",
        json.dumps(ENGINE),
        "--served-model-name",
        "pair",
    ]
    with ExitStack() as stack, (folder / "workers.log").open("wb") as log:
        workers = []
        for _ in range(2):
            workers.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log))
            stack.callback(workers[-1].wait)
            stack.callback(workers[-1].kill)
        command = [python, "-m", "dynamo.frontend", "--http-port", str(port), "--migration-limit", "3"]
        frontend = Router(command, port, folder, environment)
        stack.callback(frontend.stop)
        while True:
            assert [worker.poll() for worker in workers] == [None, None], (folder / "workers.log").read_text()[-4000:]
            try:
                found = json.loads(frontend.get("/v1/models")[1])["data"]
            except OSError:
                continue
            text = (folder / "workers.log").read_text()
            if found and text.count("Registered endpoint 'dynamo.specrs.generate'") == 2:
                break
        yield frontend, workers


def streams(frontend: Router, prompts: list[str], body: dict[str, object], kill: Kill | None = None) -> list[Outcome]:
    url = f"http://127.0.0.1:{frontend.port}"
    if kill is None:
        return asyncio.run(run_streams(url, prompts, 8, body))
    return asyncio.run(run_streams(url, prompts, 8, kill.body, seen=kill.seen))


def migrated(frontend: Router) -> dict[str, float]:
    """Return how many requests the frontend has moved to another worker, by kind."""
    found = re.findall(
        r"^dynamo_frontend_model_migration_total\{.*migration_type=\"(\w+)\".*\} (\S+)$",
        frontend.get("/metrics")[1].decode(),
        re.MULTILINE,
    )
    return {kind: float(count) for kind, count in found}


def test_what_is_not_implemented_is_rejected(dynamo: tuple[Router, list[subprocess.Popen[bytes]]]) -> None:
    frontend, _ = dynamo
    for outcome in streams(frontend, ["Count"] * 4, {**BODY, "logprobs": 2}):
        assert outcome.failed
        assert "logprobs" in outcome.error
    for outcome in streams(frontend, ["Count"] * 4, {**BODY, "temperature": 0.7, "seed": 3, "top_p": 0.9}):
        assert not outcome.failed, outcome


def test_a_killed_worker_costs_nothing_and_text_is_the_engines(
    dynamo: tuple[Router, list[subprocess.Popen[bytes]]],
) -> None:
    """Check that a killed worker costs nothing: the frontend repeats what it had not begun to answer, and lets the
    other worker continue the rest."""
    frontend, workers = dynamo
    prompts, long = [f"Count from {i} to" for i in range(300)], slice(100, 132)
    kill = Kill(prompts[long], BODY, lambda: workers[0].send_signal(signal.SIGKILL))
    outcomes = streams(frontend, prompts, BODY, kill)
    failed, moved = [outcome for outcome in outcomes if outcome.failed], migrated(frontend)
    print(f"\nDynamo: {len(failed)} of {len(outcomes)} failed, migrated {moved}", *failed, sep="\n  ")
    assert not failed
    assert workers[0].wait() == -signal.SIGKILL
    assert moved["ongoing_request"] >= 1, "no stream ran from the killed worker"
    text = {outcome.prompt: outcome.text for outcome in outcomes}
    params = [SamplingParams(temperature=0.0, max_tokens=12)] * len(prompts)
    params[long] = [SamplingParams(temperature=0.0, max_tokens=MANY)] * len(prompts[long])
    for output in LLM(**ENGINE).generate(prompts, params, use_tqdm=False):
        assert text[output.prompt or ""] == output.outputs[0].text
    assert workers[1].poll() is None

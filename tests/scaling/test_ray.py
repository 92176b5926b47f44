"""An application of Ray Serve: two replicas answer as a server does, and a killed one comes back."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import specrs.integrations.ray as integration
from ray import serve
from specrs import LLM, SamplingParams
from specrs.errors import InvalidConfigError, SpecrsError
from specrs.integrations.ray import QueueLengthPolicy, build_openai_app

from .ray_replica import NOTES, NotingReplica, given_to
from .replicas import free_port
from .streams import Kill, run_streams

ROOT = Path(__file__).parents[2]
ENGINE = {"dtype": "float32", "speculative_config": {"num_speculative_tokens": 3}, "max_model_len": 256}
SERVER = {"served_model_names": ["pair"]}
PROMPTS = [f"Count from {i} to" for i in range(400)]
CONCURRENCY = 8


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the file where replicas write which requests they get."""
    return tmp_path_factory.mktemp("notes") / "given"


@pytest.fixture(scope="module")
def port(notes: Path) -> Iterator[int]:
    """Port of a local Ray cluster that serves two replicas."""
    found = free_port()
    paths = f"{ROOT / 'python'}:{ROOT / 'tests'}"
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={
            "env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", NOTES: str(notes)}
        },
    )
    serve.start(http_options={"host": "127.0.0.1", "port": found})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "Replica", NotingReplica)
        app = build_openai_app({"engine": ENGINE, "server": SERVER, "num_replicas": 2})
    serve.run(app, name="specrs", route_prefix="/")
    yield found
    serve.shutdown()
    ray.shutdown()


def replica_pids() -> list[int]:
    """Return the process ids that Ray has named after the deployment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if title.startswith("ray::ServeReplica:specrs:specrs"):
            found.append(int(path.parent.name))
    return sorted(found)


def test_a_killed_replica_costs_its_own_requests_and_comes_back(port: int, notes: Path) -> None:
    """Check that a killed replica costs only its own requests and comes back. Ray repeats no accepted request: a
    streaming one is cut, one without output gets 500. All others are served."""
    before = replica_pids()
    assert len(before) == 2
    victim = before[0]
    body = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    kill = Kill(
        PROMPTS[100:120], body, lambda: os.kill(victim, signal.SIGKILL), lambda outcome: outcome.marks == {str(victim)}
    )
    url = f"http://127.0.0.1:{port}"
    outcomes = asyncio.run(run_streams(url, PROMPTS, CONCURRENCY, kill.body, seen=kill.seen))
    failed = [outcome for outcome in outcomes if outcome.failed]
    print(f"\nRay Serve: {len(failed)} of {len(outcomes)} failed", *failed, sep="\n  ")
    assert kill.during in failed
    assert len(failed) <= CONCURRENCY
    assert {outcome.name for outcome in failed} <= given_to(notes, victim)
    for outcome in failed:
        begun = outcome.status == 200 and outcome.end in ("cut", "early") and outcome.marks == {str(victim)}
        assert begun or (outcome.end, outcome.status, outcome.text) == ("status", 500, ""), outcome
    llm = LLM(**ENGINE)
    whole = {outcome.prompt: outcome.text for outcome in outcomes if not outcome.failed}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for output in llm.generate([prompt for prompt in PROMPTS[:20] if prompt in whole], params, use_tqdm=False):
        assert whole[output.prompt or ""] == output.outputs[0].text
    while True:
        now = replica_pids()
        if len(now) == 2 and victim not in now and serve.status().applications["specrs"].status == "RUNNING":
            break
    outcomes = asyncio.run(run_streams(url, PROMPTS[:50], CONCURRENCY, body))
    assert not [outcome for outcome in outcomes if outcome.failed]


def policy_context(**fields: Any) -> Any:
    given = {
        "aggregated_metrics": None,
        "total_queued_requests": 0.0,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 8,
    }
    return SimpleNamespace(**{**given, **fields})


@pytest.mark.parametrize(
    ("running", "waiting", "queued", "wanted"),
    [([], [], 0, 1), ([4, 4], [0, 0], 0, 2), ([4, 4], [0, 1], 0, 3), ([4], [0], 3, 2), ([99], [99], 99, 8)],
)
def test_replicas_by_queue_length(running: list[int], waiting: list[int], queued: float, wanted: int) -> None:
    figures = {
        "num_requests_running": dict(enumerate(running)),
        "num_requests_waiting": dict(enumerate(waiting)),
        "kv_cache_usage_perc": dict(enumerate([0.9] * len(running))),
    }
    context = policy_context(aggregated_metrics=figures, total_queued_requests=queued)
    assert QueueLengthPolicy(4)(context) == (wanted, {})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"replicas": 2}, "'replicas'.*num_replicas"),
        ({"num_replicas": 0}, "num_replicas=0: must be"),
        ({"num_replicas": 2, "autoscaling_config": {}}, "must be left out with autoscaling_config"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests=0"),
        ({"engine": {"max_num_seqs": 0}}, "max_num_seqs=0"),
        ({"engine": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2"),
        ({"server": {"port": 80}}, "'port'"),
    ],
)
def test_wrong_arguments_are_rejected(args: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecrsError, match=message) as refused:
        build_openai_app(args)
    assert isinstance(refused.value, InvalidConfigError)


def test_what_ray_gets() -> None:
    app = build_openai_app({"engine": ENGINE, "autoscaling_config": {"max_replicas": 8, "target_ongoing_requests": 5}})
    deployment = app._bound_deployment
    config = deployment._deployment_config.autoscaling_config
    assert (config.max_replicas, config.policy.policy_kwargs) == (8, {"target": 5})
    assert deployment.ray_actor_options == {"num_cpus": 1, "num_gpus": 0}
    assert deployment.max_ongoing_requests == 1024

"""Existing routers in front of three servers: what a killed replica costs, and what prefix-aware routing gains."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from .replicas import MODULES, Replica, replicas, routing
from .streams import Kill, Outcome, run_streams

NUM_REQUESTS, CONCURRENCY = 2000, 16
WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "red",
    "green",
    "blue",
    "and",
    "or",
    "not",
    "if",
    "then",
    "else",
]


def prompts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(5, 30))) + f" {i}" for i in range(count)]


@pytest.mark.parametrize("kind", MODULES)
def test_a_killed_replica_costs_its_own_streams_alone(kind: str, tmp_path: Path) -> None:
    """Check that a killed replica costs only its own streams. It dies while a stream runs, so at least that one fails;
    requests that it had not begun to answer go to another."""
    body = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    asked, quarter = prompts(NUM_REQUESTS, 1), NUM_REQUESTS // 4
    with replicas(3, "--max-model-len", "512") as made, routing(kind, "round_robin", made, tmp_path) as router:
        victim = made[1]
        first_life = victim.mark
        kill = Kill(
            asked[quarter : quarter + 2 * CONCURRENCY],
            body,
            victim.kill,
            lambda outcome: outcome.marks == {first_life},
        )
        restarted: asyncio.Task[None] | None = None

        async def at(ended: int, outcomes: list[Outcome]) -> None:
            nonlocal restarted
            if ended == NUM_REQUESTS // 3:
                assert kill.during is not None
                restarted = asyncio.create_task(asyncio.to_thread(victim.start_again))
            if ended == NUM_REQUESTS // 2:
                # the rest is for three replicas again
                assert restarted is not None
                await restarted

        url = f"http://127.0.0.1:{router.port}"
        outcomes = asyncio.run(run_streams(url, asked, CONCURRENCY, kill.body, at, kill.seen))
        assert router.process.poll() is None, router.output
        more: list[Outcome] = []
        # routers leave one that came back alone for a while
        while not any(victim.mark in outcome.marks for outcome in [*outcomes, *more]):
            more += asyncio.run(run_streams(url, prompts(16, 2), CONCURRENCY, body))
        assert not [outcome for outcome in more if outcome.failed]
        for replica in made:
            replica.server.wait_until_idle()
    assert len(outcomes) == NUM_REQUESTS
    failed = [outcome for outcome in outcomes if outcome.failed]
    seen = [f"{outcome.end} {outcome.status} {sorted(outcome.marks)} {outcome.error[:300]}" for outcome in failed]
    print(f"\n{kind}: {len(failed)} of {NUM_REQUESTS} failed", *seen, sep="\n  ")
    assert kill.during in failed
    assert len(failed) <= CONCURRENCY
    # one of which the head has come, and nothing else, has no mark
    assert all(outcome.status == 200 and outcome.marks <= {first_life} for outcome in failed), seen
    whole = [outcome for outcome in outcomes if not outcome.failed]
    assert all(len(outcome.marks) == 1 for outcome in whole)
    marks = {mark for outcome in [*whole, *more] for mark in outcome.marks}
    assert marks == {made[0].mark, first_life, victim.mark, made[2].mark}


def hit_rate(made: list[Replica]) -> float:
    figures = [replica.server.metrics() for replica in made]
    hits, queries = (sum(found[f"vllm:prefix_cache_{name}_total"] for found in figures) for name in ("hits", "queries"))
    return hits / queries


@pytest.mark.parametrize("kind", MODULES)
def test_prefix_aware_routing_raises_the_hit_rate(kind: str, tmp_path: Path) -> None:
    """Check that prefix-aware routing raises the hit rate, with twelve system prompts of which a replica's KV pool
    holds about five."""
    rng = random.Random(3)
    systems = [" ".join(rng.choices(WORDS, k=120)) for _ in range(12)]
    asked = [f"{rng.choice(systems)} {prompt}" for prompt in prompts(600, 4)]
    body = {"max_tokens": 4, "temperature": 0.0}
    rates = {}
    for policy in ("round_robin", "cache_aware"):
        with (
            replicas(3, "--max-model-len", "512", "--num-gpu-blocks-override", "96") as made,
            routing(kind, policy, made, tmp_path) as router,
        ):
            outcomes = asyncio.run(run_streams(f"http://127.0.0.1:{router.port}", asked, 4, body))
            assert not [outcome for outcome in outcomes if outcome.failed]
            rates[policy] = hit_rate(made)
    print(f"\n{kind}: prefix cache hit rate {json.dumps(rates)}")
    assert rates["cache_aware"] > rates["round_robin"] + 0.1

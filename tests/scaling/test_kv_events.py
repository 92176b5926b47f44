"""KV events as a router reads them: its mirror equals the engine's cache, although messages were lost."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.harness import serving
from specrs import LLM, SamplingParams, core
from specrs.engine.kv_events import KVEventPublisher
from specrs.errors import InvalidConfigError
from specrs.kv_events_config import KVEventsConfig

from .kv_event_client import Client

BLOCK_SIZE = 4


def endpoints(folder: Path) -> dict[str, Any]:
    return {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}


class Alone:
    """A scheduler with one row and no device: each request runs for one token and reports how much of it was cached."""

    def __init__(self) -> None:
        self.scheduler = core.Scheduler(
            max_num_seqs=1,
            max_model_len=64,
            num_blocks=48,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=64,
            enable_kv_cache_events=True,
        )
        sizes = self.scheduler.record_size, self.scheduler.results_size, self.scheduler.settled_size
        self.record, self.results, self.settled = (np.zeros(size, np.int64) for size in sizes)
        layout = self.scheduler.results_layout()
        self.results[layout["num_emitted"][0]] = 1
        self.results[layout["finish_reason"][0]] = core.FINISH_LENGTH
        self.num_requests = 0

    def run(self, prompt: list[int], salt: str) -> int:
        before = self.scheduler.num_cached_tokens
        self.scheduler.add_request(self.num_requests, np.array(prompt), limit=len(prompt) + 1, cache_salt=salt.encode())
        self.num_requests += 1
        while self.scheduler.plan(self.record) == core.PLAN_STEP:
            step_id = int(self.record[core.HEADER_FIELDS.index("step_id")])
            self.scheduler.settle(step_id, self.results, self.settled)
        return self.scheduler.num_cached_tokens - before


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[KVEventPublisher]:
    config = KVEventsConfig(enable_kv_cache_events=True, topic="kv", buffer_steps=50, **endpoints(tmp_path))
    publisher = KVEventPublisher(config)
    yield publisher
    publisher.close()
    publisher.close()
    assert not publisher._thread.is_alive()


def test_a_mirror_is_the_truth_over_10_000_requests(publisher: KVEventPublisher, tmp_path: Path) -> None:
    rng = random.Random(5)
    alone = Alone()
    texts = [[rng.randrange(300) for _ in range(50)] for _ in range(6)]

    def prompt() -> list[int]:
        shared = rng.choice(texts)[: rng.randint(1, 45)]
        return shared + [rng.randrange(300) for _ in range(rng.randrange(8))]

    def publish() -> None:
        batch = alone.scheduler.take_kv_event_batch()
        if batch is not None:
            publisher.publish(batch)

    def publish_one() -> None:
        alone.run(prompt(), "")
        publish()

    found = 0
    with Client(**endpoints(tmp_path), topic="kv") as client:
        client.subscribed(publish_one)
        client.replay()
        while alone.num_requests < 10_000:
            tokens, salt = prompt(), rng.choice(["", "", "tenant", "é"])
            told = client.mirror.num_cached(tokens, BLOCK_SIZE, salt)
            assert alone.run(tokens, salt) == told
            found += told
            if rng.random() < 0.002:
                assert alone.scheduler.reset_prefix_cache()
            publish()
            client.catch_up(publisher.num_published, lambda: rng.random() < 0.05)
        mirror = client.mirror
        assert min(mirror.num_removed, found) > 10_000
        assert mirror.num_cleared > 5
        assert client.num_replays > 100
        assert alone.scheduler.num_free_blocks == alone.scheduler.num_blocks
        with Client(**endpoints(tmp_path), topic="kv") as late:
            kept = late.ask((0).to_bytes(8, "big"))
            assert [number for number, _ in kept] == list(range(publisher.num_published - 50, publisher.num_published))


def test_a_full_queue_shows_as_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, max_queue_size=3, **endpoints(tmp_path))
    publisher = KVEventPublisher(config)
    alone = Alone()
    with Client(**endpoints(tmp_path)) as client:
        monkeypatch.setattr(publisher, "_ring", lambda: None)
        for i in range(5):
            alone.run([i] * 9, "")
            batch = alone.scheduler.take_kv_event_batch()
            assert batch is not None
            publisher.publish(batch)
        monkeypatch.undo()
        assert publisher.num_published == 5
        publisher._ring()
        assert [number for number, _ in client.ask((1).to_bytes(8, "big"))] == [1, 2]
        alone.run([9] * 9, "")
        batch = alone.scheduler.take_kv_event_batch()
        assert batch is not None
        publisher.publish(batch)
        assert [number for number, _ in client.ask((1).to_bytes(8, "big"))] == [1, 2, 5]
    publisher.close()


def test_requests_that_are_none_are_left_alone(publisher: KVEventPublisher, tmp_path: Path) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoints(tmp_path)["replay_endpoint"])
        for frames in ([b""], [b"x"], [b"", b"short"], [b"", b"12345678", b""], [b"x", b"12345678"]):
            dealer.send_multipart(frames)
    with Client(**endpoints(tmp_path), topic="kv") as client:
        assert client.ask((0).to_bytes(8, "big")) == []


def test_an_endpoint_that_cannot_be_opened_is_named(publisher: KVEventPublisher, tmp_path: Path) -> None:
    for field, value in {
        "endpoint": "tcp://*:x",
        "replay_endpoint": "ipc:///no/such/folder",
    }.items():
        given = {**endpoints(tmp_path), "endpoint": f"ipc://{tmp_path}/other", field: value}
        config = KVEventsConfig(enable_kv_cache_events=True, **given)
        with pytest.raises(
            InvalidConfigError, match=rf"kv_events_config\.{field}='{re.escape(value)}': cannot be opened"
        ):
            KVEventPublisher(config)


def test_an_engine_publishes_what_it_caches(tmp_path: Path) -> None:
    events = {"enable_kv_cache_events": True, **endpoints(tmp_path)}
    llm = LLM(kv_events_config=events, max_model_len=256, num_gpu_blocks_override=24)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    rng = random.Random(1)
    base = [rng.randrange(5, 500) for _ in range(120)]
    with Client(**endpoints(tmp_path)) as client:
        found = 0
        for _ in range(40):
            tokens = base[: rng.randint(1, 100)] + [rng.randrange(5, 500) for _ in range(rng.randint(1, 60))]
            client.replay()
            told = client.mirror.num_cached(tokens, 16)
            (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
            assert output.metrics.num_cached_tokens == told
            found += told
        assert found > 100
        assert client.mirror.num_removed > 100


def test_serve(tmp_path: Path) -> None:
    events = {"enable_kv_cache_events": True, **endpoints(tmp_path)}
    rng = random.Random(2)
    base = [rng.randrange(5, 500) for _ in range(120)]
    with (
        serving("--kv-events-config", json.dumps(events), "--max-model-len", "256") as server,
        Client(**endpoints(tmp_path)) as client,
    ):
        for length in (40, 90, 64, 120, 33):
            client.replay()
            told = client.mirror.num_cached(base[:length], 16)
            usage = server.complete(prompt=base[:length], max_tokens=4)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == told
            server.wait_until_idle()
        assert told == 32
        server.process.terminate()
        assert server.wait() == 0

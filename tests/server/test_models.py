"""A server with several models: loaded on first use, unloaded to stay within a memory limit, never while in use."""

import asyncio
import gc
import json
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from llm.scripted import ScriptedEngine
from specrs.async_llm import AsyncLLM
from specrs.config import EngineConfig
from specrs.errors import CheckpointError
from specrs.sampling import SamplingParams
from specrs.server import run
from specrs.server.context import Shared
from specrs.server.errors import APIError
from specrs.server.memory import memory_of
from specrs.server.models import Model, Models
from specrs.server.run import ModelSettings, ServerSettings
from specrs.server.turns import Turns

from .harness import Server, serving

# The registry alone, with models that are no engines.


@dataclass(eq=False)
class Fake:
    """A loaded model without an engine."""

    name: str
    error: Exception | None = None
    holders: int = 0
    ended: bool = False


@dataclass
class World:
    """A registry of fake models, and a record of their loads and unloads."""

    sizes: dict[str, int]
    limit: int | None = None
    broken: set[str] = field(default_factory=set)
    gate: Callable[[str], Any] = lambda _: None
    alive: list[Fake] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def make(self) -> Models[Fake]:
        def model(name: str) -> Model[Fake]:
            return Model(names=[name], load=lambda: self.load(name), measure=lambda: self.sizes[name])

        return Models([model(name) for name in self.sizes], end=self.end, limit=self.limit)

    def load(self, name: str) -> Fake:
        self.gate(name)
        if name in self.broken:
            raise CheckpointError("/no/such/folder: broken")
        fake = Fake(name)
        self.alive.append(fake)
        self.log.append(f"+{name}")
        assert self.limit is None or sum(self.sizes[one.name] for one in self.alive) <= self.limit
        return fake

    def end(self, fake: Fake) -> bool:
        assert fake.holders == 0 or fake.error is not None
        fake.ended = True
        self.alive.remove(fake)
        self.log.append(f"-{fake.name}")
        return True


NAMES = ("a", "b", "c", "d")
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.sampled_from(NAMES)),  # take and give
        st.tuples(st.just("take"), st.sampled_from(NAMES)),
        st.tuples(st.just("give"), st.integers(0, 3)),
        st.tuples(st.just("crash"), st.sampled_from(NAMES)),
        st.tuples(st.just("spoil"), st.sampled_from(NAMES)),
    ),
    min_size=6,
    max_size=24,
)


@given(st.lists(st.integers(1, 3), min_size=4, max_size=4), st.integers(3, 7), ACTIONS)
def test_leases_one_after_the_other(sizes: list[int], limit: int, steps: list[tuple[str, Any]]) -> None:
    """Check leases one after the other: the registry equals a list of loaded models in the order of their last use."""
    world = World(dict(zip(NAMES, sizes, strict=True)), limit)

    async def main() -> None:
        models = world.make()
        held: list[tuple[str, AsyncExitStack]] = []
        order: list[str] = []  # loaded models; the most recently used is last
        crashed: set[str] = set()

        def users(name: str) -> int:
            return sum(one == name for one, _ in held)

        def size(names: list[str]) -> int:
            return sum(world.sizes[name] for name in names)

        for act, what in steps:
            if act == "spoil":
                world.broken ^= {what}
            elif act == "crash":
                for fake in world.alive:
                    if fake.name == what:
                        fake.error = RuntimeError("crashed")
                        crashed.add(what)
            elif act == "give" and held:
                name, stack = held.pop(what % len(held))
                await stack.aclose()
                if name in order:
                    order.append(order.pop(order.index(name)))
            elif act in ("take", "use"):
                expected = 200
                if what in crashed:
                    crashed.discard(what)
                    order.remove(what)
                if what not in order:
                    busy = [one for one in order if users(one)]
                    if size([*busy, what]) > limit:
                        expected = 503
                    else:
                        while size([*order, what]) > limit:
                            victim = next(one for one in order if not users(one))
                            order.remove(victim)
                            crashed.discard(victim)
                        expected = 500 if what in world.broken else 200
                stack, status = AsyncExitStack(), 200
                try:
                    fake = await stack.enter_async_context(models.lease(what))
                except APIError as fault:
                    status = int(fault.status)
                else:
                    assert (fake.name, fake.error, fake.ended) == (what, None, False)
                    if what not in order:
                        order.append(what)
                    if act == "take":
                        held.append((what, stack))
                    else:
                        await stack.aclose()
                        order.append(order.pop(order.index(what)))
                assert status == expected, (act, what)
            assert sorted(fake.name for fake in world.alive) == sorted(order)
            for model in models.all:
                assert model.state == ("loaded" if model.name in set(order) - crashed else "unloaded")
                assert model.users == users(model.name)
        for _, stack in held:
            await stack.aclose()
        assert models.close(10.0)
        assert world.alive == []

    asyncio.run(main())


@given(
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.one_of(st.none(), st.integers(1, 9)),
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.booleans()), max_size=30),
)
def test_leases_at_once(sizes: list[int], limit: int | None, asked: list[tuple[str, int, bool]]) -> None:
    """Many requests at once, some of whose clients go away: `World` checks that no model ends in use and that all fit.
    Each request gets its model or a 503, and without a limit each gets its model, which is loaded once."""
    world = World(dict(zip(NAMES, sizes, strict=True)), limit)

    async def request(models: Models[Fake], name: str, pauses: int) -> int:
        try:
            async with models.lease(name) as fake:
                fake.holders += 1
                try:
                    assert (fake.name, fake.ended) == (name, False)
                    for _ in range(pauses):
                        await asyncio.sleep(0)
                        assert not fake.ended
                finally:
                    fake.holders -= 1
        except APIError as fault:
            return int(fault.status)
        return 200

    async def main() -> list[int]:
        models = world.make()
        stay, left = [], []
        for name, pauses, leaves in asked:
            task = asyncio.ensure_future(request(models, name, pauses))
            (left if leaves else stay).append(task)
            if leaves:
                await asyncio.sleep(0)
                task.cancel()
        statuses = await asyncio.gather(*stay)
        await asyncio.gather(*left, return_exceptions=True)
        assert all(model.users == 0 for model in models.all)
        models.stop()
        assert models.close(10.0)
        return statuses

    statuses = asyncio.run(main())
    if limit is None:
        assert set(statuses) <= {200}
        assert sum(one.startswith("+") for one in world.log) <= len({name for name, *_ in asked})
    assert set(statuses) <= {200, 503}
    assert world.alive == []


def test_requests_wait_while_their_model_loads_and_others_are_served() -> None:
    begun, go = threading.Event(), threading.Event()

    def gate(name: str) -> None:
        if name == "b":
            begun.set()
            assert go.wait(60)

    world = World({"a": 1, "b": 1}, gate=gate)

    async def main() -> None:
        models = world.make()

        async def use(name: str | None) -> str:
            async with models.lease(name) as fake:
                return fake.name

        assert await use(None) == "a"
        waiting = [asyncio.ensure_future(use("b")) for _ in range(3)]
        await asyncio.to_thread(begun.wait, 60)
        waiting[0].cancel()
        assert [model.state for model in models.all] == ["loaded", "loading"]
        assert await use("a") == "a"
        assert not any(task.done() for task in waiting[1:])
        go.set()
        assert await asyncio.gather(*waiting[1:]) == ["b", "b"]
        assert world.log == ["+a", "+b"]
        assert models.close(10.0)

    asyncio.run(main())


def test_requests_that_wait_when_the_server_ends() -> None:
    begun, go = threading.Event(), threading.Event()

    def gate(_: str) -> None:
        begun.set()
        assert go.wait(60)

    world = World({"a": 1, "b": 1}, gate=gate)

    async def main() -> Models[Fake]:
        models = world.make()

        async def use(name: str) -> int:
            try:
                async with models.lease(name):
                    return 200
            except APIError as fault:
                return int(fault.status)

        waiting = [asyncio.ensure_future(use(name)) for name in "aab"]
        await asyncio.to_thread(begun.wait, 60)
        models.stop()
        assert await asyncio.gather(*waiting) == [503, 503, 503]
        assert await use("a") == 503
        assert not models.close(0.0)  # the load still runs
        go.set()
        return models

    models = asyncio.run(main())
    assert models.close(60.0)  # what was loaded in the end is ended, too
    assert world.log == ["+a", "-a"]


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(APIError, match=r"The model `x` does not exist; served: \['a', 'b'\]") as caught:
        World({"a": 1, "b": 1}).make().find("x")
    assert (caught.value.status, caught.value.param) == (404, "model")


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order = Turns(), list[int]()
    threads = []

    def work(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        for number in range(20):
            thread = threading.Thread(target=work, args=(number,))
            thread.start()
            threads.append(thread)
            while len(turns._waiting) <= number:
                continue
        assert order == []
    for thread in threads:
        thread.join()
    assert order == list(range(20))
    with turns:
        assert turns._taken
    assert not turns._taken


def test_engines_compute_in_turns() -> None:
    """Check that engines compute in turns: each step is inside a turn, and the time between two steps is not."""
    turns = Turns()
    seen: list[bool] = []

    class Watched(ScriptedEngine):
        def step(self) -> Any:
            seen.append(turns._taken)
            return super().step()

    llm = AsyncLLM.from_engine(Watched())  # type: ignore[arg-type]
    llm.take_turns(turns)

    async def main() -> None:
        async for _ in llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=4, detokenize=False)):
            pass
        assert not await llm.in_engine(lambda: turns._taken)

    try:
        asyncio.run(main())
    finally:
        llm.shutdown()
    assert seen
    assert all(seen)


# Engines.

KV = 4 << 20
TEXT = {"prompt": "the sea and the rain", "max_tokens": 12, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of three small models."""
    folder = tmp_path_factory.mktemp("models")
    families = {"a": "qwen3", "b": "llama", "c": "qwen3"}
    return {
        name: make_checkpoint(folder / name, family, seed=seed, vocab=400)
        for seed, (name, family) in enumerate(families.items())
    }


def entry(name: str, path: Path | str) -> dict[str, Any]:
    return {"name": name, "model": str(path), "kv-cache-memory-bytes": KV, "max_model_len": 256}


def configured(folder: Path, **settings: Any) -> tuple[str, str]:
    """Return the flags that name a configuration file with `settings`."""
    path = folder / "specrs.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return "--config", str(path)


def states(server: Server) -> dict[str, str]:
    return {model["id"]: model["state"] for model in server.get("/v1/models").json["data"]}


def counted(server: Server, name: str) -> dict[str, float]:
    """Return a metric's value for each model."""
    text = server.get("/metrics").body.decode()
    types = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(types) == len(set(types))
    found = re.findall(rf'^{name}{{[^}}]*model_name="(\w+)"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return {model: float(value) for model, value in found}


@pytest.fixture(scope="module")
def texts(checkpoints: dict[str, Path]) -> dict[str, str]:
    """Texts of each model, from servers with a single model."""
    found = {}
    for name, path in checkpoints.items():
        with serving(str(path), "--max-model-len", "256") as server:
            assert "state" not in server.get("/v1/models").json["data"][0]
            found[name] = server.complete(**TEXT)["choices"][0]["text"]
    assert len(set(found.values())) == 3
    return found


@pytest.fixture(scope="module")
def several(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of all three models, the bundled pair, and one that cannot be loaded."""
    folder = tmp_path_factory.mktemp("several")
    broken = shutil.copytree(checkpoints["a"], folder / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    models = [
        *(entry(name, path) for name, path in checkpoints.items()),
        {"name": "broken", "model": str(broken)},
        {"name": "pair", "speculation": False, "max-model-len": 512},
    ]
    with serving(*configured(folder, models=models)) as server:
        assert set(states(server).values()) == {"unloaded"}
        yield server


def test_texts_of_several_models_at_once(several: Server, texts: dict[str, str]) -> None:
    """Check that concurrent requests for several models get the same texts as from servers with a single model, also in
    streams."""

    def ask(number: int) -> tuple[str, str]:
        name = "abc"[number % 3]
        if number % 2:
            chunks = several.stream(model=name, **TEXT)
            return name, "".join(chunk["choices"][0]["text"] for chunk in chunks)
        answer = several.complete(model=name, **TEXT)
        assert answer["model"] == name
        return name, answer["choices"][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        for name, text in pool.map(ask, range(48)):
            assert text == texts[name]
    assert several.complete(**TEXT)["choices"][0]["text"] == texts["a"]  # the first one is the default
    assert {name: states(several)[name] for name in "abc"} == dict.fromkeys("abc", "loaded")
    loads = counted(several, "specrs:model_loads_total")
    assert (loads["a"], loads["b"], loads["c"]) == (1, 1, 1)
    tokens = counted(several, "vllm:generation_tokens_total")
    assert (tokens["a"], tokens["b"], tokens["c"]) == (17 * 12, 16 * 12, 16 * 12)
    assert counted(several, "vllm:e2e_request_latency_seconds_count")["b"] == 16


def test_every_endpoint_takes_the_model_of_the_body(several: Server, texts: dict[str, str]) -> None:
    messages = [{"role": "user", "content": "x = 1"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "max_tokens": 2},
        "/tokenize": {"prompt": "x = 1"},
        "/detokenize": {"tokens": [5]},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 2},
        "/v1/responses": {"input": "x", "max_output_tokens": 1},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": messages},
    }
    for path, body in bodies.items():
        answer = several.post(path, {**body, "model": "pair"})
        assert answer.status == 200, (path, answer.body)
        assert answer.json.get("model", "pair") == "pair"
        assert several.post(path, {**body, "model": "nope"}).status == 404
    lengths = {name: several.post("/tokenize", {"prompt": "the", "model": name}).json["max_model_len"] for name in "ab"}
    assert lengths == {"a": 256, "b": 256}
    assert several.post("/tokenize", {"prompt": "the", "model": "pair"}).json["max_model_len"] == 512
    assert several.get("/server_info?model=pair").json["max_model_len"] == 512
    assert several.get("/v1/models/pair").json["state"] == "loaded"
    assert several.get("/load").json == {"server_load": 0}


def test_a_model_that_cannot_be_loaded_ends_its_own_requests(several: Server, texts: dict[str, str]) -> None:
    for tries in (1, 2):
        answer = several.post("/v1/completions", {**TEXT, "model": "broken"})
        assert answer.status == 500
        assert answer.error["message"] == "The model `broken` could not be loaded; the server's log says why."
        assert counted(several, "specrs:model_load_failures_total")["broken"] == tries
    assert any("broken could not be loaded: " in line for line in several.lines)
    assert states(several)["broken"] == "unloaded"
    assert several.get("/server_info?model=broken").status == 503
    assert several.complete(model="b", **TEXT)["choices"][0]["text"] == texts["b"]
    assert several.get("/health").status == 200


def test_the_least_recently_used_model_is_unloaded(
    checkpoints: dict[str, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    """Check that the least recently used model is unloaded, with memory for two of three. A model that a stream uses
    stays, and a request without room gets 503."""
    models = [entry(name, path) for name, path in checkpoints.items()]
    size = max(memory_of(EngineConfig(model=str(path), kv_cache_memory_bytes=KV)) for path in checkpoints.values())
    with serving(*configured(tmp_path, models=models, models_memory_bytes=2 * size)) as server:

        def ask(name: str) -> None:
            assert server.complete(model=name, **TEXT)["choices"][0]["text"] == texts[name]

        def loaded() -> set[str]:
            return {name for name, state in states(server).items() if state == "loaded"}

        for name, expected in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "cb"), ("c", "cb")):
            ask(name)
            assert loaded() == set(expected)
        assert counted(server, "specrs:model_loads_total") == {"a": 1, "b": 2, "c": 1}
        assert counted(server, "vllm:generation_tokens_total")["a"] == 24  # its counters outlive it
        long = {"prompt": "x", "max_tokens": 200, "n": 8, "ignore_eos": True}
        with server.streaming(model="b", **long) as b, server.streaming(model="c", **long) as c:
            next(b)
            next(c)
            answer = server.post("/v1/completions", {**TEXT, "model": "a"})
            if answer.status != 200:  # the streams may have ended
                assert answer.status == 503
                assert "no memory for the model `a`" in answer.error["message"]
                assert "retry-after" in answer.headers
                assert loaded() == {"b", "c"}
            for rest in (list(b), list(c)):
                assert rest[-1] == "[DONE]"
                assert not [event for event in rest[:-1] if "error" in event]
        ask("a")
        assert counted(server, "specrs:model_loaded")["a"] == 1


def test_a_model_larger_than_the_limit(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    models = [entry("a", checkpoints["a"]), {**entry("b", checkpoints["b"]), "kv-cache-memory-bytes": "64M"}]
    with serving(*configured(tmp_path, models=models, models_memory_bytes="32M")) as server:
        assert server.complete(model="a", **TEXT)
        answer = server.post("/v1/completions", {**TEXT, "model": "b"})
        assert answer.status == 503
        assert re.search(r"The model `b` needs \d+ bytes of memory; this server has", answer.error["message"])
        assert states(server) == {"a": "loaded", "b": "unloaded"}


def test_nothing_of_an_unloaded_model_stays(checkpoints: dict[str, Path]) -> None:
    engine = {"model": str(checkpoints["a"]), "kv_cache_memory_bytes": KV}
    settings = ModelSettings(name="a", engine=engine, server=ServerSettings(served_model_names=("a",)))
    model, metrics = run._lazy_model(settings, Shared(), Turns(), first=True)
    try:
        context = model.load()
        left = [weakref.ref(one) for one in (context, context.llm, context.llm._engine, context.llm.tokenizer)]
        context.llm._loop.call(lambda: None).result()
        assert context.templates is not None
        threads = context.templates._threads
        assert run._end(context)
        del context
        threads.shutdown()  # its first worker process may just be starting
        gc.unfreeze()
        gc.collect()
        assert [one() for one in left] == [None] * 4
        assert b'vllm:num_requests_running{engine="0",model_name="a"} 0.0' in asyncio.run(metrics.render())
    finally:
        gc.unfreeze()


def test_memory_of_a_model(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["a"]
    weights = (path / "model.safetensors").stat().st_size

    def memory(**settings: Any) -> int:
        return memory_of(EngineConfig(model=str(path), **settings)) - weights

    block = 2 * 2 * 3 * 16 * 48 * 4  # layers, K and V, heads, positions, dimensions, bytes
    assert memory(kv_cache_memory_bytes=KV) == KV
    assert memory(num_gpu_blocks_override=7) == 7 * block
    assert memory(max_num_seqs=2, max_model_len=100) == 2 * 7 * block
    assert memory(max_num_seqs=2, max_model_len=100, kv_cache_dtype="fp8") == 2 * 7 * block // 4
    draft = {"method": "draft_model", "model": str(checkpoints["c"]), "num_speculative_tokens": 2}
    assert memory(num_gpu_blocks_override=7, speculative_config=draft) == 14 * block + weights


def test_a_list_on_the_command_line(checkpoints: dict[str, Path], texts: dict[str, str]) -> None:
    """Check several MODELs on the command line, which are named by their paths."""
    paths = [str(checkpoints[name]) for name in "ab"]
    with serving(*paths, "--max-model-len", "256") as server:
        assert states(server) == dict.fromkeys(paths, "unloaded")
        assert server.complete(model=paths[1], **TEXT)["choices"][0]["text"] == texts["b"]
        assert json.loads(server.get("/openapi.json").body)

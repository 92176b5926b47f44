"""Stored responses: `store`, `previous_response_id`, and the endpoints that read and delete them."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.async_llm import AsyncLLM
from specrs.chat_template import Rendered
from specrs.errors import InvalidRequestError
from specrs.server import stored_responses
from specrs.server.app import build_app
from specrs.server.context import Context, Shared
from specrs.server.limits import MAX_MESSAGES, HTTPLimits
from specrs.server.metrics import Metrics
from specrs.server.response_store import MissingResponse, ResponseStore, Texts
from specrs.server.responses_protocol import ResponsesRequest, as_chat
from specrs.server.run import one_model
from specrs.server.stored_responses import stored_items
from specrs.server.tools import ToolSettings
from specrs.tokenizer import Tokenizer
from starlette.applications import Starlette

from .harness import Server, serving
from .scripted import Script
from .test_responses import TEXT, TOOLS, events_of, plain
from .test_tools import SETTINGS, TEMPLATE

PATH = "/v1/responses"
A, B = b"a" * 32, b"b" * 32


# The store alone


def texts(size: int = 0) -> Texts:
    return Texts(b"{" + b"x" * size + b"}", b"[]", b"[]")


@dataclass
class Entry:
    """A response in the test's model of the store. `previous` is the object, which may have been deleted."""

    key: tuple[bytes, str]
    texts: Texts
    previous: "Entry | None"
    num_bytes: int
    used: float


class Model:
    """The test's model of the store: a list, least recently used first, in which links are objects."""

    def __init__(self, max_bytes: int, max_seconds: float) -> None:
        self.entries: list[Entry] = []
        self.max_bytes, self.max_seconds = max_bytes, max_seconds
        self.now = 0.0

    def find(self, key: tuple[bytes, str]) -> Entry | None:
        self.entries = [one for one in self.entries if one.used + self.max_seconds > self.now]
        return next((one for one in self.entries if one.key == key), None)

    def chain(self, entry: Entry) -> list[Entry]:
        """Return the entry and all earlier ones that exist without a gap, newest first."""
        found = [entry]
        while (before := found[-1].previous) is not None and any(before is one for one in self.entries):
            found.append(before)
        return found

    def use(self, entry: Entry) -> None:
        for one in self.chain(entry):
            one.used = self.now
            self.entries = [other for other in self.entries if other is not one] + [one]

    def put(self, entry: Entry) -> None:
        self.find(entry.key)
        self.entries = [one for one in self.entries if one.key != entry.key] + [entry]
        self.use(entry)
        while sum(one.num_bytes for one in self.entries) > self.max_bytes:
            del self.entries[0]


KEYS = st.tuples(st.sampled_from([A, B]), st.sampled_from(["r1", "r2", "r3", "r4", "r5"]))
ACTIONS = st.one_of(
    st.tuples(st.just("put"), KEYS, st.sampled_from([0, 300, 900]), st.sampled_from([None, "r1", "r2", "r3", "r4"])),
    st.tuples(st.sampled_from(["get", "conversation", "delete", "contains"]), KEYS),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 4.0, 10.0])),
)


@given(st.lists(ACTIONS, max_size=40), st.sampled_from([3000, 5000, 100_000]))
def test_the_store_does_what_a_list_does(steps: list[Any], max_bytes: int) -> None:
    model = Model(max_bytes, 10.0)
    store = ResponseStore(max_bytes, 10.0, clock=lambda: model.now)
    for step in steps:
        if step[0] == "wait":
            model.now += step[1]
            continue
        key = step[1]
        entry = model.find(key)
        if step[0] == "put":
            previous = None if step[3] is None else model.find((key[0], step[3]))
            link = None if previous is None else store.get(*previous.key).link
            if previous is not None:
                model.use(previous)
            told = texts(step[2])
            store.put(*key, told, link)
            size = store.get(*key).num_bytes if key in store else max_bytes + 1
            model.put(Entry(key, told, previous, size, model.now))
        elif step[0] == "delete":
            assert store.delete(*key) == (entry is not None)
            model.entries = [one for one in model.entries if one is not entry]
        elif step[0] == "contains":
            assert (key in store) == (entry is not None)
        elif entry is None:
            with pytest.raises(MissingResponse) as fault:
                getattr(store, step[0])(*key)
            assert (fault.value.response_id, fault.value.needed_by) == (key[1], None)
        elif step[0] == "get":
            assert store.get(*key).texts == entry.texts
            model.use(entry)
        else:
            model.use(entry)
            chain = model.chain(entry)
            if chain[-1].previous is None:
                assert [one.texts for one in store.conversation(*key)] == [one.texts for one in chain[::-1]]
            else:
                with pytest.raises(MissingResponse) as fault:
                    store.conversation(*key)
                assert (fault.value.response_id, fault.value.needed_by) == (chain[-1].previous.key[1], chain[-1].key[1])
        store.expire()
        model.find(key)
        assert len(store) == len(model.entries)
        assert store.num_bytes == sum(one.num_bytes for one in model.entries) <= max_bytes


@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0, 300, 900]), st.booleans()), max_size=40),
    st.integers(1500, 8000),
)
def test_eviction_leaves_every_conversation_whole(turns: list[tuple[int, int, bool]], max_bytes: int) -> None:
    now = [0.0]
    store = ResponseStore(max_bytes, 20.0, clock=lambda: now[0])
    ids: list[str] = []
    for back, size, continues in turns:
        now[0] += 1.0
        link = None
        if continues and ids and (A, ids[-1 - back % len(ids)]) in store:
            link = store.get(A, ids[-1 - back % len(ids)]).link
        ids.append(f"r{len(ids)}")
        store.put(A, ids[-1], texts(size), link)
        # without a use, which would change what is evicted next
        for key in list(store._entries):
            assert list(store._chain(store._entries[key]))[-1].previous is None


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("size", [0, 100, 5000])
def test_bytes_are_those_that_python_takes(size: int, chained: bool) -> None:
    store = ResponseStore(1 << 30, 1e9)

    def fill(count: int, name: str) -> None:
        previous = None
        for i in range(count):
            # each a new object, as if it came from a request
            one = Texts(b"{" + b"x" * (size + i % 2) + b"}", b"[]" + b" " * (i % 2), b"[]" + b" " * (i % 2))
            store.put(bytes(bytearray(A)), f"resp_{name}_{i}", one, previous)
            previous = store.get(A, f"resp_{name}_{i}").link if chained else None

    fill(300, "before")  # the table has grown, and Python's free lists are used
    gc.collect()
    tracemalloc.start()
    try:
        counted, taken = store.num_bytes, tracemalloc.get_traced_memory()[0]
        fill(1000, "x")
        counted, taken = store.num_bytes - counted, tracemalloc.get_traced_memory()[0] - taken
    finally:
        tracemalloc.stop()
    assert taken <= counted <= 1.5 * taken, (counted / 1000, taken / 1000)


def test_an_id_that_comes_again_makes_no_circle() -> None:
    store = ResponseStore()
    store.put(A, "r1", texts())
    store.put(A, "r2", texts(), store.get(A, "r1").link)
    store.put(A, "r1", texts(1), store.get(A, "r2").link)
    for response_id, missing, needed_by in (("r1", "r1", "r2"), ("r2", "r1", "r2")):
        with pytest.raises(MissingResponse) as fault:
            store.conversation(A, response_id)
        assert (fault.value.response_id, fault.value.needed_by) == (missing, needed_by)
    assert len(store) == 2


@pytest.mark.parametrize("limits", [(0, 9.0), (1 << 20, 0.0), (0, 0.0)])
def test_a_limit_of_0_turns_it_off(limits: tuple[int, float]) -> None:
    store = ResponseStore(*limits)
    assert not store.enabled
    store.put(A, "r1", texts())
    assert (len(store), store.num_bytes, store.evictions) == (0, 0, {"bytes": 0, "age": 0})


# A server in this process, whose engine says scripts


class AllMessages:
    """A chat template that shows every message, its reasoning and its calls."""

    async def render(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> Rendered:
        return Rendered("".join(self._one(message) for message in messages))

    def _one(self, message: dict[str, Any]) -> str:
        calls = "".join(f"!{call['function']['name']}" for call in message.get("tool_calls") or ())
        thought = f"({message['reasoning']})" if message.get("reasoning") else ""
        return f"[{message['role']}]{thought}{message['content'] or ''}{calls}"


@dataclass
class Got:
    """An answer of the application."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert error["code"] == self.status
        return error


@dataclass
class App:
    """An application with a scripted engine, and the time of its store."""

    app: Starlette
    engine: Script
    tokenizer: Tokenizer
    store: ResponseStore
    now: list[float]

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        key: str = "",
        on_body: Callable[[bytes], Awaitable[bool]] | None = None,
        **headers: str,
    ) -> Got:
        """Send one request. The client disconnects once `on_body` returns True for a piece of the answer."""
        path, _, query = path.partition("?")
        given = {"content-type": "application/json", **headers, **({"authorization": f"Bearer {key}"} if key else {})}
        scope = {
            **{"type": "http", "http_version": "1.1", "scheme": "http", "root_path": "", "path": path},
            **{"method": method, "raw_path": path.encode(), "query_string": query.encode()},
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
        }
        got, gone = Got(), asyncio.Event()
        sent = [{"type": "http.request", "body": json.dumps(body).encode() if body is not None else b""}]

        async def receive() -> Any:
            if sent:
                return sent.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def take(message: Any) -> None:
            if message["type"] == "http.response.start":
                got.status = message["status"]
                got.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                return
            got.body += message.get("body", b"")
            if on_body is not None and message.get("body") and await on_body(message["body"]):
                gone.set()
                await asyncio.sleep(0)  # the server sees it before it sends more

        await self.app(scope, receive, take)
        return got

    async def respond(self, given: Any, key: str = "", **fields: Any) -> dict[str, Any]:
        """Return a response that must succeed."""
        got = await self.send("POST", PATH, {"input": given, **fields}, key)
        assert got.status == 200, got.body
        response: dict[str, Any] = got.json
        return response

    async def get(self, path: str, key: str = "") -> Got:
        return await self.send("GET", f"{PATH}/{path}", key=key)

    async def metrics(self) -> dict[str, float]:
        lines = (await self.send("GET", "/metrics")).body.decode().splitlines()
        values = {}
        for line in lines:
            if line.startswith("specrs:stored"):
                name, _, value = line.rpartition(" ")
                name = name.replace('engine="0",', "").replace('model_name="m"', "")
                values[name.replace(",}", "}").replace("{}", "")] = float(value)
        return values

    @property
    def prompt(self) -> str:
        """Prompt of the newest request."""
        return self.tokenizer.decode(self.engine.seen[-1].prompt_token_ids, skip_special_tokens=False)


@asynccontextmanager
async def running(
    tokenizer: Tokenizer,
    *answers: str,
    keys: Sequence[str] = (),
    tools: ToolSettings | None = None,
    max_bytes: int = 1 << 20,
    max_seconds: float = 60.0,
    max_body_size: int = 1 << 20,
) -> AsyncIterator[App]:
    """Run an application whose completions are `answers`, in turn."""
    now = [0.0]
    store = ResponseStore(max_bytes, max_seconds, clock=lambda: now[0])
    engine = Script(tokenizer, *(answers or ("yes",)))
    llm = AsyncLLM.from_engine(engine, tokenizer)  # type: ignore[arg-type]
    try:
        context = Context(
            llm=llm,
            model_names=["m"],
            metrics=Metrics(llm, "m", store),
            templates=AllMessages(),  # type: ignore[arg-type]
            tools=tools or ToolSettings(),
            shared=Shared(responses=store, api_keys=keys, limits=HTTPLimits(max_body_size=max_body_size)),
        )
        yield App(build_app(one_model(context), context.shared), engine, tokenizer, store, now)
    finally:
        llm.shutdown()


Test = Callable[[App], Awaitable[None]]


def run(test: Test, tokenizer: Tokenizer, *answers: str, **settings: Any) -> None:
    async def main() -> None:
        async with running(tokenizer, *answers, **settings) as app:
            await test(app)

    asyncio.run(main())


def test_a_response_is_read_and_deleted(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        response = await app.respond("hello", instructions="Be brief.", metadata={"a": "b"})
        assert response["store"] is True
        assert response["previous_response_id"] is None
        got = await app.get(response["id"])
        assert (got.status, got.json) == (200, response)
        assert got.headers["content-type"] == "application/json"
        assert (await app.get(response["id"] + "?stream=false&include[]=x")).json == response
        deleted = await app.send("DELETE", f"{PATH}/{response['id']}")
        assert deleted.json == {"id": response["id"], "object": "response", "deleted": True}
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            got = await app.send(method, f"{PATH}/{response['id']}{path}")
            assert got.status == 404
            assert repr(response["id"]) in got.error["message"]
        assert len(app.store) == app.store.num_bytes == 0

    run(test, tokenizer)


def test_a_conversation_goes_before_the_input(tokenizer: Tokenizer) -> None:
    """Check that an earlier conversation comes before the input. Instructions are the request's own. Several responses
    may continue one."""

    async def test(app: App) -> None:
        first = await app.respond("one", instructions="A.")
        assert app.prompt == "[system]A.[user]one"
        parts = [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
        second = await app.respond(parts, instructions="B.", previous_response_id=first["id"])
        assert app.prompt == "[system]B.[user]one[assistant]yes[user]two"
        assert second["previous_response_id"] == first["id"]
        await app.respond("three", previous_response_id=second["id"])
        assert app.prompt == "[user]one[assistant]yes[user]two[assistant]no[user]three"
        await app.respond(None, previous_response_id=first["id"])
        assert app.prompt == "[user]one[assistant]yes"
        await app.respond([{"role": "developer", "content": "x"}], previous_response_id=first["id"], store=False)
        assert app.prompt == "[user]one[assistant]yes[developer]x"

    run(test, tokenizer, "yes", "no")


def test_each_response_holds_its_own_items_alone(tokenizer: Tokenizer) -> None:
    """Check that each stored response holds only its own items: ten turns after a long one do not store it ten
    times."""

    async def test(app: App) -> None:
        last = await app.respond("x " * 1000)
        long = app.store.num_bytes
        for i in range(10):
            last = await app.respond(f"{i}", previous_response_id=last["id"])
        assert app.store.num_bytes - long < 10 * 2500
        assert app.prompt.count("x ") == 1000

    run(test, tokenizer)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls_go_on(tokenizer: Tokenizer, stream: bool) -> None:
    async def test(app: App) -> None:
        body = {"input": "one", "tools": TOOLS, "stream": stream}
        got = await app.send("POST", PATH, body)
        first = events_of(got.body)[-1]["response"] if stream else got.json
        assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call", "function_call"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "31"} for item in first["output"][2:]
        ]
        await app.respond(results, previous_response_id=first["id"])
        assert app.prompt == "[user]one[assistant](Hm.)I look.!weather!weather[tool]31[tool]31"
        assert (await app.get(first["id"])).json == first

    run(test, tokenizer, TEXT, "done", tools=ToolSettings(True, "hermes", "qwen3"))


def test_encrypted_reasoning_is_ignored(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        encrypted = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"}
        items = [{"role": "user", "content": "one"}, encrypted, {"role": "assistant", "content": "two"}]
        got = await app.send("POST", PATH, {"input": items, "include": ["reasoning.encrypted_content"]})
        assert got.status == 200
        assert got.headers["x-warning"].startswith("include: has no effect; items have no such parts; reasoning items")
        await app.respond("three", previous_response_id=got.json["id"])
        assert app.prompt == "[user]one[assistant]two[assistant]yes[user]three"
        assert encrypted in (await app.get(f"{got.json['id']}/input_items")).json["data"]

    run(test, tokenizer)


ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "one", "cache_control": {"type": "ephemeral"}},
    {"role": "assistant", "content": "two", "id": "msg_2"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "4", "cache_control": {}}]},
]


def test_input_items_are_listed(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        response = await app.respond(ITEMS)
        later = await app.respond("five", previous_response_id=response["id"])
        got = await app.get(f"{response['id']}/input_items?order=asc")
        page = got.json
        assert got.status == 200
        one, two, call, result, search, four = page["data"]
        assert (page["object"], page["has_more"]) == ("list", False)
        assert (page["first_id"], page["last_id"]) == (one["id"], four["id"])
        assert one == {"type": "message", "id": one["id"], "role": "user"} | {
            "content": [{"type": "input_text", "text": "one"}]
        }
        assert two == ITEMS[1] | {"type": "message", "content": [{"type": "output_text", "text": "two"}]}
        assert call == ITEMS[2] | {"id": call["id"]}
        assert result == ITEMS[3] | {"id": result["id"]}
        assert search == ITEMS[4]
        assert four["content"] == [{"type": "input_text", "text": "4"}]
        assert [item["id"].partition("_")[0] for item in page["data"]] == ["msg", "msg", "fc", "fco", "ws", "msg"]
        assert (await app.get(f"{response['id']}/input_items")).json["data"] == page["data"][::-1]
        for order, items in (("asc", page["data"]), ("desc", page["data"][::-1])):
            for limit in (1, 2, 4, 6, 100):
                found: list[Any] = []
                more, after = True, ""
                while more:
                    part = (await app.get(f"{response['id']}/input_items?order={order}&limit={limit}{after}")).json
                    assert len(part["data"]) <= limit
                    assert (part["first_id"], part["last_id"]) == (part["data"][0]["id"], part["data"][-1]["id"])
                    found += part["data"]
                    more, after = part["has_more"], f"&after={part['last_id']}"
                assert found == items
        end = (await app.get(f"{response['id']}/input_items?after={one['id']}")).json
        assert end == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
        # without what came before
        assert [item["content"][0]["text"] for item in (await app.get(f"{later['id']}/input_items")).json["data"]] == [
            "five"
        ]

    run(test, tokenizer)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=x", "limit"),
        ("limit=", "limit"),
        ("limit=%C2%B2", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("order=up", "order"),
        ("after=msg_9", "after"),
        ("before=msg_9", "before"),
    ],
)
def test_wrong_queries_are_named(tokenizer: Tokenizer, query: str, param: str) -> None:
    async def test(app: App) -> None:
        response = await app.respond("one")
        got = await app.get(f"{response['id']}/input_items?{query}")
        assert (got.status, got.error["param"]) == (400, param)
        assert got.error["message"].startswith(f"{param}=")
        assert len(got.body) < 500

    run(test, tokenizer)


def test_streams_and_unknown_queries_of_one_response_are_refused(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        response = await app.respond("one")
        for method, query in (("GET", "stream=true"), ("GET", "starting_after=3"), ("DELETE", "force=1")):
            got = await app.send(method, f"{PATH}/{response['id']}?{query}")
            assert (got.status, got.error["param"]) == (400, query.partition("=")[0])
        assert (await app.get(response["id"])).status == 200
        assert (await app.send("PUT", f"{PATH}/{response['id']}")).status == 405

    run(test, tokenizer)


def test_a_deleted_response_ends_what_continues_it(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        first = await app.respond("one")
        second = await app.respond("two", previous_response_id=first["id"])
        third = await app.respond("three", previous_response_id=second["id"])
        await app.send("DELETE", f"{PATH}/{second['id']}")
        assert (await app.get(third["id"])).json == third
        for name, told in (
            (second["id"], "there is no such response"),
            (third["id"], f"'{third['id']}' continues '{second['id']}'"),
            ("resp_1", "there is no such response"),
        ):
            got = await app.send("POST", PATH, {"input": "x", "previous_response_id": name})
            assert (got.status, got.error["param"]) == (404, "previous_response_id")
            message = got.error["message"]
            assert message.startswith(f"previous_response_id='{name}': {told}")
            assert message.endswith("send all earlier items in input.")
        await app.respond("x", previous_response_id=first["id"])
        assert len(app.engine.seen) == 4

    run(test, tokenizer)


def test_responses_are_kept_for_a_time_after_their_last_use(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        first = await app.respond("one")
        other = await app.respond("other")
        app.now[0] = 50.0
        second = await app.respond("two", previous_response_id=first["id"])  # which uses the first
        app.now[0] = 60.0
        assert (await app.get(other["id"])).status == 404
        app.now[0] = 109.0
        assert (await app.get(second["id"])).status == 200
        app.now[0] = 168.0
        await app.respond("three", previous_response_id=second["id"], store=False)
        assert app.prompt == "[user]one[assistant]yes[user]two[assistant]yes[user]three"
        app.now[0] = 228.0
        got = await app.send("POST", PATH, {"input": "x", "previous_response_id": second["id"]})
        assert got.status == 404
        assert "--responses-store-seconds" in got.error["message"]
        assert (await app.metrics()) == {
            "specrs:stored_responses": 0,
            "specrs:stored_responses_bytes": 0,
            'specrs:stored_responses_evictions_total{limit="bytes"}': 0,
            'specrs:stored_responses_evictions_total{limit="age"}': 3,
        }

    run(test, tokenizer, max_seconds=60.0)


def test_old_responses_leave_memory_when_metrics_are_read(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        await app.respond("one")
        app.now[0] = 61.0
        assert (await app.metrics())["specrs:stored_responses"] == 0
        assert app.store.num_bytes == 0

    run(test, tokenizer)


def test_the_least_recently_used_make_room(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        one, two = await app.respond("x" * 2000), await app.respond("y" * 2000)
        assert (await app.get(one["id"])).status == 200
        three = await app.respond("z" * 2000)
        assert [(await app.get(each["id"])).status for each in (one, two, three)] == [200, 404, 200]
        metrics = await app.metrics()
        assert metrics["specrs:stored_responses"] == 2
        assert 4000 < metrics["specrs:stored_responses_bytes"] == app.store.num_bytes <= 9000
        assert metrics['specrs:stored_responses_evictions_total{limit="bytes"}'] == 1
        large = await app.respond("w" * 4000, metadata={"a": "x" * 5000})
        assert large["output"]
        assert (await app.get(large["id"])).status == 404
        assert len(app.store) == 0

    run(test, tokenizer, max_bytes=9000)


def test_other_keys_see_nothing(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        mine = await app.respond("mine", "a")
        theirs = await app.send("POST", PATH, {"input": "theirs"}, "b", x_request_id=mine["id"].removeprefix("resp_"))
        assert theirs.json["id"] == mine["id"]  # the client chose it
        assert (await app.get(mine["id"], "a")).json == mine
        assert (await app.get(mine["id"], "b")).json == theirs.json
        await app.send("DELETE", f"{PATH}/{mine['id']}", key="b")
        absent = await app.get("resp_x", "b")
        for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            got = await app.send(method, f"{PATH}/{mine['id']}{path}", key="b")
            assert got.status == 404
            assert got.body == absent.body.replace(b"resp_x", mine["id"].encode())
        got = await app.send("POST", PATH, {"input": "x", "previous_response_id": mine["id"]}, "b")
        assert got.status == 404
        for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            assert (await app.send(method, f"{PATH}/{mine['id']}{path}")).status == 401
        assert (await app.get(mine["id"], "a")).json == mine
        await app.respond("more", "a", previous_response_id=mine["id"])
        assert app.prompt == "[user]mine[assistant]yes[user]more"

    run(test, tokenizer, keys=["a", "b"])


def test_without_keys_there_is_one_owner(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        response = await app.respond("one", "some key")
        assert (await app.get(response["id"], "another")).json == response
        assert (await app.get(response["id"])).json == response

    run(test, tokenizer)


def test_what_is_not_to_be_stored_is_not(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        kept = await app.respond("one", store=True)
        response = await app.respond("two", store=False, previous_response_id=kept["id"])
        assert response["store"] is False
        assert app.prompt == "[user]one[assistant]yes[user]two"
        assert (await app.get(response["id"])).status == 404
        got = await app.send("POST", PATH, {"input": "x", "previous_response_id": response["id"]})
        assert got.status == 404
        assert len(app.store) == 1

    run(test, tokenizer)


@pytest.mark.parametrize("off", [{"max_bytes": 0}, {"max_seconds": 0.0}])
def test_a_server_that_stores_nothing_says_so(tokenizer: Tokenizer, off: dict[str, Any]) -> None:
    async def test(app: App) -> None:
        response = await app.respond("one")
        assert response["store"] is False
        got = await app.send("POST", PATH, {"input": "one", "store": True})
        assert got.headers["x-warning"].startswith("store: has no effect; this server stores no responses")
        assert got.json["store"] is False
        got = await app.send("POST", PATH, {"input": "x", "previous_response_id": response["id"]})
        assert (got.status, got.error["param"]) == (400, "previous_response_id")
        assert "this server stores no responses (--responses-store-bytes" in got.error["message"]
        got = await app.get(response["id"])
        assert got.status == 404
        assert "this server stores no responses" in got.error["message"]

    run(test, tokenizer, **off)


def test_a_stream_is_stored_before_its_last_event(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        found: list[tuple[str, int]] = []
        last: dict[str, Any] = {}

        async def read(piece: bytes) -> bool:
            for block in piece.decode().removesuffix("\n\n").split("\n\n"):
                event = json.loads(block.partition("data: ")[2])
                if "response" in event:
                    last.update(event["response"])
                    found.append((event["type"], (await app.get(last["id"])).status))
            return False

        await app.send("POST", PATH, {"input": "one", "stream": True}, on_body=read)
        assert found == [("response.created", 404), ("response.in_progress", 404), ("response.completed", 200)]
        assert (await app.get(last["id"])).json == last
        await app.send("POST", PATH, {"input": "one", "stream": True, "max_output_tokens": 1}, on_body=read)
        assert found[3:] == [("response.created", 404), ("response.in_progress", 404), ("response.incomplete", 200)]

    run(test, tokenizer, "yes and no " * 20)


def test_a_stream_that_is_left_is_not_stored(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        async def leave(piece: bytes) -> bool:
            return b"output_text.delta" in piece

        got = await app.send("POST", PATH, {"input": "one", "stream": True}, on_body=leave)
        assert b"response.completed" not in got.body
        assert len(app.store) == 0

    run(test, tokenizer, "yes and no " * 1000)


def test_a_failed_response_is_not_stored(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        app.engine.script = lambda request: InvalidRequestError("x: broke")
        events = events_of((await app.send("POST", PATH, {"input": "one", "stream": True})).body)
        assert events[-1]["type"] == "response.failed"
        assert (await app.send("POST", PATH, {"input": "one"})).status == 400
        assert len(app.store) == 0

    run(test, tokenizer)


def test_a_request_id_that_comes_again_leaves_the_first_response(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        first = await app.respond("one", request_id="r")
        assert first["id"] == "resp_r"
        second = await app.respond("two", request_id="r", previous_response_id="resp_r")
        assert second["id"] != first["id"]
        assert (await app.get("resp_r")).json == first
        await app.respond("three", request_id="r", previous_response_id=second["id"])
        assert app.prompt == "[user]one[assistant]yes[user]two[assistant]yes[user]three"

    run(test, tokenizer)


def test_a_conversation_is_not_longer_than_a_body_may_be(tokenizer: Tokenizer) -> None:
    async def test(app: App) -> None:
        # items of tools that the server does not run are stored, and are not in the prompt
        hosted = {"type": "web_search_call", "id": "ws_1", "action": "x" * 1500}
        last = await app.respond([{"role": "user", "content": "one"}, hosted])
        last = await app.respond([{"role": "user", "content": "two"}, hosted], previous_response_id=last["id"])
        got = await app.send("POST", PATH, {"input": "x", "previous_response_id": last["id"]})
        assert (got.status, got.error["param"]) == (413, "previous_response_id")
        assert "must be at most --max-body-size=3000" in got.error["message"]

    run(test, tokenizer, max_body_size=3000)


def test_a_conversation_has_a_most_of_responses(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_MESSAGES", 3)

    async def test(app: App) -> None:
        last = await app.respond("one")
        for _ in range(2):
            last = await app.respond(None, previous_response_id=last["id"])
        got = await app.send("POST", PATH, {"previous_response_id": last["id"]})
        assert (got.status, got.error["param"]) == (400, "previous_response_id")
        assert got.error["message"].endswith("continues 3 responses, the most allowed")

    run(test, tokenizer)


def test_a_conversation_has_a_most_of_messages() -> None:
    items = [{"role": "user", "content": "x"}] * (MAX_MESSAGES - 1)
    body = ResponsesRequest.model_validate({"instructions": "x", "input": items})
    assert len(as_chat(body).messages) == MAX_MESSAGES
    with pytest.raises(InvalidRequestError, match=f"^input: makes {MAX_MESSAGES + 1} messages"):
        as_chat(body, [{"type": "message", "role": "user", "content": "x"}])


CONTENTS = st.text(max_size=3) | st.lists(
    st.builds(lambda text: {"type": "input_text", "text": text}, st.text(max_size=3)), min_size=1, max_size=2
)
GIVEN_ITEMS = st.one_of(
    st.builds(
        lambda role, content, more: {"role": role, "content": content, **more},
        st.sampled_from(["user", "assistant", "system", "developer"]),
        CONTENTS,
        st.sampled_from([{}, {"type": "message"}, {"id": "msg_1"}, {"id": 3}, {"cache_control": {}}]),
    ),
    st.builds(
        lambda name, more: {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}", **more},
        st.text(max_size=3),
        st.sampled_from([{}, {"status": "completed"}, {"id": None}]),
    ),
    st.builds(lambda output: {"type": "function_call_output", "call_id": "c", "output": output}, CONTENTS),
    st.builds(
        lambda text: {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]},
        st.text(max_size=3),
    ),
    st.just({"type": "web_search_call", "id": "ws_1"}),
)


@given(st.lists(GIVEN_ITEMS, max_size=6), st.lists(GIVEN_ITEMS, max_size=6))
def test_stored_items_make_the_messages_that_sent_ones_make(
    first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> None:
    user = {"role": "user", "content": "x"}
    whole = as_chat(ResponsesRequest.model_validate({"input": [*first, user, *second, user]}))
    own = ResponsesRequest.model_validate({"input": [*second, user]})
    stored = json.loads(json.dumps(stored_items([*first, user])))
    assert as_chat(own, stored).messages == whole.messages
    assert all(isinstance(item["id"], str) and isinstance(item["type"], str) for item in stored)
    assert "cache_control" not in json.dumps(stored)


# A real server


@pytest.fixture(scope="module")
def responding() -> Iterator[Server]:
    with serving(
        *(*SETTINGS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        *("--chat-template", TEMPLATE, "--responses-store-bytes", "1M", "--responses-store-seconds", "600"),
    ) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_is_the_whole_conversation(responding: Server, stream: bool) -> None:
    """Check a chain of responses: a loop of tools by ids gives the text and the number of prompt tokens of a loop that
    sends all earlier items. The earlier prompt comes from the prefix cache."""
    options = {"tools": TOOLS, "temperature": 0, "max_output_tokens": 90, "stream": stream}

    def respond(body: dict[str, Any]) -> dict[str, Any]:
        answer = responding.post(PATH, {**options, **body})
        assert answer.status == 200, answer.body
        response: dict[str, Any] = events_of(answer.body)[-1]["response"] if stream else answer.json
        return response

    history: list[dict[str, Any]] = []
    last, cached = None, 0
    result: list[dict[str, Any]] = []
    for turn in range(4):
        new = [*result, {"role": "user", "content": f"How warm is it in Rome on day {turn}? Say it in one sentence."}]
        forced = {"structured_outputs": {"choice": [TEXT]}} if turn % 2 == 0 else {"tool_choice": "none"}
        chained = respond({"input": new, "previous_response_id": last, **forced})
        whole = respond({"input": [*history, *new], "store": False, **forced})
        assert plain(chained["output"]) == plain(whole["output"])
        assert chained["status"] == whole["status"]
        assert chained["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        if turn:
            assert chained["usage"]["input_tokens_details"]["cached_tokens"] >= cached > 0
        cached = chained["usage"]["input_tokens"] // 16 * 16 - 16
        assert (chained["store"], whole["store"]) == (True, False)
        calls = [item for item in chained["output"] if item["type"] == "function_call"]
        result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "31"} for call in calls]
        assert len(calls) == (2 if turn % 2 == 0 else 0)
        history += [*new, *chained["output"]]
        last = chained["id"]
    shown = responding.get(f"{PATH}/{last}").json
    assert shown["output"] == chained["output"]
    metrics = responding.metrics()
    assert metrics["specrs:stored_responses"] >= 4
    assert 0 < metrics["specrs:stored_responses_bytes"] < 1 << 20

"""Ranks as processes, of a server and under torchrun. If one dies or hangs, all end, it is named, and no process stays.

`make test-ranks` runs this; each test starts processes, which takes seconds.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server.harness import Server, alive, serving

SIZE = 2
FLAGS = ("-tp", str(SIZE), "--dtype", "float64", "--max-model-len", "1024", "--device", "cpu")
ENDLESS: dict[str, Any] = {"prompt": "def add(a, b):", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
END_TIMEOUT = 10.0
LISTEN = "0A"


def ranks_of(server: Server) -> list[int]:
    """Return the process ids of the other ranks."""
    return [pid for pid in server.children() if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def ends_with(server: Server, code: int) -> None:
    """Check that the server and all its children end in time, the server with `code`."""
    children = server.children()
    assert server.wait(END_TIMEOUT) == code, "".join(server.lines)
    assert not any(alive(pid) for pid in children)


def listens_elsewhere(pid: int) -> list[str]:
    """Return the local addresses other than 127.0.0.1 that a process listens on, by /proc."""
    files = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink())
    sockets = {name.removeprefix("socket:[").removesuffix("]") for name in files if name.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in sockets and not fields[1].startswith("0100007F:"):
                found.append(fields[1])
    return found


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(*FLAGS, "--distributed-timeout", "3") as made:
        yield made


def test_serves_and_ends_with_a_signal(server: Server) -> None:
    with serving(*FLAGS[2:]) as alone:
        bodies = [ENDLESS | {"max_tokens": 40}, ENDLESS | {"max_tokens": 40, "temperature": 0.9, "seed": 7}]
        for body in bodies:
            assert server.complete(**body)["choices"] == alone.complete(**body)["choices"]
    (rank,) = ranks_of(server)
    for pid in (server.process.pid, rank):
        assert listens_elsewhere(pid) == []
    os.kill(rank, signal.SIGINT)  # as a terminal sends it to all processes
    os.kill(rank, signal.SIGTERM)
    assert server.complete(**(ENDLESS | {"max_tokens": 4}))["usage"]["completion_tokens"] == 4
    server.process.send_signal(signal.SIGINT)
    ends_with(server, 0)


KILLS: dict[str, Callable[[int], None]] = {
    "killed": lambda rank: os.kill(rank, signal.SIGKILL),
    "stopped": lambda rank: os.kill(rank, signal.SIGSTOP),
}
SAYS = {"killed": "rank 1 of 2 was killed by SIGKILL", "stopped": "rank 1 of 2 did not answer for 3 s"}
TOLD = "The engine is not running: rank 1 of 2 is lost."
"""Message to clients, who learn no details."""


@pytest.mark.parametrize("how", KILLS)
def test_a_rank_that_is_lost_ends_every_request(server: Server, how: str) -> None:
    (rank,) = ranks_of(server)
    with server.streaming(**ENDLESS) as first, server.streaming(**ENDLESS | {"prompt": "import"}) as second:
        for _ in range(random.Random(os.getpid()).randrange(1, 12)):
            next(first)
        next(second)
        KILLS[how](rank)
        ends = [list(first), list(second)]
    for events in ends:
        errors = [event["error"]["message"] for event in events if isinstance(event, dict) and "error" in event]
        assert errors == [TOLD]
    answer = server.get("/health")
    assert (answer.status, answer.error["message"]) == (503, TOLD)
    ends_with(server, 1)
    assert SAYS[how] in "".join(server.lines)


def test_an_idle_server_sees_a_rank_die(server: Server) -> None:
    (rank,) = ranks_of(server)
    os.kill(rank, signal.SIGKILL)
    server.wait_for_line(SAYS["killed"])
    assert server.get("/health").error["message"] == TOLD
    ends_with(server, 1)


def test_no_rank_outlives_rank_0(server: Server) -> None:
    (rank,) = ranks_of(server)
    with server.streaming(**ENDLESS) as events:
        next(events)
        server.process.kill()
    deadline = time.monotonic() + END_TIMEOUT
    while alive(rank):
        assert time.monotonic() < deadline


UNDER_TORCHRUN = """
import glob, json, os, signal, sys
from specrs import LLM, SamplingParams

llm = LLM(
    dtype="float64", device="cpu", tensor_parallel_size=2, distributed_timeout=5.0, max_model_len=256,
    speculative_config={"num_speculative_tokens": 3, "draft_tensor_parallel_size": 2},
)
assert os.environ["RANK"] == "0"  # others serve steps, and return from no constructor
for again in range(2):
    if again and sys.argv[1] == "kill":
        children = "".join(open(path).read() for path in glob.glob(f"/proc/{os.getppid()}/task/*/children"))
        (other,) = {int(pid) for pid in children.split()} - {os.getpid()}
        os.kill(other, signal.SIGKILL)
    (output,) = llm.generate("def add(a, b):", SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    print(json.dumps(output.outputs[0].token_ids), flush=True)
"""

ALONE = """
import json
from specrs import LLM, SamplingParams

llm = LLM(dtype="float64", device="cpu", max_model_len=256)
(output,) = llm.generate("def add(a, b):", SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
print(json.dumps(output.outputs[0].token_ids))
"""


def torchrun(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks under torchrun, on ports that the system chooses."""
    script = tmp_path / "generate.py"
    script.write_text(UNDER_TORCHRUN)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}", str(script), *arguments]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)


def test_torchrun(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "end")
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == second
    assert len(first) == 16


def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    """Check torchrun on two nodes, here two agents that meet by a rendezvous, with one rank each: the text is that of
    one process."""
    script = tmp_path / "generate.py"
    script.write_text(UNDER_TORCHRUN)
    whole = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, check=True
    ).stdout.splitlines()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *flags]
    agents = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", "--local-addr=127.0.0.1", str(script), "end"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        told = [agent.communicate(timeout=120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], told
    # Which agent has rank 0 is the rendezvous's to say.
    assert sorted(out.splitlines() for out, _ in told) == [[], whole * 2]


def test_torchrun_ends_with_a_rank(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "kill")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert "SIGKILL" in done.stderr

"""A rank's process is killed by SIGKILL at a random moment of serving: every request ends with an error that names it,
and rank 0 stays intact.

SPECRS_KILLS says how many times, 20 by default; a time takes some 2.5 s, nearly all to start the rank.
"""

import os
import random
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from engine.harness import LONGEST, Bank, assert_idle, make_bank, request, run
from engine.harness import config as engine_config
from specrs.engine.build import build_engine
from specrs.engine.request import Request
from specrs.errors import RankLostError

KILLS = int(os.environ.get("SPECRS_KILLS", "20"))
LATEST = 0.4
"""Latest time of the kill, in seconds after the first step: it falls into prompts, drafts, verifications or between
steps."""
LOST = "rank 1 of 2 was killed by SIGKILL"


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return make_bank(tmp_path_factory.mktemp("kills"), kv_heads=2)


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_rank_killed_at_a_random_moment(seed: int, bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen.__init__

    def recorded(self: subprocess.Popen[bytes], *given: object, **named: object) -> None:
        started.append(self)
        start(self, *given, **named)  # type: ignore[call-overload]

    fields = {"tensor_parallel_size": 2, "max_steps_in_flight": rng.choice([1, 2]), "distributed_timeout": 20.0}
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", recorded)
        engine = build_engine(engine_config(bank.target, bank.drafts["close"], k=3, **fields))
    (rank,) = [process for process in started if "rank_process" in str(process.args)]
    timer = threading.Timer(rng.uniform(0.0, LATEST), rank.send_signal, [signal.SIGKILL])
    timer.start()
    made: list[tuple[int, Request]] = []

    def serve() -> None:
        while True:
            for which in rng.choices(range(len(bank.prompts)), k=3):
                asked = request(len(made), bank.prompts[which], k=None, max_tokens=LONGEST, engine_k=3)
                made.append((which, asked))
                engine.add_request(asked)
            run(engine)

    try:
        with pytest.raises(RankLostError, match=LOST):
            serve()
    finally:
        timer.join()
    while engine.has_unfinished():
        with pytest.raises(RankLostError, match=LOST):
            run(engine)
    for which, asked in made:
        assert bank.continuations[which][: len(asked.output_token_ids)] == asked.output_token_ids
        assert asked.finished
        assert asked.error is None or LOST in str(asked.error)
    assert_idle(engine)
    engine.close()
    assert rank.wait(10) == -signal.SIGKILL
    assert not Path(f"/proc/{rank.pid}").exists()

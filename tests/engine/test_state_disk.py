"""A prefix cache on disk of targets with layers that have states: what it gives has the bits of what is computed, with
and without drafts, whatever part of it is there. `test_disk_cache.py` has the tests of what all models share."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from hf_reference import load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mtp_reference import add_head, fit
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.errors import InvalidConfigError
from sweep import stride

from engine.harness import assert_idle, request, run
from engine.test_disk_cache import RANDOM, SHARES, end, segments, stats_of

VOCAB, BLOCK, K, TOKENS = 61, 4, 3, 9
SHAPE: dict[str, Any] = {
    "vocab": VOCAB,
    "hidden": 64,
    "intermediate": 96,
    "head_dim": 32,
    "kv_heads": 1,
    "eos_token_id": 0,
}
# MtpModel takes its norms from the last layer, so that has attention.
KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_random = np.random.default_rng(9)
PARTS = [_random.integers(1, VOCAB, size).tolist() for size in (13, 26, 9, 30)]
PROMPTS = [PARTS[3] + PARTS[1], PARTS[3] + PARTS[0], PARTS[3][:22], PARTS[1] * 2, PARTS[1] + PARTS[2], PARTS[0]]
SNAPSHOT = 3
"""Kind of a record that holds a snapshot of states."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with an MTP head, some of whose drafts the target accepts."""
    made = tmp_path_factory.mktemp("state_disk") / "target"
    add_head(make_checkpoint(made, "qwen3_5_text", layer_types=KINDS, layers=len(KINDS), seed=2, **SHAPE), seed=4)
    texts = [prompt + text[0] for prompt, text in zip(PROMPTS, plain(made), strict=False)]
    fit(made, load(made, torch.float32), texts)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Path of a folder that does not exist yet."""
    return tmp_path / "kv"


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 16)
    monkeypatch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)


def config(path: Path, method: str | None, cache: Path | None, **fields: Any) -> EngineConfig:
    speculative: Any = None if method is None else {"method": method, "num_speculative_tokens": K}
    if method == "ngram":
        speculative |= {"prompt_lookup_min": 1}
    folder = None if cache is None else str(cache)
    sizes: dict[str, Any] = {
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": 96,
        "max_num_seqs": 6,
        "threads": 1,
    }
    states = {"state_cache_memory_bytes": 2 << 20}  # room for all snapshots
    return EngineConfig(
        model=str(path), speculative_config=speculative, kv_cache_path=folder, **(sizes | states | fields)
    )


@cache
def weights(path: Path, method: str | None, changed: float) -> Weights:
    """Load the weights once per checkpoint, time of its change, and method. They are shared, because weights are never
    written to."""
    return load_weights(config(path, method, None))


def start(path: Path, method: str | None, cache: Path | None = None, **fields: Any) -> Engine:
    changed = (path / "model.safetensors").stat().st_mtime
    return build_engine(config(path, method, cache, **fields), weights(path, method, changed))


def ask(
    engine: Engine, prompts: list[list[int]], method: str | None, *, first: int = 0, salt: str = ""
) -> list[Request]:
    """Run greedy requests one after another, so that each can use the KV and snapshots of the earlier ones."""
    made = []
    k = 0 if method is None else K
    for i, prompt in enumerate(prompts, first):
        fields: dict[str, Any] = {"return_drafts": True, "logprobs": 2}
        made.append(request(i, prompt, k=None, max_tokens=TOKENS, engine_k=k, ignore_eos=True, **fields))
        made[-1].cache_salt = salt
        engine.add_request(made[-1])
        run(engine)
        engine.settle_idle()
    return made


def bits(jobs: list[Request]) -> list[Any]:
    """Tokens, and log probabilities to the bit."""
    return [(job.output_token_ids, job.logprobs) for job in jobs]


def followed(jobs: list[Request]) -> list[list[int]]:
    """Prompts that continue the texts of `jobs`."""
    return [job.prompt_token_ids + job.output_token_ids + [3, 5] for job in jobs]


@cache
def plain(path: Path) -> list[Any]:
    """Return tokens and log probabilities without drafts and without prefix cache: first for the prompts, then for
    prompts that continue their texts."""
    made = config(path, None, None, enable_prefix_caching=False, state_cache_memory_bytes=None)
    engine = build_engine(made, load_weights(made))
    first = ask(engine, PROMPTS, None)
    return bits(first) + bits(ask(engine, followed(first), None, first=10))


METHODS = [None, "mtp", "suffix,mtp", "ngram"]


@pytest.mark.parametrize("method", METHODS)
def test_a_hit_has_the_bits_of_a_miss(path: Path, folder: Path, method: str | None) -> None:
    """Check that the cache on disk gives the same prefix hits as the cache in memory, and the same drafts of the head
    after them."""
    cold = start(path, method, folder)
    computed = ask(cold, PROMPTS, method)
    computed += ask(cold, followed(computed), method, first=10)
    prompts = [job.prompt_token_ids for job in computed]
    again = ask(cold, prompts, method, first=20)
    assert (stats_of(cold).loaded_tokens, stats_of(cold).loaded_snapshots) == (0, 0), "all of it is in memory"
    end(cold)
    warm = start(path, method, folder)
    loaded = ask(warm, prompts, method)
    assert bits(computed) == bits(again) == bits(loaded) == plain(path)
    assert [job.num_cached_tokens for job in loaded] == [job.num_cached_tokens for job in again]
    assert [job.num_cached_tokens for job in loaded] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    if method != "suffix,mtp":  # whose drafts depend on how many outputs were seen
        assert [job.drafts for job in loaded] == [job.drafts for job in again]
    stats = stats_of(warm)
    # Some prompts go on after a snapshot that an earlier one has left in memory.
    assert len(prompts) // 2 < stats.loaded_snapshots <= len(prompts)
    assert (stats.loaded_tokens > 0, stats.errors) == (True, 0)
    warm.scheduler.check_integrity()
    end(warm)


def test_what_waits_at_the_end_of_an_output_is_written(path: Path, folder: Path) -> None:
    """Check that only the last snapshot of an output is written to the disk, and that the next turn of the conversation
    begins with it."""
    engine = start(path, None, folder)
    (job,) = ask(engine, PROMPTS[:1], None)
    end(engine)
    engine = start(path, None, folder)
    turn = ask(engine, [job.prompt_token_ids + job.output_token_ids[:-1] + [7, 8, 9, 10, 11]], None)[0]
    # The last token of an output is never fed.
    n = len(job.prompt_token_ids) + TOKENS - 1
    assert turn.num_cached_tokens == n // 4 * 4
    assert stats_of(engine).loaded_snapshots == 1
    end(engine)


def rewrite(folder: Path, keep: Callable[[int, int], bool]) -> int:
    """Rewrite the segments with only those records for which `keep(number, kind)` is true. Return the number of records
    before."""
    count = 0
    for file in segments(folder):
        content, at, kept = file.read_bytes(), 0, b""
        while at < len(content):
            (kind,), (size,) = struct.unpack_from("<I", content, at + 24), struct.unpack_from("<Q", content, at + 32)
            if keep(count, kind):
                kept += content[at : at + 64 + size]
            at, count = at + 64 + size, count + 1
        file.write_bytes(kept)
    return count


def test_blocks_and_snapshots_are_of_use_together(path: Path, folder: Path) -> None:
    """Check that neither KV without a snapshot nor a snapshot without its KV is read from the disk. A request that
    finds KV without a snapshot leaves a snapshot at the end of that KV."""
    engine = start(path, "mtp", folder)
    ask(engine, PROMPTS[:1], "mtp")
    end(engine)
    whole = {file: file.read_bytes() for file in segments(folder)}
    for kept in (lambda i, kind: kind == SNAPSHOT, lambda i, kind: kind != SNAPSHOT):
        for file, content in whole.items():
            file.write_bytes(content)
        rewrite(folder, kept)
        engine = start(path, "mtp", folder)
        jobs = ask(engine, [[*PROMPTS[0][:42], 1]], "mtp")
        assert jobs[0].num_cached_tokens == 0
        assert (stats_of(engine).loaded_tokens, stats_of(engine).loaded_snapshots, stats_of(engine).errors) == (0, 0, 0)
        end(engine)
        engine = start(path, "mtp", folder)
        assert bits(ask(engine, PROMPTS[:1], "mtp")) == plain(path)[:1]
        end(engine)


def test_a_shared_beginning_gets_a_snapshot_through_the_disk(path: Path, folder: Path) -> None:
    """Check requests with a shared beginning, each in an engine of its own. The second one finds KV on disk, and leaves
    a snapshot where the shared beginning ends."""
    found = []
    for i in range(4):
        engine = start(path, None, folder)
        found.append(ask(engine, [[*PROMPTS[0][:30], i + 1, *PARTS[2], *PARTS[2]]], None)[0].num_cached_tokens)
        end(engine)
    assert found == [0, 16, 28, 28]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(METHODS), st.integers(0, 1 << 30), st.sampled_from([0.1, 0.5, 0.9]))
def test_any_part_of_the_records_serves(
    path: Path, tmp_path_factory: pytest.TempPathFactory, method: str | None, seed: int, share: float
) -> None:
    folder, rng = tmp_path_factory.mktemp("part") / "kv", np.random.default_rng(seed)
    engine = start(path, method, folder)
    asked = ask(engine, PROMPTS, method)
    asked += ask(engine, followed(asked), method, first=10)
    end(engine)
    rewrite(folder, lambda i, kind: rng.random() < share)
    engine = start(path, method, folder)
    assert bits(ask(engine, [job.prompt_token_ids for job in asked], method)) == plain(path)
    assert stats_of(engine).errors == 0
    engine.scheduler.check_integrity()
    end(engine)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    method=st.sampled_from(METHODS),
    blocks=st.sampled_from([34, 60]),
    slots=st.sampled_from([1, 3, None]),
    budget=st.sampled_from([7, 64]),
    cut=st.booleans(),
)
def test_engines_that_share_a_folder_write_the_same_texts(
    data: st.DataObject,
    method: str | None,
    blocks: int,
    slots: int | None,
    budget: int,
    cut: bool,
    path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Small pools of blocks and snapshots evict, preempt and load all the time."""
    folder, known = tmp_path_factory.mktemp("shared") / "kv", plain(path)
    prompts = PROMPTS + [prompt + text[0] + [3, 5] for prompt, text in zip(PROMPTS, known, strict=False)]
    for _ in range(2):
        order = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=8))
        engine = start(
            path,
            method,
            folder,
            num_gpu_blocks_override=blocks,
            num_reserved_decode_tokens=0,
            max_num_batched_tokens=budget,
            kv_cache_disk_bytes=1 << 20,
            state_cache_memory_bytes=None if slots is None else slots * weights_bytes(path),
        )
        jobs = []
        for i, which in enumerate(order):
            k = 0 if method is None else K
            fields: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2}
            jobs.append(request(i, prompts[which], k=None, engine_k=k, **fields))
            engine.add_request(jobs[-1])
            for _ in range(i % 3):
                engine.step()
        run(engine)
        assert bits(jobs) == [known[which] for which in order]
        assert engine.disk is not None
        engine.disk.flush()  # the thread that writes also deletes
        assert sum(file.stat().st_size for file in segments(folder)) <= 1 << 20
        if cut:
            for file in segments(folder):
                os.truncate(file, file.stat().st_size * 2 // 3)
        engine.scheduler.check_integrity()
        end(engine)


def weights_bytes(path: Path) -> int:
    """Bytes of the states of a request."""
    row: int = weights(path, None, (path / "model.safetensors").stat().st_mtime).target.state_bytes[0]
    return row


@pytest.mark.parametrize("damage", ["flip", "zero", "cut", "swap", "exchange"])
def test_damaged_files_cost_hits_alone(path: Path, folder: Path, damage: str) -> None:
    engine = start(path, "mtp", folder, kv_cache_disk_bytes=2 << 20)
    asked = ask(engine, PROMPTS, "mtp")
    end(engine)
    assert stats_of(engine).written_bytes < 1 << 20
    rng, paths = np.random.default_rng(7), segments(folder)
    assert len(paths) > 2
    contents = [bytearray(file.read_bytes()) for file in paths]
    for i, (file, content) in enumerate(zip(paths, contents, strict=True)):
        if damage == "flip":
            for at in rng.integers(len(content), size=9):
                content[at] ^= 1 << int(rng.integers(8))
        elif damage == "zero":
            begin = int(rng.integers(len(content)))
            content[begin : begin + 4096] = bytes(len(content[begin : begin + 4096]))
        elif damage == "cut":
            del content[int(rng.integers(len(content))) :]
        elif damage == "swap":
            content = contents[(i + 1) % len(contents)]
        else:
            exchange_states(content)
        file.write_bytes(content)
    for _ in range(2):
        engine = start(path, "mtp", folder, kv_cache_disk_bytes=2 << 20)
        assert bits(ask(engine, [job.prompt_token_ids for job in asked], "mtp")) == plain(path)[: len(asked)]
        assert_idle(engine)
        end(engine)
    assert stats_of(engine).loaded_snapshots > 0, "they were written again"


def exchange_states(content: bytearray) -> None:
    """Exchange the payloads of a segment's snapshots, each of which stays as long as it was."""
    at, places = 0, []
    while at < len(content):
        (kind,), (size,) = struct.unpack_from("<I", content, at + 24), struct.unpack_from("<Q", content, at + 32)
        if kind == SNAPSHOT:
            places.append(slice(at + 64, at + 64 + size))
        at += 64 + size
    payloads = [bytes(content[place]) for place in places]
    for place, payload in zip(places, [*payloads[1:], *payloads[:1]], strict=True):
        content[place] = payload


def test_salts_do_not_share(path: Path, folder: Path) -> None:
    for salt, hits in (("a", 0), ("b", 0), ("a", 1), ("", 0)):
        engine = start(path, "mtp", folder)
        assert bits(ask(engine, PROMPTS[:1], "mtp", salt=salt)) == plain(path)[:1]
        assert stats_of(engine).loaded_snapshots == hits, salt
        end(engine)


def test_a_snapshot_of_another_salt_is_not_read(path: Path, folder: Path) -> None:
    """Check that KV of one salt is of no use with a snapshot of another one, though both are of the same tokens."""
    written = 0
    for salt in "ab":
        before = written
        engine = start(path, None, folder)
        ask(engine, PROMPTS[:1], None, salt=salt)
        end(engine)
        written = rewrite(folder, lambda i, kind: True)
    rewrite(folder, lambda i, kind: i < before or kind != SNAPSHOT)
    engine = start(path, None, folder)
    assert bits(ask(engine, PROMPTS[:1], None, salt="b")) == plain(path)[:1]
    assert (stats_of(engine).loaded_tokens, stats_of(engine).loaded_snapshots) == (0, 0)
    assert bits(ask(engine, PROMPTS[:1], None, salt="a", first=1)) == plain(path)[:1]
    assert stats_of(engine).loaded_snapshots == 1
    end(engine)


def test_files_of_other_settings_are_not_read(path: Path, folder: Path) -> None:
    """Check that files of another block size are not read, even if they are copied to where files of this block size
    belong."""
    engine = start(path, "mtp", folder)
    ask(engine, PROMPTS[:1], "mtp")
    end(engine)
    (own,) = {file.parent for file in segments(folder)}
    for moved in (False, True):
        engine = start(path, "mtp", folder, block_size=2 * BLOCK)
        if moved:
            assert stats_of(engine).errors == 0
        assert bits(ask(engine, PROMPTS[:1], "mtp")) == plain(path)[:1]
        assert (stats_of(engine).loaded_tokens, stats_of(engine).loaded_snapshots) == (0, 0)
        end(engine)
        (other,) = {file.parent for file in segments(folder)} - {own}
        for file in other.glob("*.kv"):
            file.unlink()
        for file in own.glob("*.kv"):
            shutil.copy(file, other / file.name)


def test_the_limit_holds(path: Path, folder: Path) -> None:
    limit = 16 * (2 * 2 * 32 * 4 * BLOCK + 64) + 3 * (weights_bytes(path) + 64)
    engine = start(path, None, folder, kv_cache_disk_bytes=limit)
    assert engine.disk is not None
    rng = np.random.default_rng(3)
    for i in range(12):
        ask(engine, [rng.integers(1, VOCAB, size=60).tolist()], None, first=i)
        engine.disk.flush()
        assert sum(file.stat().st_size for file in segments(folder)) <= limit
    assert stats_of(engine).written_bytes > 2 * limit
    assert stats_of(engine).errors == 0
    end(engine)
    message = (
        r"kv_cache_disk_bytes=\d+: must be at least \d+, which 16 blocks and 2 snapshots of states of these models"
    )
    with pytest.raises(InvalidConfigError, match=message):
        start(path, None, folder, kv_cache_disk_bytes=weights_bytes(path))


def test_a_process_that_only_reads(path: Path, folder: Path) -> None:
    """Check a process that only reads: it uses records that another process writes later, and writes nothing itself."""
    writer, reader = start(path, "mtp", folder), start(path, "mtp", folder)
    expected = ask(writer, PROMPTS[:1], "mtp")
    assert writer.disk is not None
    writer.disk.flush()
    jobs = ask(reader, PROMPTS[:2], "mtp")
    assert bits(jobs)[0] == bits(expected)[0]
    assert (stats_of(reader).loaded_snapshots, stats_of(reader).written_bytes) == (2, 0)
    assert reader.idle_interval is None
    end(writer)
    end(reader)


CHILD = """
import resource, signal, sys
from specrs import LLM, SamplingParams
from specrs.pair import HYBRID
folder, most, kills = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "kill"
llm = LLM(str(HYBRID), dtype="float32", max_model_len=256, block_size=16, threads=1, kv_cache_path=folder,
          speculative_config={"method": "mtp", "num_speculative_tokens": 3})
# Python ignores the signal, and writes beyond the limit fail after what fits; by default it kills at that very byte.
signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kills else signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
for first in (0, 50):
    prompt = {"prompt_token_ids": [(first + 7 * i) % 300 for i in range(100)]}
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    print(*output.outputs[0].token_ids, flush=True)
llm.engine.close()
stats = llm.stats().disk_cache
print(stats.errors, stats.written_bytes, stats.loaded_snapshots, flush=True)
"""


def child(folder: Path, most: int, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(most), how]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], int]:
    """Texts of a child process that runs to its end, and the number of bytes that it wrote."""
    folder = tmp_path_factory.mktemp("whole") / "kv"
    done = child(folder, resource.RLIM_INFINITY, "fail")
    assert done.returncode == 0, done.stderr
    *texts, figures = done.stdout.splitlines()
    assert figures.split()[0] == "0"
    return texts, int(figures.split()[1])


@pytest.mark.parametrize("share", SHARES + [RANDOM.random() for _ in range(15)][:: stride(16)])
def test_a_process_that_is_killed_leaves_what_was_whole(
    share: float, folder: Path, whole: tuple[list[str], int]
) -> None:
    """Check that a process which is killed while it writes leaves a usable cache. The system kills the child after a
    given number of bytes."""
    texts, size = whole
    killed = child(folder, int(share * size), "kill")
    assert killed.returncode == -signal.SIGXFSZ, killed.stderr
    assert "".join(f"{text}\n" for text in texts).startswith(killed.stdout)  # a line may be cut, too
    assert sum(file.stat().st_size for file in segments(folder)) == int(share * size), "cut in the middle"
    next_one = child(folder, resource.RLIM_INFINITY, "fail")
    *found, figures = next_one.stdout.splitlines()
    assert (found, next_one.returncode) == (texts, 0), next_one.stderr
    errors, written, loaded = map(int, figures.split())
    assert errors == 0
    assert loaded == 0 or share > 0.2, "whole snapshots are used"
    assert loaded > 0 or share < 0.9
    # What was torn was cut off, and every record is there once. Where the KV of a prompt was whole in part, the next
    # one left a snapshot.
    extra = sum(file.stat().st_size for file in segments(folder)) - size
    assert extra in (0, snapshot_record_bytes(folder))
    assert 0 < written <= size + extra


def snapshot_record_bytes(folder: Path) -> int:
    """Bytes of the record of a snapshot."""
    sizes: set[int] = set()
    for file in segments(folder):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (kind,), (size,) = struct.unpack_from("<I", content, at + 24), struct.unpack_from("<Q", content, at + 32)
            if kind == SNAPSHOT:
                sizes.add(64 + size)
            at += 64 + size
    (found,) = sizes
    return found


def test_a_full_disk_costs_the_cache_and_no_request(folder: Path, whole: tuple[list[str], int]) -> None:
    texts, size = whole
    done = child(folder, size // 3, "fail")
    *found, figures = done.stdout.splitlines()
    assert (found, done.returncode) == (texts, 0), done.stderr
    errors, written, _ = map(int, figures.split())
    assert errors > 0
    assert 0 < written <= size // 3
    assert sum(file.stat().st_size for file in segments(folder)) == written, "nothing torn stays"

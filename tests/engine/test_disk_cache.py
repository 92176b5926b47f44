"""A prefix cache on disk: loaded blocks have the bits of computed ones, and no fault of the disk costs a request."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import edit_json, make_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm.scripted import ScriptedEngine
from lora.adapters import Spec, write_adapter
from safetensors.numpy import load_file, save_file
from specrs import LLM, LoRARequest, SamplingParams
from specrs.config import EngineConfig
from specrs.core import BlockStored, KVEventBatch
from specrs.engine import disk_cache_key
from specrs.engine.build import build_engine
from specrs.engine.disk_cache_key import NOT_IN_DRAFT_KEY, NOT_IN_KEY
from specrs.engine.engine import Engine
from specrs.engine.loop import EngineLoop
from specrs.engine.request import Request
from specrs.engine_options import EngineOptions
from specrs.errors import InvalidConfigError, SpecrsError, UnsupportedConfigError
from specrs.options import options_of
from specrs.outputs import DiskCacheStats
from specrs.pair import TARGET
from specrs.speculative_config import SpeculativeConfig
from sweep import stride

from engine.harness import LONGEST, Bank, assert_idle, greedy_jobs, make_engine, request, run, run_greedy

BLOCK = 4
QUIET: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "null"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)


class Observed:
    """An engine, and the hash and place of each block that it cached."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.blocks: dict[int, int] = {}
        engine.publish = self._follow

    def _follow(self, batch: KVEventBatch) -> None:
        for event in batch.events():
            assert isinstance(event, BlockStored), "the pool holds all"
            self.blocks |= dict(zip(event.block_hashes, event.blocks, strict=True))

    def target_kv(self) -> dict[int, bytes]:
        """Return the target's KV of each cached block, by its hash."""
        layers = self.engine.runner.kv_cache.layers
        return {hash_: b"".join(layer[block].tobytes() for layer in layers) for hash_, block in self.blocks.items()}

    def draft_kv(self) -> dict[int, bytes]:
        layers = self.engine.drafter.kv_cache.layers  # type: ignore[union-attr]
        return {hash_: b"".join(layer[block].tobytes() for layer in layers) for hash_, block in self.blocks.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Path of a folder that does not exist yet."""
    return tmp_path / "cache" / "kv"


def stats_of(engine: Engine) -> DiskCacheStats:
    found = engine.stats().disk_cache
    assert found is not None
    return found


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def ask(engine: Engine, prompts: list[list[int]], k: int, *, first: int = 0, **fields: Any) -> list[Request]:
    """Run greedy requests one after another, so that each finds what the earlier ones left."""
    made = []
    for i, prompt in enumerate(prompts, first):
        made.append(request(i, prompt, k=None, max_tokens=9, engine_k=k, ignore_eos=True, return_drafts=True))
        for name, value in fields.items():
            setattr(made[-1], name, value)
        engine.add_request(made[-1])
        run(engine)
        engine.settle_idle()
    return made


def end(engine: Engine) -> None:
    """Close an engine as a server does: pending blocks are written."""
    engine.close()


KINDS: list[tuple[str, str | None, str, int, dict[str, Any]]] = [
    ("native_qwen_bank", None, "draft_model", 0, {}),
    ("native_qwen_bank", "close", "draft_model", 3, {}),
    ("native_qwen_bank", "small", "draft_model", 3, {"kv_cache_dtype": "fp8"}),
    ("native_llama_bank", "close", "draft_model", 3, {}),
    ("head_bank", "fitted", "eagle3", 3, {}),
]


@pytest.mark.parametrize(("bank_name", "draft", "method", "k", "fields"), KINDS)
def test_a_hit_has_the_bits_of_a_miss(
    bank_name: str,
    draft: str | None,
    method: str,
    k: int,
    fields: dict[str, Any],
    folder: Path,
    request: pytest.FixtureRequest,
) -> None:
    bank: Bank = request.getfixturevalue(bank_name)
    dtype = "float32" if bank.dtype == "float64" else bank.dtype

    def start(**more: Any) -> Observed:
        drafts = None if draft is None else bank.drafts[draft]
        sizes = {"block_size": BLOCK, "kv_events_config": QUIET}
        return Observed(make_engine(bank.target, drafts, k=k, dtype=dtype, method=method, **sizes, **fields, **more))

    prompts = [bank.prompts[5], bank.prompts[6][:50], bank.prompts[5][:30]]
    cold = start(kv_cache_path=str(folder))
    computed = ask(cold.engine, prompts, k)
    again = ask(cold.engine, prompts, k, first=10)  # all of it is in memory
    assert stats_of(cold.engine).loaded_tokens == 0
    end(cold.engine)

    warm = start(kv_cache_path=str(folder))
    loaded = ask(warm.engine, prompts, k)
    texts = [[job.output_token_ids for job in jobs] for jobs in (computed, again, loaded)]
    assert texts[0] == texts[1] == texts[2]
    # A disk gives what memory gives: the same hits, and with them the same drafts.
    assert [job.num_cached_tokens for job in loaded] == [job.num_cached_tokens for job in again]
    assert [job.drafts for job in loaded] == [job.drafts for job in again]
    assert stats_of(warm.engine).loaded_tokens >= len(prompts[0]) - 2 * BLOCK
    assert stats_of(warm.engine).errors == 0
    kept, found = cold.target_kv(), warm.target_kv()
    assert len(found) > len(prompts[0]) // BLOCK
    assert {hash_: kept[hash_] for hash_ in found} == found
    if draft is not None:
        drafted = sum(kv == warm.draft_kv()[hash_] for hash_, kv in cold.draft_kv().items() if hash_ in warm.blocks)
        assert drafted >= len(prompts[0]) // BLOCK
        assert stats_of(warm.engine).loaded_tokens > 0
    end(warm.engine)
    # Without a disk nothing differs either.
    assert [job.output_token_ids for job in ask(start().engine, prompts, k)] == texts[0]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), blocks=st.sampled_from([34, 60]), kill=st.booleans())
def test_engines_that_share_a_folder_write_the_banks_texts(
    data: st.DataObject, blocks: int, kill: bool, tmp_path: Path, native_qwen_bank: Bank
) -> None:
    """Check that engines that share a folder write the texts that the bank has from transformers. Small pools evict,
    preempt and load all the time."""
    folder = tmp_path / "shared"
    for _ in range(2):
        jobs = data.draw(greedy_jobs(native_qwen_bank, 3))
        engine = make_engine(
            native_qwen_bank.target,
            native_qwen_bank.drafts["close"],
            k=3,
            dtype="float32",
            block_size=BLOCK,
            num_gpu_blocks_override=blocks,
            num_reserved_decode_tokens=0,
            kv_cache_path=str(folder),
            kv_cache_disk_bytes=1 << 20,
        )
        run_greedy(engine, native_qwen_bank, jobs, 3)
        assert engine.disk is not None
        engine.disk.flush()  # the thread that writes also deletes
        assert sum(path.stat().st_size for path in segments(folder)) <= 1 << 20
        if kill:
            for path in segments(folder):
                os.truncate(path, path.stat().st_size * 2 // 3)
        end(engine)


def test_a_request_waits_next_to_others_for_its_blocks(
    folder: Path, native_qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a request waits for its blocks while others run. With no time for reads, each step reads one block."""
    monkeypatch.setattr("specrs.engine.disk_cache.LOAD_MS", 0.0)
    fields: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK, "kv_cache_path": str(folder)}
    engine = make_engine(native_qwen_bank.target, None, k=0, **fields)
    long = native_qwen_bank.prompts[5]
    (expected,) = ask(engine, [long], 0)
    end(engine)
    engine = make_engine(native_qwen_bank.target, None, k=0, **fields)
    other = request(0, [1, 2, 3], k=None, max_tokens=LONGEST, engine_k=0, ignore_eos=True)
    engine.add_request(other)
    engine.step()
    job = request(1, long, k=None, max_tokens=9, engine_k=0, ignore_eos=True)
    engine.add_request(job)
    waited = 0
    while job.num_cached_tokens is None:
        before = stats_of(engine).loaded_tokens
        engine.step()
        waited += 1
        assert stats_of(engine).loaded_tokens - before <= BLOCK
        assert other.num_output_tokens == 1 + waited, "the other one goes on"
    assert waited == len(long) // BLOCK
    run(engine)
    assert job.output_token_ids == expected.output_token_ids
    assert job.num_cached_tokens == (len(long) - 1) // BLOCK * BLOCK
    engine.add_request(request(2, [*long[:8], 9, *long], k=None, max_tokens=2, engine_k=0))
    engine.abort(2)
    assert not engine.has_unfinished()
    end(engine)


def test_salts_do_not_share(folder: Path, native_qwen_bank: Bank) -> None:
    fields: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK, "kv_cache_path": str(folder)}
    prompt = native_qwen_bank.prompts[5]
    texts = []
    for salt, hits in (("a", False), ("b", False), ("a", True), ("", False)):
        engine = make_engine(native_qwen_bank.target, None, k=0, **fields)
        (job,) = ask(engine, [prompt], 0, cache_salt=salt)
        texts.append(job.output_token_ids)
        assert (stats_of(engine).loaded_tokens > 0) == hits, salt
        end(engine)
    assert texts[1:] == texts[:-1]


def test_prompts_with_log_probabilities_are_not_kept(folder: Path, native_qwen_bank: Bank) -> None:
    engine = make_engine(
        native_qwen_bank.target, None, k=0, dtype="float32", block_size=BLOCK, kv_cache_path=str(folder)
    )
    for i in range(2):
        job = request(i, native_qwen_bank.prompts[5], k=None, max_tokens=2, engine_k=0, prompt_logprobs=0)
        engine.add_request(job)
        run(engine)
        assert job.num_cached_tokens == 0
        assert job.prompt_logprobs is not None
        assert len(job.prompt_logprobs) == len(native_qwen_bank.prompts[5])
    end(engine)
    assert stats_of(engine).written_bytes == 0


def test_an_adapter_is_known_by_its_content(tmp_path: Path, folder: Path) -> None:
    """Check that a LoRA adapter is identified by its content: name, number and path are the same, the matrices
    differ."""

    def text(adapter: Path | None, cache: Path | None) -> tuple[list[int], int]:
        path = None if cache is None else str(cache)
        llm = LLM(dtype="float32", max_model_len=128, enable_lora=True, kv_cache_path=path, block_size=BLOCK)
        lora = None if adapter is None else LoRARequest("one", 1, str(adapter))
        (output,) = llm.generate([{"prompt_token_ids": list(range(20, 60))}], GREEDY, lora_request=lora, use_tqdm=False)
        end(llm.engine)
        return list(output.outputs[0].token_ids), 0 if cache is None else stats_of(llm.engine).loaded_tokens

    leaves, adapter = ("q_proj", "v_proj", "down_proj"), tmp_path / "adapter"
    expected = [text(None, None)[0]]
    for seed in (1, 2):
        write_adapter(adapter, TARGET, Spec(leaves, alpha=64.0), seed=seed)
        expected.append(text(adapter, None)[0])
    assert len({tuple(tokens) for tokens in expected}) == 3
    for seed, hits in ((0, 0), (1, 0), (2, 0), (1, 36), (2, 36), (0, 36)):
        if seed:
            write_adapter(adapter, TARGET, Spec(leaves, alpha=64.0), seed=seed)
        assert text(adapter if seed else None, folder) == (expected[seed], hits)


def test_suffix_trees_survive(folder: Path) -> None:
    """Check that suffix trees survive a restart: outputs of an earlier process are drafted, for the same cache salt
    alone."""
    speculative = {"method": "suffix", "num_speculative_tokens": 4}

    def drafted(salt: str) -> tuple[list[int], int]:
        llm = LLM(dtype="float32", max_model_len=256, speculative_config=speculative, kv_cache_path=str(folder))
        prompt = {"prompt_token_ids": list(range(30, 50)), "cache_salt": salt}
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        accepted = llm.stats().accepted_tokens
        end(llm.engine)
        return list(output.outputs[0].token_ids), accepted

    text, before = drafted("a")
    again, after = drafted("a")
    other, apart = drafted("b")
    assert text == again == other
    assert after > before + 5
    assert apart == before


def test_one_process_writes_and_the_other_reads(folder: Path, native_qwen_bank: Bank) -> None:
    fields: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK, "kv_cache_path": str(folder)}
    writer, reader = (make_engine(native_qwen_bank.target, None, k=0, **fields) for _ in range(2))
    assert (stats_of(writer).is_writer, stats_of(reader).is_writer) == (True, False)
    prompts = [native_qwen_bank.prompts[5], native_qwen_bank.prompts[10]]
    (expected,) = ask(writer, prompts[:1], 0)
    assert writer.disk is not None
    assert reader.disk is not None
    writer.disk.flush()
    (job,) = ask(reader, prompts[:1], 0)
    assert job.output_token_ids == expected.output_token_ids
    assert stats_of(reader).loaded_tokens == (len(prompts[0]) - 1) // BLOCK * BLOCK
    ask(reader, prompts[1:], 0, first=1)
    reader.disk.flush()
    assert (stats_of(reader).written_bytes, reader.idle_interval) == (0, None)
    end(writer)
    reader.disk._store.ask_for_lock()
    reader.disk.flush()
    reader.disk.flush()
    assert stats_of(reader).is_writer
    assert stats_of(reader).written_bytes > 0, "what it kept meanwhile"
    end(reader)


@pytest.mark.parametrize("damage", ["flip", "zero", "cut", "swap", "delete"])
def test_damaged_files_cost_hits_alone(damage: str, folder: Path, native_qwen_bank: Bank) -> None:
    fields: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK, "kv_cache_path": str(folder)}
    bank = native_qwen_bank
    fields["kv_cache_disk_bytes"] = 4 << 20  # room for all of it twice, in several segments
    engine = make_engine(bank.target, bank.drafts["close"], k=2, **fields)
    prompts = bank.prompts[2:12]
    expected = [job.output_token_ids for job in ask(engine, prompts, 2)]
    end(engine)
    assert stats_of(engine).written_bytes < 2 << 20
    rng = np.random.default_rng(7)
    paths = segments(folder)
    assert len(paths) > 2
    for path in paths:
        content = bytearray(path.read_bytes())
        if damage == "flip":
            for at in rng.integers(len(content), size=9):
                content[at] ^= 1 << int(rng.integers(8))
        elif damage == "zero":
            start = int(rng.integers(len(content)))
            content[start : start + 4096] = bytes(len(content[start : start + 4096]))
        elif damage == "cut":
            del content[int(rng.integers(len(content))) :]
        elif damage == "swap":
            content = bytearray(paths[(paths.index(path) + 1) % len(paths)].read_bytes())
        path.write_bytes(content)
        if damage == "delete":
            path.unlink()
    engine = make_engine(bank.target, bank.drafts["close"], k=2, **fields)
    assert [job.output_token_ids for job in ask(engine, prompts, 2)] == expected
    assert_idle(engine)
    end(engine)
    engine = make_engine(bank.target, bank.drafts["close"], k=2, **fields)
    assert [job.output_token_ids for job in ask(engine, prompts, 2)] == expected
    assert stats_of(engine).loaded_tokens > 0, "it was written again"
    end(engine)


CHILD = """
import resource, signal, sys
from specrs import LLM, SamplingParams
folder, most, kills = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "kill"
llm = LLM(dtype="float32", max_model_len=256, block_size=16, threads=1, kv_cache_path=folder,
          speculative_config={"num_speculative_tokens": 3})
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
print(stats.errors, stats.written_bytes, stats.loaded_tokens, flush=True)
"""


def child(folder: Path, most: int, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(most), how]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], int]:
    """Return the texts of an undisturbed child process, and the number of bytes that it wrote."""
    folder = tmp_path_factory.mktemp("whole") / "kv"
    done = child(folder, resource.RLIM_INFINITY, "fail")
    assert done.returncode == 0, done.stderr
    *texts, figures = done.stdout.splitlines()
    assert figures.split()[0] == "0"
    return texts, int(figures.split()[1])


SHARES = [0.0, 0.001, 0.2, 0.55, 0.99]
RANDOM = random.Random(0)


@pytest.mark.parametrize("share", SHARES + [RANDOM.random() for _ in range(55)][:: stride(56)])
def test_a_process_that_is_killed_leaves_what_was_whole(
    share: float, folder: Path, whole: tuple[list[str], int]
) -> None:
    """Check that a killed process leaves whole records only. The system kills it at a given byte of its writes."""
    texts, size = whole
    killed = child(folder, int(share * size), "kill")
    assert killed.returncode == -signal.SIGXFSZ, killed.stderr
    assert "".join(f"{text}\n" for text in texts).startswith(killed.stdout)  # a line may be cut, too
    assert sum(path.stat().st_size for path in segments(folder)) == int(share * size), "cut in the middle"
    next_one = child(folder, resource.RLIM_INFINITY, "fail")
    *found, figures = next_one.stdout.splitlines()
    assert (found, next_one.returncode) == (texts, 0), next_one.stderr
    errors, written, loaded = map(int, figures.split())
    assert errors == 0
    assert loaded > 0 or share < 0.2, "whole blocks are used"
    assert loaded == 0 or share > 0.001
    # What was torn was cut off, and every block is there once.
    assert sum(path.stat().st_size for path in segments(folder)) == size
    assert 0 < written <= size


def test_a_full_disk_costs_the_cache_and_no_request(folder: Path, whole: tuple[list[str], int]) -> None:
    texts, size = whole
    done = child(folder, size // 3, "fail")
    *found, figures = done.stdout.splitlines()
    assert (found, done.returncode) == (texts, 0), done.stderr
    errors, written, _ = map(int, figures.split())
    assert errors > 0
    assert 0 < written <= size // 3
    assert "could not be written; requests go on without" in done.stderr
    assert sum(path.stat().st_size for path in segments(folder)) == written, "nothing torn stays"


def test_an_idle_engine_goes_on_saving() -> None:
    """Check that an idle engine goes on saving blocks: its thread calls `settle_idle` every `idle_interval` seconds,
    although no command wakes it."""
    engine, done = ScriptedEngine(), threading.Event()

    def settle_idle() -> None:
        engine.num_idle += 1
        if engine.num_idle == 3:
            engine.idle_interval = None
            done.set()

    engine.idle_interval = 1e-3
    engine.settle_idle = settle_idle  # type: ignore[method-assign]
    loop = EngineLoop(engine, lambda updates: None, lambda: None)  # type: ignore[arg-type]
    loop.start()
    assert done.wait(60)
    loop.stop()
    loop.join(60)
    assert loop.error is None


def test_the_limit_holds(folder: Path, native_qwen_bank: Bank) -> None:
    limit = 200_000
    engine = make_engine(
        native_qwen_bank.target,
        None,
        k=0,
        dtype="float32",
        block_size=BLOCK,
        kv_cache_path=str(folder),
        kv_cache_disk_bytes=limit,
    )
    assert engine.disk is not None
    rng = np.random.default_rng(3)
    for i in range(12):
        ask(engine, [rng.integers(0, 200, size=60).tolist()], 0, first=i)
        engine.disk.flush()
        assert sum(path.stat().st_size for path in segments(folder)) <= limit
    assert stats_of(engine).written_bytes > 2 * limit
    assert stats_of(engine).errors == 0
    end(engine)


def test_only_the_owner_may_use_the_folder(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(InvalidConfigError, match=r"kv_cache_path=.* has mode 755, .*; run chmod 700 on it"):
        LLM(max_model_len=64, kv_cache_path=str(folder))
    folder.chmod(0o700)
    llm = LLM(max_model_len=64, kv_cache_path=str(folder))
    llm.generate([{"prompt_token_ids": list(range(20, 60))}], GREEDY, use_tqdm=False)
    end(llm.engine)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"key", "lock", "hashes.json"}
    assert segments(folder)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in folder.rglob("*") if path.is_dir())
    with pytest.raises(InvalidConfigError, match=r"is not a folder|cannot be used"):
        LLM(max_model_len=64, kv_cache_path=str(folder / "key"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device": "cuda"}, "device='cuda'"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
    ({"enable_prefix_caching": False}, "enable_prefix_caching=False"),
    ({"dtype": "float64"}, "dtype='float64'"),
    ({"enforce_eager": True}, "enforce_eager=True"),
    ({"model_impl": "transformers"}, "model_impl='transformers'"),
    ({"load_format": "dummy"}, "load_format='dummy'"),
    ({"cpu_prefill": "amx"}, "cpu_prefill='amx'"),
]


@pytest.mark.parametrize(("other", "named"), REFUSED)
def test_options_that_it_does_not_go_with(other: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfigError, match="kv_cache_path='there': not implemented with") as raised:
        EngineConfig(kv_cache_path="there", **other)
    assert named in str(raised.value)
    with pytest.raises(InvalidConfigError, match="kv_cache_disk_bytes=1048576: needs kv_cache_path"):
        EngineConfig(kv_cache_disk_bytes=1 << 20)


def test_models_that_it_does_not_go_with(tmp_path: Path, folder: Path) -> None:
    made = make_checkpoint(tmp_path / "m", "gemma3_text", seed=1, layers=6, sliding_window_pattern=3)
    sizes: dict[str, Any] = {"block_size": BLOCK, "skip_tokenizer_init": True, "max_model_len": 128}
    with pytest.raises(UnsupportedConfigError, match="not implemented for a model with sliding windows"):
        LLM(str(made), **sizes, kv_cache_path=str(folder))
    with pytest.raises(InvalidConfigError, match=r"kv_cache_disk_bytes=9: must be at least \d+, which 16 blocks"):
        LLM(max_model_len=64, kv_cache_path=str(folder), kv_cache_disk_bytes=9)


def test_the_key_names_options_that_exist() -> None:
    assert set(options_of(EngineOptions)) > NOT_IN_KEY
    assert set(options_of(SpeculativeConfig)) > NOT_IN_DRAFT_KEY
    in_key = set(options_of(EngineOptions)) - NOT_IN_KEY
    assert in_key == {
        *("dtype", "load_format", "model_impl", "quantization", "kv_cache_dtype", "max_model_len", "block_size"),
        *("enforce_eager", "cpu_activations", "cuda_fp8_rows", "cpu_prefill"),
    }, "a new option either changes no bit of KV, or is in the key"


def test_other_options_and_weights_have_other_blocks(
    tmp_path: Path, folder: Path, native_qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "copy"
    shutil.copytree(native_qwen_bank.target, model)
    hashed: list[str] = []
    sha256_of = disk_cache_key.sha256_of
    monkeypatch.setattr(disk_cache_key, "sha256_of", lambda file: (hashed.append(file.name), sha256_of(file))[1])

    def loaded(**fields: Any) -> int:
        hashed.clear()
        chosen: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK, "max_model_len": 128} | fields
        chosen |= {"max_num_seqs": 8, "kv_cache_path": str(folder), "model": str(model), "skip_tokenizer_init": True}
        engine = build_engine(EngineConfig(**chosen))
        ask(engine, [native_qwen_bank.prompts[5]], 0)
        end(engine)
        return stats_of(engine).loaded_tokens

    assert loaded() == 0
    assert "model.safetensors" in hashed
    assert loaded() == 60
    assert hashed == [], "remembered by size, time and inode"
    for other in ({"block_size": 8}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"quantization": "int8"}):
        assert loaded(**other) == 0
        assert loaded(**other) > 0
    assert loaded(max_num_batched_tokens=16, threads=2) == 60, "which change no bit"
    # As long as before, and one number differs.
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("k_proj.weight"))
    weights[name] = weights[name] * np.float32(1.5)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert loaded() == 0
    assert hashed == ["model.safetensors"]
    edit_json(model / "config.json", rope_theta=5000.0)
    assert loaded() == 0
    (folder / "hashes.json").write_bytes((folder / "hashes.json").read_bytes()[:-5])
    assert loaded() == 60, "a torn list of hashes is made anew"
    assert "model.safetensors" in hashed


def test_a_disk_that_is_full_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specrs.engine.disk_cache.KVStore", full)
    llm = LLM(max_model_len=64, kv_cache_path=str(folder))
    assert llm.engine.disk is None
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)

    def forbidden(*arguments: object, **settings: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr("specrs.engine.disk_cache.KVStore", forbidden)
    with pytest.raises(SpecrsError, match=r"cannot be used: .*Permission denied"):
        LLM(max_model_len=64, kv_cache_path=str(folder))

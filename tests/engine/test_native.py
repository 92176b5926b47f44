"""Native models through the engine: the bits of logits, requests of every kind in one batch, threads and their end.

The lossless sweeps (`test_equivalence`, `test_sampling`, `test_ngram`) run with native models as with torch models.
`backends/test_native` compares steps with the reference's.
"""

import contextlib
import gc
import logging
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from hf_reference import load
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from specrs import LLM, AsyncLLM
from specrs.arrays import BFLOAT16, FLOAT32
from specrs.backends.cpu import threads as engine_threads
from specrs.backends.cpu.threads import choose_threads, physical_cores, usable_processors
from specrs.backends.cpu.weights import load_native
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.errors import InvalidConfigError, SpecrsError, UnsupportedConfigError
from specrs.models.native_decoder import NativeDecoder
from specrs.models.torch_decoder import TorchDecoder
from specrs.pair.prompts import PROMPTS
from specrs.sampling import SamplingParams
from sweep import sweep

from engine.harness import Bank, config, make_engine, poison, request, run, weights
from engine.logits import LOGITS, alone, logits_of, with_logits

PROCESSORS = len(usable_processors())


@pytest.mark.parametrize(
    ("family", "bf16_rows"),
    [
        ("native_qwen_bank", False),
        ("native_llama_bank", False),
        ("native_llama_bank", True),
        ("native_gemma_bank", False),
        ("native_moe_bank", False),
    ],
)
@sweep(15)
@given(data=st.data())
def test_logits_are_the_same_bits(
    family: str, bf16_rows: bool, data: st.DataObject, request_bank: dict[str, Bank], more_banks: dict[str, Bank]
) -> None:
    """Check that logits have the same bits for any K, batch, threads, blocks, chunks, preemptions and prefix hits."""
    bank = (request_bank | more_banks)[family]
    engine_k = data.draw(st.integers(0, 6), label="engine K")
    block_size = data.draw(st.sampled_from([1, 8, 16, 32]), label="block size")
    blocks = -(-128 // block_size)
    engine = make_engine(
        bank.target,
        bank.drafts[data.draw(st.sampled_from(["close", "small", "equal"]), label="draft")],
        k=engine_k,
        dtype=bank.dtype,
        block_size=block_size,
        threads=data.draw(st.integers(1, PROCESSORS), label="threads"),
        max_num_batched_tokens=data.draw(st.sampled_from([7, 33, 64, 512]), label="budget"),
        max_num_seqs=data.draw(st.sampled_from([1, 3, 8]), label="rows"),
        num_gpu_blocks_override=data.draw(st.sampled_from([blocks, blocks + 2, 8 * blocks]), label="blocks"),
        cpu_activations="bf16" if bf16_rows else "auto",
        **LOGITS,
    )
    poison(engine)
    jobs = []
    choice = st.tuples(st.integers(0, len(bank.prompts) - 1), st.one_of(st.none(), st.integers(0, engine_k)))
    for i, (which, k) in enumerate(data.draw(st.lists(choice, min_size=1, max_size=5), label="requests")):
        jobs.append((with_logits(i, bank.prompts[which], k, engine_k, 24), tuple(bank.prompts[which])))
        engine.add_request(jobs[-1][0])
        if data.draw(st.booleans(), label="wait"):
            run(engine)
    run(engine)
    for job, prompt in jobs:
        expected = alone(bank.target, prompt, bank.dtype, bf16_rows)
        assert np.array_equal(logits_of(job).view(np.int32), expected.view(np.int32))


def test_logits_are_transformers_own_within_rounding(native_qwen_bank: Bank, native_llama_bank: Bank) -> None:
    """Check logits against transformers in float64 with the same weights. bf16 weights are rounded, and after that only
    KV is."""
    for bank, bound in ((native_qwen_bank, 2e-5), (native_llama_bank, 0.2)):
        model = load(bank.target)
        if bank.dtype == "bfloat16":
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(weight.bfloat16() if weight.dim() == 2 else weight)
        for prompt in bank.prompts[2:5]:
            found = alone(bank.target, tuple(prompt), bank.dtype)[0]
            with torch.inference_mode():
                expected = model(torch.tensor([prompt])).logits[0, -1].numpy()
            assert np.abs(found - expected).max() < bound * max(1.0, np.abs(expected).max())
            if bank.dtype == "bfloat16":
                rounded = alone(bank.target, tuple(prompt), bank.dtype, True)[0]
                assert np.abs(rounded - expected).max() < bound * max(1.0, np.abs(expected).max())
                # Of 96 inputs each number is off by up to 2^-8, which shows in every logit.
                assert np.abs(rounded - found).min() > 0


def test_bf16_rows_need_bf16_weights(native_qwen_bank: Bank, native_llama_bank: Bank, tmp_path: Path) -> None:
    """Check that bf16 rows need bf16 weights, in draft models too. A float32 model whose numbers bf16 holds exactly is
    accepted."""
    bank = native_qwen_bank
    words = r"^cpu_activations='bf16': not implemented for these weights: .*=fp32: .*; allowed: 'auto' or 'fp32'$"
    for target, draft, dtype in ((bank.target, None, "float32"), (native_llama_bank.target, bank.target, "auto")):
        weights = load_weights(config(target, draft, k=1, dtype=dtype))
        with pytest.raises(UnsupportedConfigError, match=words):
            build_engine(config(target, draft, k=1, dtype=dtype, cpu_activations="bf16"), weights)
    # As float64 by its own word, and by torch.
    folder = make_checkpoint(tmp_path / "float64", dtype=torch.float64, vocab=211)
    with pytest.raises(UnsupportedConfigError, match=r"^cpu_activations='bf16': not implemented with dtype='float64'"):
        build_engine(config(folder, None, k=0, dtype="auto", cpu_activations="bf16"))
    folder = make_checkpoint(tmp_path / "generic", vocab=211)
    fields = {"dtype": "bfloat16", "model_impl": "transformers", "cpu_activations": "bf16"}
    with pytest.raises(UnsupportedConfigError, match="a model that torch computes; allowed: 'auto' or 'fp32'"):
        build_engine(config(folder, None, k=0, **fields))
    engine = build_engine(
        config(checkpoint(tmp_path / "kept", torch.float32), None, k=0, dtype="float32", cpu_activations="bf16")
    )
    assert "activations=bf16" in repr(engine.runner.target.decoder)  # type: ignore[attr-defined]


def _has_tiles() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and "amx_bf16" in info.read_text().split()


def test_prompts_by_tiles_are_the_same_bits_however_they_are_cut(native_qwen_bank: Bank) -> None:
    """Check prompts computed by tiles (AMX): logits of prompts and of later tokens have the same bits for any chunks
    and K. They differ from those of `exact`.

    Where the processor has no tiles, the option is rejected. `rust/cpu/tests` compares tiles with a reference on any
    processor.
    """
    bank = native_qwen_bank
    fields = LOGITS | {"dtype": "bfloat16", "enable_prefix_caching": False}
    if not _has_tiles():
        words = r"^cpu_prefill='amx': not implemented on this machine.*; allowed: 'exact'$"
        with pytest.raises(UnsupportedConfigError, match=words):
            make_engine(bank.target, None, k=0, cpu_prefill="amx", **fields)
        return
    prompts = [prompt for prompt in bank.prompts if len(prompt) > 20][:3]
    found: dict[tuple[str, int, int], list[np.ndarray]] = {}
    texts = []
    for way, k, budget in (("amx", 0, 512), ("amx", 0, 64), ("amx", 4, 512), ("amx", 4, 64), ("exact", 0, 512)):
        draft = bank.drafts["close"] if k else None
        engine = make_engine(bank.target, draft, k=k, cpu_prefill=way, max_num_batched_tokens=budget, **fields)
        poison(engine)
        jobs = [with_logits(i, prompt, k, k, 12) for i, prompt in enumerate(prompts)]
        bare = [
            request(9 + i, prompt, k=k, max_tokens=12, engine_k=k, ignore_eos=True) for i, prompt in enumerate(prompts)
        ]
        for job in (*jobs, *bare):
            engine.add_request(job)
        run(engine)
        assert [job.output_token_ids for job in jobs] == [job.output_token_ids for job in bare]
        found[way, k, budget] = [logits_of(job) for job in jobs]
        texts.append([job.output_token_ids for job in jobs])
    assert texts[0] == texts[1] == texts[2] == texts[3]
    whole = found["amx", 0, 512]
    for way, k, budget in found:
        for ours, same in zip(found[way, k, budget], whole, strict=True):
            assert np.array_equal(ours, same) is (way == "amx")
            assert np.abs(ours - same).max() < 1e-3 * np.abs(same).max()


def test_bf16_rows_of_the_bundled_models() -> None:
    """Check that target, draft and EAGLE-3 head of the bundled models round their rows to bf16: drafts change no text,
    and are accepted as often."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    texts, lengths = [], []
    for method in (None, "draft_model", "eagle3"):
        speculative = method and {"method": method, "num_speculative_tokens": 3}
        for rows in (False, True):
            llm = LLM(dtype="float32", cpu_activations="bf16" if rows else "auto", speculative_config=speculative)
            outputs = llm.generate(list(PROMPTS[:3]), params, use_tqdm=False)
            if rows:
                texts.append([output.outputs[0].token_ids for output in outputs])
            if method is not None:
                lengths.append(llm.stats().acceptance_length)
    assert texts[0] == texts[1] == texts[2]
    for exact, rounded in zip(lengths[::2], lengths[1::2], strict=True):
        assert rounded > 0.85 * exact > 1.2


KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.7, "allowed_token_ids": list(range(3, 180))},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.6, "min_tokens": 12},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 11: -2.0}, "frequency_penalty": 0.5},
    {"temperature": 1.1, "presence_penalty": 0.7, "logprobs": 0},
]


def test_requests_of_every_kind_do_not_change_each_other(native_qwen_bank: Bank) -> None:
    """Check that requests of every kind do not change each other: every text is that of the request alone."""
    bank, texts = native_qwen_bank, []
    for together in (False, True):
        engine = make_engine(bank.target, bank.drafts["close"], k=4, dtype=bank.dtype, max_num_batched_tokens=512)
        engine.runner.rule = "coupled"
        jobs = []
        for i in range(14):
            params = SamplingParams(max_tokens=8 + 2 * i, detokenize=False, ignore_eos=True, **KINDS[i % len(KINDS)])  # type: ignore[arg-type]
            jobs.append(Request(i, bank.prompts[i], params, num_speculative_tokens=4, seed=i))
            engine.add_request(jobs[-1])
            if not together:
                run(engine)
        run(engine)
        texts.append([job.output_token_ids for job in jobs])
    assert texts[0] == texts[1]


def test_which_runner_serves(native_qwen_bank: Bank) -> None:
    bank = native_qwen_bank
    for fields, native in (
        ({"dtype": "float32"}, True),
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float64"}, False),
        ({"dtype": "float32", "enforce_eager": True}, False),
    ):
        engine = make_engine(bank.target, bank.drafts["close"], k=2, **fields)
        assert engine.runner.is_native is native
        models = engine.weights.models
        assert all(isinstance(model, NativeDecoder if native else TorchDecoder) for model in models)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_what_the_native_pass_does_not_compute_is_said_once(
    dtype: str, native_qwen_bank: Bank, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specrs")
    bank = native_qwen_bank
    load_weights(config(bank.target, bank.drafts["close"], k=2, dtype=dtype))
    said = [record.getMessage() for record in caplog.records if "torch computes" in record.getMessage()]
    folders = (bank.target, bank.drafts["close"]) if dtype == "float64" else ()
    why = "torch computes float64, the native pass computes float32 and bfloat16"
    assert said == [f"{folder}: {why}" for folder in folders]


def num_threads() -> int:
    """Return the number of threads of native passes in this process. A thread that ends meanwhile may be counted or
    not."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text())
    return sum(name.startswith("specrs-cpu") for name in names)


def test_a_thousand_engines_leave_no_thread_and_no_memory(native_qwen_bank: Bank) -> None:
    bank, before, sizes = native_qwen_bank, num_threads(), []
    for i in range(1000):
        engine = make_engine(
            bank.target, bank.drafts["small"], k=2, dtype="float32", threads=PROCESSORS, num_gpu_blocks_override=16
        )
        if i % 50 == 0:
            engine.add_request(request(0, bank.prompts[3], k=2, max_tokens=4, engine_k=2))
            run(engine)
        gone = weakref.ref(engine)
        del engine
        assert gone() is None, "an engine must not wait for the collector of cycles"
        if i in (300, 999):
            gc.collect()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert num_threads() == before
    assert sizes[1] - sizes[0] < 16 << 20


@pytest.mark.skipif(PROCESSORS < 2, reason="threads=2 needs two processors")
def test_threads_end_with_an_async_engine(native_qwen_bank: Bank) -> None:
    before = num_threads()
    engine = make_engine(native_qwen_bank.target, None, k=0, dtype="float32", threads=2)
    while num_threads() == before:  # a thread has its name once it runs; where none ever does, the test's time ends
        os.sched_yield()
    assert num_threads() == before + 1
    llm = AsyncLLM.from_engine(engine)
    assert llm.shutdown()
    assert num_threads() == before
    engine.add_request(request(0, [1, 2], k=0, max_tokens=2, engine_k=0))
    with pytest.raises(SpecrsError, match="the pool's threads have ended"):
        engine.step()


@pytest.mark.skipif(PROCESSORS < 2, reason="threads=2 needs two processors")
def test_a_fork_says_that_it_has_no_threads(native_qwen_bank: Bank) -> None:
    engine = make_engine(native_qwen_bank.target, None, k=0, dtype="float32", threads=2)
    engine.add_request(request(0, [1, 2], k=0, max_tokens=2, engine_k=0))
    child = os.fork()
    if child == 0:
        try:
            engine.step()
        except SpecrsError as error:
            os._exit(0 if "make the engine after the fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    run(engine)


@pytest.mark.parametrize("given", [0, -1, True, "2", 1.5])
def test_threads_that_are_none(given: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"^threads=.*must be an integer of at least 1, or None$"):
        EngineConfig(threads=given)  # type: ignore[arg-type]


def test_more_threads_than_the_process_may_use(native_qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = rf"must be an integer from 1 to {PROCESSORS}: this process may use {PROCESSORS} processor"
    with pytest.raises(InvalidConfigError, match=rf"^threads={PROCESSORS + 1}: {allowed}"):
        make_engine(native_qwen_bank.target, None, k=0, dtype="float32", threads=PROCESSORS + 1)
    for value in (str(PROCESSORS + 1), "0", "two", "-1", ""):
        monkeypatch.setenv("SPECRS_NUM_THREADS", value)
        with pytest.raises(InvalidConfigError, match=rf"^SPECRS_NUM_THREADS=.*{allowed}"):
            make_engine(native_qwen_bank.target, None, k=0, dtype="float32")


def test_how_many_threads(native_qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_threads, "physical_cores", lambda: PROCESSORS)
    model = weights(native_qwen_bank.target, None, "float32").target
    assert isinstance(model, NativeDecoder)
    monkeypatch.setenv("SPECRS_NUM_THREADS", str(PROCESSORS))
    assert choose_threads(EngineConfig(), [model]) == PROCESSORS
    assert choose_threads(EngineConfig(threads=1), [model]) == 1
    monkeypatch.delenv("SPECRS_NUM_THREADS")
    before = num_threads()
    assert 0 < engine_threads.pass_seconds(model, PROCESSORS) < 1
    assert num_threads() == before
    for many, chosen in ((0.9, 1), (0.7, PROCESSORS)):
        monkeypatch.setattr(
            engine_threads, "pass_seconds", lambda _, threads, many=many, **settings: 1.0 if threads == 1 else many
        )
        assert choose_threads(EngineConfig(), [model]) == (chosen if PROCESSORS > 1 else 1)
    monkeypatch.setattr(engine_threads, "CACHE_BYTES", 1000)
    monkeypatch.delattr(engine_threads, "pass_seconds")
    assert choose_threads(EngineConfig(), [model]) == PROCESSORS, "not measured"


def test_physical_cores_and_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_threads, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(engine_threads, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(engine_threads, "usable_processors", lambda: {0, 1, 2, 3, 5})
    for processor, siblings in ((0, "0,4"), (1, "1,5"), (2, "2,6"), (3, "3,7"), (5, "1,5")):
        folder = tmp_path / f"cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    for quota, cores in ((None, 4), ("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)):
        if quota is not None:
            (tmp_path / "cpu.max").write_text(quota)
        assert physical_cores() == cores


def checkpoint(folder: Path, dtype: torch.dtype, change: float = 0.0) -> Path:
    """Write a checkpoint whose numbers are exact in bf16, stored in `dtype`. `change` is added to one number."""
    made = make_checkpoint(folder, layers=1, dtype=torch.bfloat16)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(made / "model.safetensors").items()}
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] += change
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    edit_json(made / "config.json", dtype=str(dtype).removeprefix("torch."))
    return made


def test_what_bf16_holds_exactly_is_kept_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check that fp32 weights that bf16 holds exactly are stored as bf16, with the same logits to the bit and a log
    line. If bf16 does not hold one of them, all stay fp32."""
    caplog.set_level(logging.INFO, "specrs")
    folders = {
        name: checkpoint(tmp_path / name, dtype, change)
        for name, dtype, change in (
            ("halved", torch.float32, 0.0),
            ("mapped", torch.bfloat16, 0.0),
            ("not", torch.float32, 1e-6),
        )
    }
    said, found = [], {}
    for name, folder in folders.items():
        caplog.clear()
        model = load_native(folder, dtype="float32")
        said.append([record.getMessage() for record in caplog.records])
        assert model.dtype == FLOAT32, "of the arithmetic and the KV cache"
        assert model.weights.embedding.dtype == (FLOAT32 if name == "not" else BFLOAT16)
        assert model.weights.final_norm.dtype == FLOAT32
        found[name] = alone(folder, (3, 1, 4, 1, 5), "float32")
    assert said == [[f"{folders['halved']}: all weights are kept as bfloat16, which holds them exactly"], [], []]
    assert np.array_equal(found["halved"], found["mapped"])
    assert not np.array_equal(found["halved"], found["not"])
    assert np.abs(found["halved"][0] - found["not"][0]).max() < 1e-4


def test_matrices_stay_where_the_file_is_mapped(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "mapped", torch.bfloat16)
    loaded = load_native(folder, dtype="float32").weights
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder / "model.safetensors") in line:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            regions.append(range(start, end))
    layer = loaded.layers[0]
    matrices = [loaded.embedding, *(part for w in (layer.qkv, layer.o, layer.gate_up, layer.down) for part in w.parts)]  # type: ignore[attr-defined]
    assert len(matrices) == 8
    assert all(any(matrix.ctypes.data in region for region in regions) for matrix in matrices)


def test_weights_serve_many_engines_at_once(native_qwen_bank: Bank) -> None:
    """Check that several engines can share weights at once: none writes to them, and each has work space and threads of
    its own."""
    bank = native_qwen_bank
    made = config(bank.target, bank.drafts["close"], k=3, dtype="float32")
    shared = load_weights(made)
    engines: list[Engine] = [build_engine(made, shared) for _ in range(3)]
    jobs = []
    for engine in engines:
        jobs.append(request(0, bank.prompts[4], k=3, max_tokens=30, engine_k=3, ignore_eos=True))
        engine.add_request(jobs[-1])
    while any(engine.has_unfinished() for engine in engines):
        for engine in engines:
            engine.step()
    assert [job.output_token_ids for job in jobs] == [bank.continuations[4][:30]] * 3

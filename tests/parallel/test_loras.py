"""LoRA adapters on several ranks: logits and texts of the merged models, on a CPU and by the CUDA runner, whatever
drafts are; and what rank 0 sends to the others."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.cuda_engines import SMALL, K, generate, serve_by_cuda
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from hybrid_reference import float64
from kernels.cuda.tolerance import assert_near
from lora.adapters import Spec, leaves_of, merge, write_adapter
from lora.test_cuda import with_slots
from models.cuda_models import LENGTH
from models.harness import Feeder
from specrs import LLM, LoRARequest, SamplingParams
from specrs.backends.cuda.adapters import slots_bytes
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.rank_loras import ReceivedLoRAs, pack_layer, unpack_layer
from specrs.backends.ranks import LeadingRunner
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.models.loader import load_config
from specrs.models.lora import LoRAAdapter, LoRAPart
from specrs.models.lora_loader import load_lora
from specrs.models.lora_shards import AdapterCuts
from specrs.models.shards import Shard
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model
from specrs.parallel.ranks import HostExchanges, Ranks
from torch import Tensor
from weight_memory import assert_needed, memory_of

from parallel.harness import engine_on_threads
from parallel.threads import on_ranks, one_kernel_at_a_time  # noqa: F401 (a fixture)

VOCAB = 83
SHAPE: dict[str, Any] = {
    "vocab": VOCAB,
    "hidden": 48,
    "intermediate": 48,
    "kv_heads": 2,
    "head_dim": 16,
    "with_tokenizer": False,
}
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3": ("qwen3", 2, {}),
    "a fused projection": ("phi3", 2, {}),
    "KV heads on two ranks each, biases": ("llama", 4, {"attention_bias": True, "mlp_bias": True}),
    "three ranks, one KV head": ("qwen3", 3, {"kv_heads": 1, "group": 3}),
    "delta nets": ("qwen3_5_text", 2, {"group": 1}),
    "delta nets, q, k, v and z by head": ("qwen3_next", 2, {"group": 1, "mlp_only_layers": [0, 1]}),
    "short convolutions": ("lfm2", 2, {}),
    "short convolutions, experts": ("lfm2_moe", 3, {"kv_heads": 1, "group": 3, "moe_intermediate_size": 24}),
    "MLP in one layer, experts in another": ("qwen3_moe", 2, {"mlp_only_layers": [0], "moe_intermediate_size": 24}),
}


def adapters_of(checkpoint: Path, folder: Path) -> list[Path]:
    """Write two adapters of a checkpoint: one of all modules, one of every second."""
    leaves = tuple(leaves_of(checkpoint))
    specs = [Spec(leaves, rank=6), Spec(leaves[::2], rank=2)]
    return [write_adapter(folder / f"adapter {i}", checkpoint, spec, seed=i) for i, spec in enumerate(specs, 1)]


def part_of(path: Path, number: int, base: TorchDecoder, source: Path) -> LoRAAdapter:
    """Return the adapter in `path` for `base`: this rank's part, if `base` is a rank's part of the model `source`."""
    config, ranks = load_config(source), base.ranks
    adapter = load_lora(path, base, config, name=str(number), lora_int_id=number, max_lora_rank=9)
    if ranks is None:
        return adapter
    cuts = AdapterCuts(config, Shard(ranks.rank, ranks.size))
    layers = tuple(cuts.layer(adapter, i) for i in range(len(adapter.layers)))
    return LoRAAdapter(adapter.name, number, layers)


def feed(base: TorchDecoder, source: Path, adapters: list[Path]) -> Tensor:
    """Feed prompts of four requests, the base model's among them, and then a verification."""
    feeder = Feeder(base, num_requests=4)
    made = [part_of(path, i, base, source) for i, path in enumerate(adapters, 1)]
    feeder.adapters = {0: made[0], 2: made[1], 3: made[0]}
    spans = {b: [((7 * b + 13 * p) % VOCAB, p) for p in range(3 + 2 * b)] for b in range(4)}
    last = {b: [(5, 3 + 2 * b), (b, 4 + 2 * b)] for b in range(4)}
    return torch.cat((feeder.feed(spans, prompts=True), feeder.feed(last)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_whole_model(variant: str, tmp_path: Path) -> None:
    """Check logits up to the order of sums in float64, and that all ranks have the same bits."""
    family, size, fields = VARIANTS[variant]
    with float64():
        path = make_checkpoint(tmp_path / "base", family, seed=5, **(SHAPE | {"group": 2} | fields))
        adapters = adapters_of(path, tmp_path)
        check(path, path, adapters, size)


def check(source: Path, stored: Path, adapters: list[Path], size: int) -> None:
    whole = feed(load_model(stored, dtype="float64"), stored, adapters)
    without = feed(load_model(stored, dtype="float64"), stored, adapters[::-1])
    assert (whole - without).abs().max() > 1e-3, "the adapters do nothing"
    first, *others = on_ranks(
        size, lambda ranks: feed(load_model(stored, dtype="float64", device=ranks), stored, adapters)
    )
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-11)
    assert all(torch.equal(first, other) for other in others)


def test_logits_of_a_gguf_file(tmp_path: Path) -> None:
    """Check a file whose output projections read value heads in another order than an adapter's."""
    net = {"linear_num_value_heads": 6, "linear_value_head_dim": 32}
    with float64():
        source = make_checkpoint(tmp_path / "source", "qwen3_5_text", seed=5, **(SHAPE | {"vocab": 400} | net))
        check(source, write_gguf(source, tmp_path / "model.gguf", "F32"), adapters_of(source, tmp_path), 2)


def test_a_layer_arrives_as_it_was_sent() -> None:
    """Check bf16 matrices of odd sizes, two parts of one projection, and a layer without parts."""
    parts = [LoRAPart(torch.randn(3, 5).bfloat16(), torch.randn(7, 3).bfloat16(), first) for first in (0, 7)]
    layer = {
        "qkv": tuple(parts),
        "o": (LoRAPart(torch.randn(1, 9).bfloat16().t().t(), torch.randn(2, 1).bfloat16(), 0),),
    }
    found = unpack_layer(pack_layer(layer), torch.bfloat16)
    assert {name: [part.first for part in own] for name, own in found.items()} == {"qkv": [0, 7], "o": [0]}
    for name, own in layer.items():
        for part, other in zip(own, found[name], strict=True):
            assert part.a.equal(other.a)
            assert part.b.equal(other.b)
    assert unpack_layer(pack_layer({}), torch.float32) == {}


TOKENS = 10
PROMPTS = [{"prompt_token_ids": [(7 * i * j + 3 * j) % VOCAB for j in range(1, 4)] * 3} for i in range(3)]
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
SEEDED = SamplingParams(max_tokens=TOKENS, temperature=1, seed=4, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a model (0) and it with each of three adapters merged."""
    made = tmp_path_factory.mktemp("loras")
    base = make_checkpoint(made / "0", "qwen3", seed=1, tie=False, **SHAPE)
    leaves = tuple(leaves_of(base))
    for i, own in enumerate((leaves, leaves[::2], leaves[1::2]), 1):
        merge(base, write_adapter(made / f"adapter {i}", base, Spec(own, rank=2 * i), seed=i), made / str(i))
    return made


def settings(folder: Path, **fields: Any) -> EngineConfig:
    sizes = {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "device": "cpu"}
    given = {"model": str(folder / "0"), "dtype": "float64"} | sizes | fields
    return EngineConfig.from_kwargs(**given)


def texts(llm: LLM, params: SamplingParams, loras: Any = None) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=loras)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("drafts", [0, 3])
def test_text_is_the_merged_models(drafts: int, folder: Path) -> None:
    """Check texts of three adapters and the base model, in batches that mix them and after adapters were dropped."""
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "rejection_sample_method": "coupled"}
    expected = [[texts(LLM.from_engine(build_engine(settings(folder, model=str(folder / str(i))))), params)
                 for params in (GREEDY, SEEDED)] for i in range(4)]  # fmt: skip
    assert len({str(own) for own in expected}) == 4
    loras = [None, *(LoRARequest(f"adapter {i}", i, str(folder / f"adapter {i}")) for i in (1, 2, 3))]
    held: list[ReceivedLoRAs] = []
    with pytest.MonkeyPatch.context() as patch:
        made = ReceivedLoRAs.__init__
        patch.setattr(ReceivedLoRAs, "__init__", lambda self, model: (held.append(self), made(self, model))[1])
        fields = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "tensor_parallel_size": 2}
        with engine_on_threads(
            settings(folder, speculative_config=speculative if drafts else None, **fields)
        ) as engine:
            llm, steps = LLM.from_engine(engine), []
            for which in ([0, 1, 2], [3, 3, 0], [2, 3, 1], [1, 1, 1]):
                for params, kind in ((GREEDY, 0), (SEEDED, 1)):
                    found = texts(llm, params, [loras[i] for i in which])
                    assert found == [expected[i][kind][j] for j, i in enumerate(which)], which
                gc.collect()
                steps.append({*held[0]._adapters})
            assert drafts == 0 or llm.stats().accepted_tokens > 0
    assert steps[0] == {1, 2}
    assert steps[1] in ({1, 3}, {2, 3})
    assert all(len(kept) <= 3 for kept in steps)


def test_an_adapter_that_cannot_be_read_ends_its_request_only(folder: Path) -> None:
    fields = {"enable_lora": True, "tensor_parallel_size": 2}
    with engine_on_threads(settings(folder, **fields)) as engine:
        llm = LLM.from_engine(engine)
        assert texts(llm, GREEDY, LoRARequest("nowhere", 9, str(folder / "nowhere"))) == [[], [], []]
        good = texts(llm, GREEDY, LoRARequest("adapter 1", 1, str(folder / "adapter 1")))
    assert good == texts(LLM.from_engine(build_engine(settings(folder, model=str(folder / "1")))), GREEDY)


class ApartExchanges(HostExchanges):
    """Exchanges in which a rank writes its part of a sum into other memory than the sum's, as in torch's symmetric
    memory."""

    def part(self, out: Tensor) -> Tensor:
        self.own = torch.full_like(out, torch.nan)
        return self.own

    def sum(self, out: Tensor) -> None:
        out.copy_(self.own)
        super().sum(out)


@pytest.mark.usefixtures("one_kernel_at_a_time")
@pytest.mark.parametrize(
    ("family", "length", "fields"),
    [
        ("qwen3", 3, {}),
        ("gemma3_text", 67, {"kv_heads": 1, "group": 2}),
        ("qwen3_5_text", 3, {"group": 1}),
        ("lfm2", 3, {}),
    ],
)
def test_logits_by_the_cuda_pass(family: str, length: int, fields: dict[str, Any], tmp_path: Path) -> None:
    """Check passes of few rows and of many against the whole model in float64."""
    path = make_checkpoint(tmp_path / "base", family, seed=5, **(SHAPE | {"group": 2} | fields))
    adapters = adapters_of(path, tmp_path)
    of_row = [0, -1, 1, 0]

    def fed(model: Any, given: dict[int, LoRAAdapter]) -> Tensor:
        feeder = Feeder(model, num_requests=4, max_len=LENGTH)
        feeder.adapters = given
        spans = {b: [((7 * b + 13 * p) % VOCAB, p) for p in range(1 + length * (b == 3))] for b in range(4)}
        last = {b: [(5, 1 + length * (b == 3)), (b, 2 + length * (b == 3))] for b in range(4)}
        return torch.cat((feeder.feed(spans, prompts=True), feeder.feed(last)))

    def on_rank(ranks: Ranks) -> Tensor:
        ranks.exchanges = ApartExchanges(ranks)
        base = load_model(path, dtype=torch.float32, device=ranks)
        return fed(with_slots(base, [part_of(each, i, base, path) for i, each in enumerate(adapters, 1)], of_row), {})

    def whole(dtype: torch.dtype) -> Tensor:
        base = load_model(path, dtype=dtype)
        made = [part_of(each, i, base, path) for i, each in enumerate(adapters, 1)]
        return fed(base, {b: made[i] for b, i in enumerate(of_row) if i >= 0})

    one, other = on_ranks(2, on_rank)
    assert_near(one, whole(torch.float64), whole(torch.float32), ulps=32)
    assert torch.equal(one, other)


def test_slots_of_a_rank_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a GPU needs memory for the rank's part of the weights and of the adapters' slots."""
    config = settings(folder, dtype="float32", enable_lora=True, max_loras=3, max_lora_rank=20, tensor_parallel_size=2)

    def needed(ranks: Ranks) -> tuple[Ranks, int]:
        model = load_model(folder / "0", dtype=torch.float32, device=ranks)
        return ranks, memory_of(model.weights) + slots_bytes(model.config, 3, 20, 4)

    for ranks, size in on_ranks(2, needed):
        assert_needed(config, size, monkeypatch, ranks=ranks, match="GiB for max_loras=3 adapters.*")


@pytest.mark.usefixtures("one_kernel_at_a_time")
def test_text_by_the_cuda_runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check texts of three requests with two adapters and none, with drafts, and that adapters change slots."""
    expected = [generate(build_engine(settings(folder, model=str(folder / str(i)), dtype="float32")), [GREEDY] * 3, 4)
                for i in range(4)]  # fmt: skip
    serve_by_cuda(monkeypatch)
    speculative = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1}
    lora = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "tensor_parallel_size": 2}
    small = {**SMALL, "max_steps_in_flight": 1, "enforce_eager": True, "dtype": "float32"}
    with engine_on_threads(settings(folder, speculative_config=speculative, **small, **lora)) as engine:
        assert isinstance(engine.runner, LeadingRunner)
        assert isinstance(engine.runner.runner, CudaRunner)
        assert engine.loras is not None
        given = [LoRARequest(f"adapter {i}", i, str(folder / f"adapter {i}")) for i in (1, 2, 3)]
        loras = [None, *map(engine.loras.load, given)]
        for which in ([0, 1, 2], [3, 0, 1]):
            made = generate(engine, [GREEDY] * 3, 4, loras=[loras[i] for i in which])
            for j, i in enumerate(which):
                assert made[j].output_token_ids == expected[i][j].output_token_ids, which
        assert engine.stats().accepted_tokens > 0

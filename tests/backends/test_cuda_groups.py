"""The CUDA runner with KV groups against the CPU runner with all layers in one group: the same tokens, although blocks
outside a window are freed. Triton's interpreter runs the kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import first_layers, make_checkpoint, make_overflowing
from engine.harness import poison
from specrs.backends.blueprint import Blueprint
from specrs.backends.cuda import kv_memory
from specrs.backends.cuda.runner import CudaRunner
from specrs.config import EngineConfig
from specrs.engine.engine import Engine
from specrs.errors import InvalidConfigError
from specrs.sampling import SamplingParams

from backends.cuda_engines import CUDA, generate, give_graphs
from backends.test_cuda_runner import GREEDY, SHAPE, Pair, assert_no_ties, assert_same, load_pair, with_quantized_cache

BASE = [5, 9, 2, 33, 7, 7, 1, 12, 40, 3, 22, 8, 8, 19, 30, 2]
PROMPTS = [BASE, BASE[:13], [60]]
BLOCKS = 16
"""Size of the pool. A request of full length needs 14 blocks: 8 in the group with full attention, 3 in each of the two
with windows."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Models with layers of window 6, window 6 and full attention: each layer forms a group."""
    folder = tmp_path_factory.mktemp("groups")
    fields: dict[str, Any] = {"sliding_window": 6, "sliding_window_pattern": 3, "initializer_range": 0.1}
    target = make_checkpoint(folder / "target", "gemma3_text", seed=1, **(SHAPE | {"layers": 3} | fields))
    draft = first_layers(target, folder / "draft", 1, layer_types=["sliding_attention"])
    return load_pair(folder, target, draft)


def engines(pair: Pair, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[Engine, Engine]:
    """Return an engine on the CUDA runner with KV groups full of NaN, and one on the CPU runner with one group and
    enough blocks."""
    fields = {"num_gpu_blocks_override": BLOCKS, "num_reserved_decode_tokens": 0, "monkeypatch": monkeypatch} | fields
    mine = pair.engine(gpu=True, **fields)
    assert isinstance(mine.runner, CudaRunner)
    assert mine.scheduler.num_groups == len(mine.runner.ctx.state.tables) == 3
    poison(mine)
    return mine, one_group(pair, **fields)


def one_group(pair: Pair, **fields: Any) -> Engine:
    with fields["monkeypatch"].context() as patch:
        patch.setattr(Blueprint, "with_kv_groups", lambda made: made)
        return pair.engine(gpu=False, **(fields | {"num_gpu_blocks_override": 64}))


ADJUSTED = SamplingParams(temperature=0.9, presence_penalty=0.7, logit_bias={3: 2.0}, logprobs=2)
KINDS = {
    "greedy": ("rejection", [GREEDY, GREEDY, GREEDY.replace(num_speculative_tokens=1)]),
    "sampled": ("coupled", [SamplingParams(temperature=0.8, top_p=0.9), ADJUSTED, GREEDY]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens(pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the engine of CUDA passes and the reference give the same tokens. Three requests run in a pool with
    room for one of full length, with prompts in chunks of at most 12 tokens."""
    rule, params = KINDS[kind]
    mine, reference = engines(pair, monkeypatch, rule=rule)
    ours, theirs = generate(mine, params, 12, PROMPTS), generate(reference, params, 12, PROMPTS)
    for one, other in zip(ours, theirs, strict=True):
        assert one.error is None
        assert one.output_token_ids == other.output_token_ids
    assert mine.scheduler.num_preemptions > 0
    assert sum(sum(request.acceptance.histogram) for request in ours) > 0


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_a_fault_after_the_last_layer_that_sees_all_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a NaN from a layer with a window is seen, although it is at a position outside the window of every
    chunk's last row."""
    target = make_overflowing(tmp_path / "target", 59, **(SHAPE | {"sliding_window": 2}))
    mine = load_pair(tmp_path, target, target).engine(gpu=True, monkeypatch=monkeypatch)
    assert isinstance(mine.runner, CudaRunner)
    bad, good = generate(mine, [GREEDY, GREEDY], 1, [[*BASE[:2], 59, *BASE[:9]], BASE[:12]])
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "not finite" in str(bad.error)


def test_quantized_groups(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check FP8 caches in every group, of target and draft. Unwritten positions hold NaN. No token of the sample
    depends on how a key is rounded."""
    quantized = with_quantized_cache(pair, torch.float8_e4m3fn)
    mine, reference = engines(quantized, monkeypatch)
    assert isinstance(mine.runner, CudaRunner)
    assert {layer.dtype for layer in mine.runner.ctx.kv_cache.layers} == {torch.float8_e4m3fn}
    ours, theirs = (generate(engine, [GREEDY] * 3, 12, PROMPTS) for engine in (mine, reference))
    assert [own.output_token_ids for own in ours] == [own.output_token_ids for own in theirs]
    assert mine.scheduler.num_preemptions > 0
    assert sum(sum(request.acceptance.histogram) for request in ours) > 0
    plain = generate(one_group(pair, num_reserved_decode_tokens=0, monkeypatch=monkeypatch), [GREEDY] * 3, 12, PROMPTS)
    assert [own.output_token_ids for own in ours] != [own.output_token_ids for own in plain], "codes are other numbers"
    assert_no_ties(quantized, theirs, [GREEDY] * 3, monkeypatch=monkeypatch, num_gpu_blocks_override=64)


@pytest.mark.parametrize("graphs", [False, True], ids=["op by op", "graphs"])
def test_the_same_without_drafts(pair: Pair, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, reference = engines(pair, monkeypatch)
    if graphs:
        give_graphs(mine)
    params = [GREEDY.replace(num_speculative_tokens=0)] * 3
    assert_same(*(generate(engine, params, 6, PROMPTS) for engine in (mine, reference)))


def test_a_prefix_is_found_in_all_groups(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a second request finds the prefix in all groups, windowed ones included, and computes only the
    positions after it."""
    mine, reference = engines(pair, monkeypatch)
    (expected,) = generate(reference, [GREEDY], 8, [BASE])
    for cached in (0, 12):
        before = mine.scheduler.num_cached_tokens
        (made,) = generate(mine, [GREEDY], 8, [BASE])
        assert made.output_token_ids == expected.output_token_ids
        assert mine.scheduler.num_cached_tokens - before == cached


def test_a_draft_that_sees_more_than_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a draft with full attention and a target of windowed layers. The first group has the draft and a target
    layer whose window is 6."""
    target = make_checkpoint(tmp_path / "target", "mistral", seed=1, **(SHAPE | {"layers": 3, "sliding_window": 6}))
    pair = load_pair(tmp_path, target, first_layers(target, tmp_path / "draft", 1, sliding_window=None))
    mine, reference = engines(pair, monkeypatch)
    ours, theirs = generate(mine, [GREEDY] * 3, 12, PROMPTS), generate(reference, [GREEDY] * 3, 12, PROMPTS)
    assert [own.output_token_ids for own in ours] == [own.output_token_ids for own in theirs]
    assert mine.scheduler.num_preemptions > 0
    assert sum(sum(request.acceptance.histogram) for request in ours) > 0


def test_no_text_depends_on_a_rounding(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no text of the sample depends on rounding, because the tests above compare libraries that round
    differently."""
    for rule, params in KINDS.values():
        fields = {"rule": rule, "monkeypatch": monkeypatch, "num_gpu_blocks_override": 64}
        assert_no_ties(pair, generate(one_group(pair, **fields), params, 12, PROMPTS), params, **fields)


def blueprint(pair: Pair, **fields: Any) -> Blueprint:
    sizes = {"max_model_len": 32, "max_num_seqs": 3, "max_num_batched_tokens": 12, "block_size": 4}
    config = EngineConfig(model=str(pair.target), dtype="float32", device="cpu", **(sizes | fields))
    made = Blueprint(config, type(pair.gpu)(pair.gpu.target, None)).with_kv_groups()
    assert len(made.window_groups) == 2
    return made


def test_memory_is_sized_by_what_is_held(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the size of the pool: one request of full length fits in 14 blocks of a layer, and a context that does not
    fit is rejected with its field's name."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 40, 1 << 40))

    def sized(left: int) -> int:
        """Return the size of the pool if `left` bytes are free after weights, buffers and graphs."""
        monkeypatch.setattr(kv_memory, "_measure", lambda _blueprint: ((1 << 39) - left, 0))
        return CUDA.num_blocks(blueprint(pair, gpu_memory_utilization=0.5))

    size = blueprint(pair).bytes_per_block
    assert size == 2 * 1 * 4 * 16 * 4, "K and V of one layer"
    assert sized(1 << 30) == 3 * 3 * 8, "what three requests can use in three groups"
    assert sized(14 * size) == 14
    with pytest.raises(InvalidConfigError, match="max_model_len=28 would fit"):
        sized(14 * size - 1)

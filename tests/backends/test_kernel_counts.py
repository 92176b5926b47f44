"""The number of kernels that passes launch, against the table of docs/gpu.md and the roofline calculator."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from checkpoints import make_checkpoint
from kernel_launches import Recorder, fake_context
from module_files import load_file
from specrs.backends.cuda import drafting, iteration
from specrs.backends.cuda.context import sequences_of
from specrs.backends.cuda.graphs import tasks
from specrs.backends.cuda.providers import OWN, OWN_BUCKETS, Choice, write_providers
from specrs.backends.cuda.shapes import Buckets, LogitsMode, MergedShape, Shape, batch_buckets
from specrs.backends.cuda.workspace import linear_shapes
from specrs.forecast.roofline import Roofline, gpu_of
from specrs.kernels.kv_codes import FRACTIONS
from specrs.models.loader import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_file("count_kernels", ROOT / "scripts/count_kernels.py")


def test_the_page_has_the_kernels_that_are_launched(script: ModuleType, tmp_path: Path) -> None:
    from kernel_launches import reference_configs

    found = script.counts()
    page = (ROOT / "docs/gpu.md").read_text()
    assert script.page_with(script.table(found), page) == page, "scripts/count_kernels.py --write"
    roofline = Roofline(gpu_of("H200"), *map(load_config, reference_configs(tmp_path)))
    greedy = {name: numbers[0] for name, numbers in found.items()}
    assert roofline.target_pass(64, 1).kernels == greedy["target pass, batch 64, K = 1"]
    for batch in (1, 64):
        assert roofline.draft_pass(batch).kernels == greedy[f"draft pass, batch {batch}"]
        for k in (0, 5):
            assert roofline.target_pass(batch, k).kernels == greedy[f"target pass, batch {batch}, K = {k}"]
    assert [roofline.kernels(1, k) for k in (0, 5)] == [greedy[f"iteration, batch 1, K = {k}"] for k in (0, 5)]


def test_one_request_that_asks_costs_little(script: ModuleType) -> None:
    found, chained = script.asking()
    page = (ROOT / "docs/gpu.md").read_text()
    text = script.asking_table(found, chained)
    assert script.page_with(text, page, script.BEGIN_ASKING) == page, "scripts/count_kernels.py --write"
    assert all(one.us + chained.us < 2000 for one in found)
    assert all(one.bytes < 1e8 for one in found), "bytes of one request, not of 64"


def test_a_table_that_is_not_what_is_launched_is_seen(script: ModuleType) -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    assert script.page_with(script.table({"draft pass, batch 1": (171, 176)}), page) != page


@pytest.mark.parametrize("cache_dtype", FRACTIONS)
def test_a_quantized_cache_takes_no_kernel_more(cache_dtype: torch.dtype, tmp_path: Path) -> None:
    """Check that a quantized KV cache needs no further kernel, conversion or memory."""
    names = []
    target = make_checkpoint(tmp_path, "qwen3", layers=2, hidden=64, kv_heads=2, head_dim=64, vocab=97)
    for dtype in (None, cache_dtype):
        with fake_context(target, target, 3, max_num_seqs=8, max_model_len=128, cache_dtype=dtype) as ctx:
            assert ctx.kv_cache.layers[0].dtype == (dtype or torch.bfloat16)
            with Recorder() as recorder:
                iteration.verify_pass(ctx, 2, 8, 4, greedy=True)
                drafting.draft_pass(ctx, 1, 2, LogitsMode.GREEDY)
            names.append([kernel if isinstance(kernel, str) else kernel.name for kernel in recorder.kernels])
    assert names[0] == names[1]


@pytest.mark.parametrize(("window", "groups"), [(16, 3), (None, 1)])
def test_an_iteration_of_several_kv_groups_has_a_kernel_for_them(
    window: int | None, groups: int, tmp_path: Path
) -> None:
    shape = {"layers": 3, "hidden": 64, "kv_heads": 2, "head_dim": 64, "vocab": 97}
    fields = {"max_position_embeddings": 16384}
    fields |= {} if window is None else {"sliding_window": window, "sliding_window_pattern": 3}
    target = make_checkpoint(tmp_path, "qwen3" if window is None else "gemma3_text", **shape, **fields)  # type: ignore[arg-type]
    roofline = Roofline(gpu_of("H200"), load_config(target), load_config(target), context=128)
    with fake_context(target, target, 3, max_num_seqs=8, max_model_len=16384) as ctx:
        assert len(ctx.state.tables) == groups
        sequences = sequences_of(ctx.record.views, "num_decode")
        for batch, k in ((1, 0), (2, 3)):
            with Recorder() as recorder:
                iteration.run(ctx, Shape(batch, k, batch * (k + 1), LogitsMode.GREEDY), sequences)
            # Of a draft with windows, where a row's KV begins is looked up.
            looked_up = int(k > 0 and ctx.draft_start is not None)
            assert roofline.kernels(batch, k) == len(recorder.kernels) - looked_up


@pytest.mark.parametrize("family", ["qwen2", "olmo2", "gemma3_text", "qwen3_moe", "mixtral", "mistral", "ministral3"])
def test_the_calculator_knows_every_family(family: str, tmp_path: Path) -> None:
    """Check the calculator's counts for every family (norms after and around blocks, windows, experts, growing
    queries), for few rows, more than 64, and more than 2,048."""
    fields = {"sliding_window": 32} if family == "mistral" else {}
    shape = {"layers": 3, "hidden": 64, "kv_heads": 2, "head_dim": 64, "vocab": 97}
    target = make_checkpoint(tmp_path, family, **shape, **fields)  # type: ignore[arg-type]
    roofline = Roofline(gpu_of("H200"), load_config(target), load_config(target), context=128)
    with fake_context(target, target, 3, max_num_seqs=640, max_model_len=128) as ctx:

        def count(work: Callable[[], None]) -> int:
            with Recorder() as recorder:
                work()
            return len(recorder.kernels)

        for batch, k in ((1, 3), (2, 0), (24, 3), (640, 3)):
            rows = k + 1
            found = count(lambda a=(batch, batch * rows, rows): iteration.verify_pass(ctx, *a, greedy=True))  # type: ignore[misc]
            assert roofline.target_pass(batch, k).kernels == found, (batch, k)
        for i, rows in ((1, 2), (2, 1)):
            looked_up = i == 1 and family == "mistral"  # where a row's draft KV begins
            found = -looked_up + count(lambda i=i: drafting.draft_pass(ctx, i, 40, LogitsMode.GREEDY))  # type: ignore[misc]
            assert roofline.draft_pass(40, rows).kernels == found, rows


@pytest.mark.parametrize(
    ("family", "left", "fused"),
    [("qwen3", None, True), ("qwen3", "lm_head", False), ("qwen3_moe", None, False), ("olmo2", None, False)],
)
def test_the_calculator_and_the_engine_read_the_same_table_of_products(
    family: str, left: str | None, fused: bool, script: ModuleType, tmp_path: Path
) -> None:
    """Check that the calculator launches what the engine launches if a table names our kernel for all products, or for
    all but one. Only a table for all of them fuses passes of 65 to 128 rows."""
    shape = {"layers": 3, "hidden": 64, "kv_heads": 2, "head_dim": 64, "vocab": 97}
    target, table = make_checkpoint(tmp_path, family, **shape), tmp_path / "configs.json"  # type: ignore[arg-type]
    config = load_config(target)
    for name, product in linear_shapes(config, torch.bfloat16).items():
        if name != left:
            write_providers(table, "NVIDIA H200", {product: dict.fromkeys(OWN_BUCKETS, Choice(OWN))})
    gpus = gpu_of("H200"), dataclasses.replace(gpu_of("H200"), products=table)
    plain, chosen = (Roofline(gpu, config, context=128) for gpu in gpus)
    with script.with_products(table), fake_context(target, target, 4, max_num_seqs=48, max_model_len=128) as ctx:
        for batch, k in ((16, 3), (13, 4), (32, 3), (43, 2)):
            with Recorder() as recorder:
                iteration.verify_pass(ctx, batch, batch * (k + 1), k + 1, greedy=True)
            found, rows = len(recorder.kernels), batch * (k + 1)
            assert chosen.target_pass(batch, k).kernels == found
            assert (plain.target_pass(batch, k).kernels > found) == (fused and 64 < rows <= 128), rows


def test_the_page_has_the_predicted_times(script: ModuleType) -> None:
    page = script.BENCHMARKS.read_text()
    for begin, text in script.predictions().items():
        assert script.page_with(text, page, begin) == page, f"scripts/count_kernels.py --write: {begin}"


@pytest.mark.parametrize(
    ("family", "before_attention"),
    [
        ("qwen3", {"qk_norm_rope_kernel", "skinny_linear_kernel", "combine_tiles_kernel"}),
        ("ministral3", {"scale_queries_kernel"}),
    ],
)
def test_what_comes_before_a_dependent_kernel(family: str, before_attention: set[str], tmp_path: Path) -> None:
    """Check what comes before a kernel that starts early (a dependent launch). It must be no copy, because a copy's
    graph node cannot start it. Attention reads positions before it waits, so the kernel before it must have waited for
    the writers of positions, or let nothing start early."""
    target = make_checkpoint(tmp_path, family, layers=1, hidden=64, kv_heads=2, head_dim=64, vocab=97)
    buckets = Buckets(batch_buckets(24), 3, max_chunk_rows=256, max_chunks=24, merges=4)
    with fake_context(target, target, 3, max_model_len=128, max_num_seqs=24) as ctx:
        recorders = []
        work = dict(tasks(ctx, buckets, sequences_of(ctx.record.views, "num_decode")))
        shapes = [key for key in work if isinstance(key, MergedShape) and key.decode.logits_mode is LogitsMode.GREEDY]
        wide, *_, narrow = [shape for shape in shapes if shape.decode.max_k == 3]
        assert wide.rows > 64 >= narrow.rows
        for key in (wide, narrow):
            with Recorder() as recorder:
                work[key]()
            recorders.append(recorder)
    seen = set()
    for recorder in recorders:
        for before, kernel in itertools.pairwise(recorder.kernels):
            if isinstance(kernel, str) or not kernel.settings.get("launch_pdl"):
                continue
            name = before if isinstance(before, str) else before.name
            assert "copy" not in name, kernel.name
            if kernel.name == "paged_attention_kernel":
                seen.add(name)
    assert seen <= before_attention, seen
    assert seen & {"qk_norm_rope_kernel", "scale_queries_kernel"}

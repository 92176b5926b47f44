"""Every family at untouched defaults: `LLM(model=...)` starts, writes, and drafts do not change what it writes.

Other tests set `threads` and sizes, so only these see the measurements that an engine makes at its start.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import FAMILIES, make_checkpoint, perturb_checkpoint
from specrs import LLM, SamplingParams
from specrs.engine import threads as engine_threads
from specrs.models.dense_native import NativeDense
from specrs.models.registry import FAMILIES as REGISTRY

VOCAB, WINDOW = 211, 9
PROMPTS = [[5, 7, 11, 13] * 6, [17, 3], list(range(VOCAB))]
"""Longer than the window, shorter than it, and one in which n-grams of one token find every token."""
WINDOWED: dict[str, dict[str, object]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW},
    "smollm3": {"use_sliding_window": True, "sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
}
"""Windows of the families that have them by their fields; Gemma 3 and gpt-oss of `FAMILIES` have some already."""
KINDS = [*FAMILIES, *(f"{family}+window" for family in WINDOWED)]
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads is the engine's to choose, with two cores to choose from."""
    monkeypatch.delenv(engine_threads.VARIABLE, raising=False)
    monkeypatch.setattr(engine_threads, "physical_cores", lambda: 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Target and draft of a kind in `KINDS`, made when first asked for."""
    made: dict[str, tuple[Path, Path]] = {}

    def pair(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            folder, (family, _, windowed) = tmp_path_factory.mktemp(kind), kind.partition("+")
            shape = {"vocab": VOCAB, "hidden": 48, "intermediate": 40, "kv_heads": 2, "head_dim": 12, "layers": 2}
            fields = WINDOWED[family] if windowed else {}
            target = make_checkpoint(folder / "target", family, seed=1, **shape, **fields)  # type: ignore[arg-type]
            made[kind] = target, perturb_checkpoint(target, folder / "draft", noise=0.05, seed=2)
        return made[kind]

    return pair


def write(model: Path, dtype: str, **settings: object) -> tuple[list[list[int]], LLM]:
    """The greedy tokens of every prompt, and the engine that wrote them."""
    llm = LLM(model=str(model), dtype=dtype, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], llm


def test_every_family_is_swept() -> None:
    """A family that is added to the registry is added here."""
    assert set(FAMILIES) == {family.model_type for family in REGISTRY.values()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_starts_and_drafts_change_no_text(
    kind: str, dtype: str, folders: Callable[[str], tuple[Path, Path]]
) -> None:
    target, draft = folders(kind)
    text, _ = write(target, dtype)
    assert [len(tokens) for tokens in text] == [12] * len(PROMPTS)
    for method in ({"model": str(draft)}, {"method": "ngram", "prompt_lookup_min": 1}):
        drafted, llm = write(target, dtype, speculative_config={"num_speculative_tokens": 3, **method})
        assert drafted == text
        assert llm.stats().draft_tokens > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "draft"), [("mistral+window", "mistral"), ("mistral", "mistral+window")])
def test_a_target_and_a_draft_of_which_one_has_windows(
    kind: str, draft: str, dtype: str, folders: Callable[[str], tuple[Path, Path]]
) -> None:
    """A draft that attends all positions keeps blocks that a windowed target would give back."""
    target, plain = folders(kind)[0], folders(draft)[1]
    text, _ = write(target, dtype)
    drafted, llm = write(target, dtype, speculative_config={"num_speculative_tokens": 3, "model": str(plain)})
    assert drafted == text
    assert llm.stats().draft_tokens > 0


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma3_text", "mistral+window"])
def test_steps_are_timed_where_k_is_planned(
    kind: str, method: str, folders: Callable[[str], tuple[Path, Path]]
) -> None:
    """`num_speculative_tokens="auto"` measures steps at the start, also of models with several KV groups."""
    target, draft = folders(kind)
    text, _ = write(target, "float32")
    drafter = {"model": str(draft)} if method == "draft_model" else {"method": method}
    drafted, llm = write(target, "float32", speculative_config={"num_speculative_tokens": "auto", **drafter})
    assert drafted == text
    assert llm.engine.planner is not None


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen2+window", "mistral"])
def test_a_measured_pass_is_fed_what_a_step_feeds(
    kind: str, folders: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the KV groups of the engine's model, each in a block of its own."""
    target, _ = folders(kind)
    _, llm = write(target, "float32")
    model = llm.engine.runner.target
    assert isinstance(model, NativeDense)
    fed, forward = [], NativeDense.forward

    def watched(measured: NativeDense, inputs: object, *rest: object) -> object:
        fed.append(inputs)
        return forward(measured, inputs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeDense, "forward", watched)
    assert engine_threads.pass_seconds(model, 2) > 0
    inputs = fed[0]
    groups = 1 if model.kv_groups is None else len(model.kv_groups.windows)
    slots = np.concatenate([inputs.slots, *(() if inputs.group_slots is None else inputs.group_slots)])
    assert sorted(slots.tolist()) == list(range(groups))
    assert (groups > 1) == (kind != "mistral")


def test_bf16_rows_are_measured_as_they_are_served(
    folders: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes that choose the threads round rows where the engine's passes do."""
    folder = make_checkpoint(tmp_path / "even", vocab=224, hidden=64, intermediate=64, head_dim=32, kv_heads=1)
    measured: list[bool] = []
    on_pool = NativeDense.on_pool

    def watched(model: NativeDense, *args: object, **settings: object) -> NativeDense:
        measured.append(bool(settings.get("bf16_rows")))
        return on_pool(model, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeDense, "on_pool", watched)
    LLM(model=str(folder), dtype="bfloat16", cpu_bf16_rows=True)
    assert measured == [True, True, True]
    shutil.rmtree(folder)

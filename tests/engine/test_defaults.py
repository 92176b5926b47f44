"""Every model family with default settings: `LLM(model=...)` starts, writes, and drafts do not change the text.

Other tests set `threads` and sizes, so only these see the measurements that an engine makes at its start.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, HYBRIDS, edit_json, make_checkpoint, make_eagle3, perturb_checkpoint
from hf_reference import generate_all, load
from specrs import LLM, SamplingParams
from specrs.backends.cpu import threads as engine_threads
from specrs.core import CpuDecoder
from specrs.engine import warm_up
from specrs.models.native_decoder import NativeDecoder
from specrs.models.registry import FAMILIES as REGISTRY
from sweep import some

from engine.other_vocabulary import rename

VOCAB, WINDOW, TOKENS = 211, 9, 12
PROMPTS = [[5, 7, 11, 13] * 6, [17, 3], list(range(VOCAB))]
"""Prompts: longer than the window, shorter than it, and one with every token, so that n-grams of one token always
match."""
WINDOWED: dict[str, dict[str, object]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW},
    "smollm3": {"use_sliding_window": True, "sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
}
"""Fields that give families windows. Gemma 3 and gpt-oss of `FAMILIES` have some already."""
KINDS = [*FAMILIES, *(f"{family}+window" for family in WINDOWED)]
DTYPES = ["float32", "bfloat16"]
DRAFTERS: dict[str, dict[str, object]] = {
    "draft model": {"model": "draft", "num_speculative_tokens": "auto"},
    "parallel": {"model": "parallel", "parallel_drafting": True, "num_speculative_tokens": 3},
    "other vocabulary": {"model": "renamed", "use_heterogeneous_vocab": True, "num_speculative_tokens": 3},
    "n-gram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": "head", "num_speculative_tokens": 3},
    "list": {"method": "ngram,draft_model", "prompt_lookup_min": 1, "model": "draft", "num_speculative_tokens": 3},
}
"""A `speculative_config` of every method, with the name of a folder as its model."""


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the number of threads to the engine, with two cores to choose from."""
    monkeypatch.delenv(engine_threads.VARIABLE, raising=False)
    monkeypatch.setattr(engine_threads, "physical_cores", lambda: 2)


@pytest.fixture
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the costs of steps with one and two sequences only, a tenth of what all sizes take."""
    monkeypatch.setattr(warm_up, "NATIVE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that makes target and draft of a kind in `KINDS` once. Next to them are a head and other
    drafts."""
    made: dict[str, tuple[Path, Path]] = {}

    def pair(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            folder, (family, _, windowed) = tmp_path_factory.mktemp(kind), kind.partition("+")
            shape = {"vocab": VOCAB, "hidden": 48, "intermediate": 40, "kv_heads": 2, "head_dim": 12, "layers": 2}
            fields = WINDOWED[family] if windowed else {}
            target = make_checkpoint(folder / "target", family, seed=1, **shape, **fields)  # type: ignore[arg-type]
            make_eagle3(folder / "head", target, seed=3, layer_ids=[0, 1])
            draft = perturb_checkpoint(target, folder / "draft", noise=0.05, seed=2)
            edit_json(shutil.copytree(draft, folder / "parallel") / "config.json", mask_token_id=VOCAB - 1)
            rename(draft, folder / "renamed", dropped=12)
            made[kind] = target, draft
        return made[kind]

    return pair


@pytest.fixture(scope="module")
def texts(folders: Callable[[str], tuple[Path, Path]]) -> Callable[[str, str], list[list[int]]]:
    """Return the texts without drafts, by kind of model and dtype."""
    return functools.cache(lambda kind, dtype: write(folders(kind)[0], dtype)[0])


def write(model: Path, dtype: str, **settings: object) -> tuple[list[list[int]], LLM]:
    """Return the greedy tokens after each prompt, and the `LLM` that generated them."""
    llm = LLM(model=str(model), dtype=dtype, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], llm


def test_every_family_is_swept() -> None:
    """Check that every family in the registry is tested here."""
    assert set(FAMILIES) | set(HYBRIDS) | {"gemma4_text"} == {family.model_type for family in REGISTRY.values()}


@pytest.mark.usefixtures("short_measurements")
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_transformers_own(
    kind: str, folders: Callable[[str], tuple[Path, Path]], texts: Callable[[str, str], list[list[int]]]
) -> None:
    """Check texts in float32 against transformers in float64: no token of these depends on rounding."""
    assert texts(kind, "float32") == generate_all(load(folders(kind)[0]), PROMPTS, TOKENS)


@pytest.mark.usefixtures("short_measurements")
@pytest.mark.parametrize(("kind", "dtype", "drafter"), some(3, KINDS, DTYPES, DRAFTERS))
def test_drafts_change_no_text(
    kind: str,
    dtype: str,
    drafter: str,
    folders: Callable[[str], tuple[Path, Path]],
    texts: Callable[[str, str], list[list[int]]],
) -> None:
    target, _ = folders(kind)
    speculative = dict(DRAFTERS[drafter])
    if "model" in speculative:
        speculative["model"] = str(target.parent / str(speculative["model"]))
    drafted, llm = write(target, dtype, speculative_config=speculative)
    assert drafted == texts(kind, dtype)
    assert llm.stats().draft_tokens > 0 or speculative["num_speculative_tokens"] == "auto"


@pytest.mark.usefixtures("short_measurements")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "draft"), [("mistral+window", "mistral"), ("mistral", "mistral+window")])
def test_a_target_and_a_draft_of_which_one_has_windows(
    kind: str, draft: str, dtype: str, folders: Callable[[str], tuple[Path, Path]]
) -> None:
    """Check a target and a draft of which only one has windows. A draft with full attention keeps blocks that a
    windowed target would free."""
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
    """Check `num_speculative_tokens="auto"`, also for models with several KV groups: the engine has a planner, and its
    text is that without drafts."""
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
    """Check that a measured pass is fed what a step feeds: the KV groups of the engine's model, each in its own
    block."""
    target, _ = folders(kind)
    _, llm = write(target, "float32")
    model = llm.engine.runner.target
    assert isinstance(model, NativeDecoder)
    fed: list[dict[str, Any]] = []
    on_pool = NativeDecoder.on_pool

    class Watched:
        """A decoder that keeps the inputs of its passes."""

        def __init__(self, decoder: CpuDecoder) -> None:
            self.decoder, self.logits = decoder, decoder.logits

        def forward(self, tokens: object, positions: object, slots: object, *rest: object, **groups: object) -> None:
            fed.append({"slots": slots, **groups})
            self.decoder.forward(tokens, positions, slots, *rest, **groups)  # type: ignore[arg-type]

    def watched(model: NativeDecoder, *args: object, **settings: object) -> NativeDecoder:
        measured = on_pool(model, *args, **settings)  # type: ignore[arg-type]
        measured.decoder = Watched(measured.decoder)  # type: ignore[assignment]
        return measured

    monkeypatch.setattr(NativeDecoder, "on_pool", watched)
    assert engine_threads.pass_seconds(model, 2) > 0
    groups = 1 if model.kv_groups is None else len(model.kv_groups.windows)
    others = fed[0]["group_slots"]
    slots = [*fed[0]["slots"].tolist(), *([] if others is None else others.flatten().tolist())]
    assert sorted(slots) == list(range(groups))
    assert (groups > 1) == (kind != "mistral")


def test_bf16_rows_are_measured_as_they_are_served(
    folders: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the passes that choose the number of threads round rows to bf16 if the engine's passes do."""
    folder = make_checkpoint(tmp_path / "even", vocab=224, hidden=64, intermediate=64, head_dim=32, kv_heads=1)
    measured: list[object] = []
    on_pool = NativeDecoder.on_pool

    def watched(model: NativeDecoder, *args: object, **settings: object) -> NativeDecoder:
        measured.append(settings.get("activations"))
        return on_pool(model, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeDecoder, "on_pool", watched)
    LLM(model=str(folder), dtype="bfloat16", cpu_activations="bf16")
    assert measured == ["bf16"] * 3
    shutil.rmtree(folder)

"""Drafters other than a plain draft model on the CUDA runner: in every step, tokens and counts equal the CPU runner's.

As in `test_cuda_runner`, kernels are run by Triton's interpreter.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, make_checkpoint, make_eagle3, perturb_checkpoint
from eagle3_reference import Head, Round, speculate
from engine.heads import fit
from engine.other_vocabulary import rename
from hf_reference import Statistics, load
from hf_reference import generate as continued
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.ring import Header, RingSlot
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from specrs.sampling import SamplingParams

from backends.cuda_engines import SMALL, K, generate, poison, serve_by_cuda

from .test_cuda_runner import assert_same_counts

VOCAB = 61
PROMPTS = [[5, 9, 2, 33, 7, 7, 1, 12, 40, 3, 22, 8, 8, 19], [5, 9, 2, 33, 7, 7, 1, 12], [60]]
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8)


@dataclasses.dataclass
class Bench:
    """Checkpoints of every kind, and their weights in both layouts, loaded when first asked for."""

    target: Path
    drafts: dict[str, Path]
    loaded: dict[tuple[str, bool], Weights] = dataclasses.field(default_factory=dict)

    @property
    def counts(self) -> Path:
        """Counts of token ids, by which a part of them is chosen."""
        return self.target.parent / "counts.json"

    def config(self, kind: str, rule: str, *, gpu: bool, **fields: Any) -> EngineConfig:
        speculative: dict[str, Any] = {"model": str(self.drafts[kind]), "num_speculative_tokens": K}
        speculative |= {
            "parallel": {"parallel_drafting": True},
            "the target of fewer ids": {"draft_vocab_size": 30, "draft_vocab_counts": str(self.counts)},
            "fewer ids": {"draft_vocab_size": 40, "draft_vocab_counts": str(self.counts)},
            "other vocabulary": {"use_heterogeneous_vocab": True},
            "head": {"method": "eagle3"},
            "head of all ids": {"method": "eagle3"},
            "fitted head": {"method": "eagle3"},
            "list with a head": {"method": "ngram,eagle3", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
        }[kind]
        depth = 1 if kind.startswith("list") else 2
        return EngineConfig(
            model=str(self.target),
            dtype="float32",
            speculative_config=speculative | {"rejection_sample_method": rule},
            enforce_eager=not gpu,
            **(SMALL | {"max_steps_in_flight": depth} | fields),
        )

    def engine(self, kind: str, rule: str, *, gpu: bool, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Engine:
        config = self.config(kind, rule, gpu=gpu, **fields)
        with monkeypatch.context() as patch:
            if (kind, gpu) not in self.loaded:
                # Under `coupled` a CPU would draft by text what a GPU drafts by tokens.
                self.loaded[kind, gpu] = load_weights(self.config(kind, "rejection", gpu=False))
            if gpu:
                serve_by_cuda(patch)
            return build_engine(config, self.loaded[kind, gpu])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("drafters")
    shape = {"layers": 2, "hidden": 32, "intermediate": 32, "kv_heads": 1, "head_dim": 16, "vocab": VOCAB}
    target = make_checkpoint(folder / "target", seed=1, **shape)
    close = perturb_checkpoint(target, folder / "close", noise=0.3, seed=2)
    parallel = perturb_checkpoint(target, folder / "parallel", noise=0.3, seed=2)
    edit_json(parallel / "config.json", mask_token_id=59)
    head = make_eagle3(folder / "head", target, seed=3, vocab=40, layer_ids=[0, 1])
    fitted = make_eagle3(folder / "fitted", target, seed=5, vocab=50, layer_ids=[0, 1], kv_heads=1, head_dim=16)
    scripted = load(target)
    fit(fitted, scripted, [prompt + continued(scripted, prompt, 12) for prompt in PROMPTS])
    everything = {"seed": 4, "layer_ids": [1], "fc_norm": True, "norm_output": True}
    (folder / "counts.json").write_text(json.dumps({str(i): 1 + i % 5 for i in range(12, VOCAB)}))
    drafts = {
        "parallel": parallel,
        "fewer ids": close,
        "the target of fewer ids": target,
        "other vocabulary": rename(close, folder / "renamed", dropped=12).path,
        "head": head,
        "head of all ids": make_eagle3(folder / "all", target, "speculators", layer="qwen3", **everything),
        "list with a head": head,
        "fitted head": fitted,
    }
    return Bench(target, drafts)


TEMPERATURES = [SAMPLED, GREEDY, SAMPLED.replace(temperature=1.3)]
RULES = {
    "greedy": ("rejection", [GREEDY, GREEDY.replace(num_speculative_tokens=1), GREEDY]),
    # Drafts of the CPU are cut exactly, those of a GPU on a grid: without a cut, both draw the same drafts.
    "rejection": ("rejection", TEMPERATURES),
    "adjusted": ("coupled", [SAMPLED.replace(presence_penalty=0.7, logit_bias={3: 2.0}), GREEDY, SAMPLED]),
}
# Of 15 pairs, each of which takes the interpreter half a minute, those in which every kind and every rule comes.
CASES = [
    ("parallel", "rejection"),
    ("other vocabulary", "greedy"),
    ("fewer ids", "greedy"),
    ("fewer ids", "rejection"),
    ("head", "adjusted"),
    ("head of all ids", "greedy"),
    ("list with a head", "rejection"),
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_same_tokens(bench: Bench, kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that both runners give the same tokens: with prompts in chunks, two steps in flight, and NaN in memory that
    must not be read."""
    rule, params = RULES[case]
    mine, theirs = (bench.engine(kind, rule, gpu=gpu, monkeypatch=monkeypatch) for gpu in (True, False))
    runner = mine.runner
    assert isinstance(runner, CudaRunner)
    poison(runner)
    execute = runner.execute

    def poisoned(*args: Any) -> None:
        poison(runner, caches=False)
        execute(*args)

    monkeypatch.setattr(runner, "execute", poisoned)
    for ours, reference in zip(*(generate(engine, params, 6, PROMPTS) for engine in (mine, theirs)), strict=True):
        assert ours.error is None
        assert ours.output_token_ids == reference.output_token_ids
        assert ours.acceptance.histogram == reference.acceptance.histogram
    assert_same_counts(mine.stats(), theirs.stats())
    assert mine.stats().drafts > 3


def test_drafts_and_counts_of_a_head_are_the_scripts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a head against a plain torch script, iteration by iteration: the drafts, and how many were accepted at each
    position. The prompt has two chunks."""
    engine = bench.engine("fitted head", "rejection", gpu=True, monkeypatch=monkeypatch, max_steps_in_flight=1)
    runner, rounds = engine.runner, dict[int, list[Round]]()
    assert isinstance(runner, CudaRunner)
    poison(runner)

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        b, results = runner.ctx.buffers, slot.results_arrays
        for sequence in range(header.num_decode):
            n, k = int(b.n[sequence]), int(b.k[sequence])
            drafts = b.drafts[sequence, :k].tolist()
            made = Round(n, drafts, int(results["num_accepted"][sequence]))
            rounds.setdefault(int(slot.settled_arrays["request_id"][sequence]), []).append(made)

    engine.watch = watch
    target = load(bench.target)
    head, statistics = Head(bench.drafts["fitted head"], target), Statistics()
    (request,) = generate(engine, [GREEDY], 12, PROMPTS[:1])
    said = speculate(target, head, request.prompt_token_ids, 12, K, [], statistics)
    assert request.output_token_ids == said.tokens
    assert rounds == {0: said.rounds}
    stats = engine.stats()
    assert (stats.drafts, stats.draft_tokens) == (statistics.drafts, statistics.draft_tokens)
    assert stats.accepted_tokens == statistics.accepted_tokens
    assert list(request.acceptance.accepted_per_position) == statistics.per_position[:K]
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_the_target_itself_drafts_what_comes_next_if_it_may(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a draft model that is the target itself, but drafts only 30 ids. Its drafts are accepted until the target's
    next token is not among these ids."""
    counts = json.loads(bench.counts.read_text())
    ids = set(sorted(range(VOCAB), key=lambda token: (-counts.get(str(token), 0), token))[:30])
    accepted = refused = 0
    for prompt in PROMPTS:
        kind = "the target of fewer ids"
        engine = bench.engine(kind, "rejection", gpu=True, monkeypatch=monkeypatch, max_steps_in_flight=1)
        runner, rounds = engine.runner, list[Round]()
        assert isinstance(runner, CudaRunner)
        poison(runner)
        engine.watch = rounds_of(engine, rounds)
        (request,) = generate(engine, [GREEDY], 14, [prompt])
        for made in rounds:
            text = request.output_token_ids[made.n - len(prompt) :]
            stands = next((i for i in range(len(made.drafts)) if text[i] not in ids), len(made.drafts))
            assert (made.accepted, made.drafts[:stands]) == (stands, text[:stands])
            assert set(made.drafts) <= ids
            accepted, refused = accepted + stands, refused + (stands < len(made.drafts))
    assert accepted > 3
    assert refused > 3


def rounds_of(engine: Engine, rounds: list[Round]) -> Any:
    """Return a watcher of an engine with one request, which adds each round's drafts and how many stood."""

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        assert isinstance(engine.runner, CudaRunner)
        b = engine.runner.ctx.buffers
        for sequence in range(header.num_decode):
            n, k = int(b.n[sequence]), int(b.k[sequence])
            accepted = int(slot.results_arrays["num_accepted"][sequence])
            rounds.append(Round(n, b.drafts[sequence, :k].tolist(), accepted))

    return watch

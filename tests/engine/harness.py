"""Engines on small random checkpoints with known greedy continuations. Holds no tests."""

import functools
import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from checkpoints import edit_json, make_checkpoint, perturb_checkpoint
from hf_reference import generate_all, load
from hypothesis import strategies as st
from specrs.backends.blueprint import Blueprint
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.sampling import SamplingParams

VOCAB = 211
LONGEST = 40  # new tokens that the reference holds per prompt


@dataclass(frozen=True)
class Bank:
    """A target, its drafts, and prompts with their greedy continuations, which no stop token ends."""

    target: Path
    drafts: dict[str, Path]
    prompts: list[list[int]]
    continuations: list[list[int]]
    eos: list[int]  # of the target's generation_config
    dtype: str = "float64"  # of engines on it; torch computes float64, the core the others

    def expected(self, index: int, max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Return the reference's tokens for prompt `index`."""
        text = self.continuations[index][:max_tokens]
        if not ignore_eos:
            for i, token in enumerate(text):
                if token in self.eos:
                    return text[: i + 1]
        return text


def make_prompts(seed: int = 0, count: int = 20) -> list[list[int]]:
    """Return prompts of 1 to 70 tokens. A third of them share long prefixes, and some are equal."""
    rng = random.Random(seed)
    base = [rng.randrange(VOCAB) for _ in range(70)]
    prompts = [[rng.randrange(VOCAB)], [5, 5], base[:33], base[:33], base[:48], base[:64], [*base[:64], 1]]
    while len(prompts) < count:
        shared = rng.choice([0, 0, 0, 16, 40])
        prompts.append(base[:shared] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))])
    return prompts


def make_bank(folder: Path, family: str = "qwen3", *, tie: bool = True, **fields: object) -> Bank:
    """Write checkpoints under `folder` and let transformers continue every prompt in float64."""
    target = make_checkpoint(folder / "target", family, seed=1, tie=tie, vocab=VOCAB, **fields)
    drafts = {
        "close": perturb_checkpoint(target, folder / "close", noise=0.1, seed=2),
        "equal": target,
        "small": make_checkpoint(
            folder / "small",
            family,
            seed=3,
            tie=not tie,
            vocab=VOCAB,
            kv_heads=1,
            head_dim=16,
            hidden=32,
            layers=1,
        ),
    }
    model = load(target)
    prompts = make_prompts()
    continuations = generate_all(model, prompts, LONGEST)
    # Stop ids that do occur: each first seen in another prompt's text, some way into it.
    eos = sorted({text[at] for text, at in zip(continuations[4::5], (6, 12, 25), strict=False)})
    edit_json(target / "generation_config.json", eos_token_id=eos)
    return Bank(target, drafts, prompts, continuations, eos)


def native_bank(bank: Bank, dtype: str) -> Bank:
    """Return `bank` with the texts of native passes at K = 0: each prompt alone, in one chunk, without a draft. Other
    runs must equal them to the bit. Other tests compare them with transformers."""
    continuations = []
    for i, prompt in enumerate(bank.prompts):
        engine = make_engine(bank.target, None, k=0, dtype=dtype, max_num_batched_tokens=512)
        assert engine.runner.is_native
        continuations.append(request(i, prompt, k=0, max_tokens=LONGEST, engine_k=0, ignore_eos=True))
        engine.add_request(continuations[-1])
        run(engine)
    return replace(bank, continuations=[job.output_token_ids for job in continuations], dtype=dtype)


@functools.cache
def weights(
    target: Path, draft: Path | None, dtype: str, enforce_eager: bool = False, method: str = "draft_model"
) -> Weights:
    """Load the weights of a pair once per kind. They are shared, because weights are never written to."""
    k = 0 if draft is None else 1
    return load_weights(config(target, draft, k=k, dtype=dtype, enforce_eager=enforce_eager, method=method))


def config(
    target: Path,
    draft: Path | None,
    *,
    k: int,
    dtype: str = "float64",
    draft_max_model_len: int | None = None,
    draft_quantization: str | None = None,
    method: str = "draft_model",
    rule: str = "rejection",
    **fields: object,
) -> EngineConfig:
    """Return the configuration of a small engine over `target`, which speculates with `draft` if given."""
    speculative = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": k,
        "max_model_len": draft_max_model_len,
        "rejection_sample_method": rule,
        "quantization": draft_quantization,
    }
    defaults: dict[str, object] = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return EngineConfig(model=str(target), speculative_config=draft and speculative, dtype=dtype, **(defaults | fields))


def make_engine(target: Path, draft: Path | None, *, k: int, dtype: str = "float64", **fields: object) -> Engine:
    """Make an engine on cached weights. A pool too small for one request of full length is enlarged."""
    made = config(target, draft, k=k, dtype=dtype, **fields)
    method = "draft_model" if made.speculative_config is None else made.speculative_config.method
    return build(made, weights(target, draft, dtype, made.enforce_eager, method))


def build(made: EngineConfig, loaded: Weights) -> Engine:
    """Make an engine on `loaded`, with a pool for at least one request of full length."""
    if made.num_gpu_blocks_override is not None:
        least = Blueprint(made, loaded).with_kv_groups().least_blocks
        made = replace(made, num_gpu_blocks_override=max(made.num_gpu_blocks_override, least))
    return build_engine(made, loaded)


def request(
    request_id: int, prompt: list[int], *, k: int | None, max_tokens: int, engine_k: int, **fields: object
) -> Request:
    """Return a greedy request without text."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, num_speculative_tokens=k, detokenize=False, **fields
    )
    return Request(request_id, prompt, params, num_speculative_tokens=engine_k)


Job = tuple[int, int | None, int, int]
"""Index of a prompt in a bank, the request's K, its maximum number of tokens, and the steps before the next request
arrives."""


def greedy_jobs(bank: Bank, engine_k: int) -> st.SearchStrategy[list[Job]]:
    """Draw one to eight jobs."""
    job = st.tuples(
        st.integers(0, len(bank.prompts) - 1),
        st.one_of(st.none(), st.integers(0, engine_k)),
        st.integers(1, LONGEST),
        st.integers(0, 5),
    )
    return st.lists(job, min_size=1, max_size=8)


def submit(engine: Engine, bank: Bank, jobs: list[Job], engine_k: int, **fields: object) -> list[Request]:
    """Add greedy requests for `jobs`, with the steps in between."""
    requests = []
    for i, (which, k, max_tokens, steps) in enumerate(jobs):
        requests.append(request(i, bank.prompts[which], k=k, max_tokens=max_tokens, engine_k=engine_k, **fields))
        engine.add_request(requests[-1])
        for _ in range(steps):
            engine.step()
    return requests


def run(engine: Engine) -> None:
    """Step until every request has ended, and check that the engine is idle again."""
    steps = 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
        assert steps < 20_000, "the engine makes no progress"
    assert_idle(engine)


def run_greedy(engine: Engine, bank: Bank, jobs: list[Job], engine_k: int, **fields: object) -> None:
    """Run greedy requests that go on past EOS. Check that each text is the prompt's continuation in `bank`."""
    requests = submit(engine, bank, jobs, engine_k, ignore_eos=True, **fields)
    run(engine)
    for (which, _, max_tokens, _), made in zip(jobs, requests, strict=True):
        assert made.output_token_ids == bank.continuations[which][:max_tokens]


def assert_idle(engine: Engine) -> None:
    """Check that no request and no step is left, every block is free, and all invariants hold."""
    scheduler = engine.scheduler
    scheduler.check_integrity()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight) == (0, 0, 0)
    assert scheduler.num_free_blocks == scheduler.num_blocks


def poison(engine: Engine) -> None:
    """Fill both KV caches with NaN, so that a read of something unwritten shows."""
    caches = [engine.runner.kv_cache, getattr(engine.drafter, "kv_cache", None)]
    for cache in (cache for cache in caches if cache is not None):
        for part in (*cache.k, *cache.v):
            with torch.inference_mode():
                part[...] = torch.nan

"""Constraints that leave few tokens or none: text and end are those of K = 0, for every drafter and rule.

Greedy text is that of a loop over transformers' logits, which knows the constraints as sets.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, make_checkpoint, make_eagle3, perturb_checkpoint
from hf_reference import load
from hypothesis import event, example, given
from hypothesis import strategies as st
from specrs.backends.ring import Header, RingSlot
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.core import FLAG_DRAFT_NON_FINITE, InvalidRequestError
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.sampling import SamplingParams
from sweep import sweep

from engine.automaton import Automaton
from engine.harness import run
from engine.other_vocabulary import rename

VOCAB, MAX_TOKENS = 61, 12
PROMPTS = [[5, 9, 2, 33, 7], [7, 7], [5, 9, 2, 33, 7, 2, 7, 3, 2, 5]]
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft model": {},
    "small draft model": {},
    "parallel": {"parallel_drafting": True},
    "head": {"method": "eagle3"},
    "other vocabulary": {"use_heterogeneous_vocab": True},  # by text under `coupled`
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "suffix": {"method": "suffix"},
    "list": {"method": "ngram,draft_model", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
}


@dataclass(frozen=True)
class Asked:
    """Constraints of one request."""

    prompt: int
    allowed: tuple[int, ...] | None
    bad_words: tuple[tuple[int, ...], ...]
    stop_ids: tuple[int, ...]
    min_tokens: int
    grammar: Automaton | None
    seed: int

    def params(self, temperature: float, k: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            max_tokens=MAX_TOKENS,
            min_tokens=self.min_tokens,
            allowed_token_ids=self.allowed,
            stop_token_ids=self.stop_ids,
            ignore_eos=True,
            # For error messages alone: the engine gets token ids and an automaton.
            bad_words=[str(word) for word in self.bad_words],
            structured_outputs=None if self.grammar is None else {"regex": "of the automaton"},
            detokenize=False,
            num_speculative_tokens=k,
        )

    def request(self, request_id: int, temperature: float, k: int | None = None) -> Request:
        return Request(
            request_id,
            PROMPTS[self.prompt],
            self.params(temperature, k),
            num_speculative_tokens=8,
            seed=self.seed,
            bad_words_token_ids=self.bad_words,
            grammar=self.grammar,  # type: ignore[arg-type]
        )

    def may_follow(self, tokens: list[int], *, at_the_door: bool = False) -> set[int]:
        """Return the tokens that may follow the output `tokens`. With `at_the_door`, bad words of several tokens are
        ignored."""
        stops, text = frozenset(self.stop_ids), PROMPTS[self.prompt] + tokens
        left = set(range(VOCAB)) if self.grammar is None else self.grammar.allowed(tokens, stops)
        if len(tokens) < self.min_tokens and not (self.grammar is not None and left <= stops):
            left -= stops
        if self.allowed is not None:
            left &= {*self.allowed}
        for *begin, last in self.bad_words:
            if not begin or (not at_the_door and text[-len(begin) :] == begin):
                left.discard(last)
        return left

    def ends(self, tokens: list[int]) -> bool:
        """Return whether the last of the output `tokens` is a stop id that takes effect."""
        counts = len(tokens) > self.min_tokens or self.grammar is not None
        return bool(tokens) and tokens[-1] in self.stop_ids and counts


@functools.cache
def logits_of(target: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return _model(target)(torch.tensor([tokens])).logits[0, -1]


_model = functools.cache(load)


def greedy(target: Path, asked: Asked) -> tuple[list[int], str]:
    """Return output and finish reason of a plain loop that applies the constraints as sets."""
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        left = sorted(asked.may_follow(tokens))
        if not left:
            return tokens, "error"
        logits = logits_of(target, (*PROMPTS[asked.prompt], *tokens))
        tokens.append(left[int(logits[left].argmax())])
        if asked.ends(tokens):
            return tokens, "stop"
    return tokens, "length"


@dataclass
class Bench:
    """Checkpoints of every kind, and their weights, loaded when first asked for."""

    target: Path
    drafts: dict[str, Path]
    loaded: dict[Any, Weights] = field(default_factory=dict)

    def engine(self, drafter: str | None, rule: str, k: int, **fields: Any) -> Engine:
        speculative: dict[str, Any] | None = None
        if drafter is not None:
            speculative = {"num_speculative_tokens": k, "rejection_sample_method": rule, **DRAFTERS[drafter]}
            if drafter in self.drafts:
                speculative["model"] = str(self.drafts[drafter])
        depth = 1 if drafter in ("ngram", "suffix", "list") else 2
        defaults: dict[str, Any] = {"dtype": "float64", "max_steps_in_flight": depth, "max_num_batched_tokens": 16}
        config = EngineConfig(
            model=str(self.target),
            speculative_config=speculative,
            max_model_len=64,
            max_num_seqs=4,
            block_size=4,
            **(defaults | fields),
        )
        key = drafter, rule if drafter == "other vocabulary" else None, config.dtype
        if key not in self.loaded:
            self.loaded[key] = load_weights(config)
        engine = build_engine(config, self.loaded[key])
        engine.runner.rule = rule
        return engine


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("constraints")
    shape = {"hidden": 32, "intermediate": 32, "kv_heads": 1, "head_dim": 16, "vocab": VOCAB}
    target = make_checkpoint(folder / "target", seed=1, layers=2, **shape)
    close = perturb_checkpoint(target, folder / "close", noise=0.1, seed=2)
    parallel = perturb_checkpoint(target, folder / "parallel", noise=0.1, seed=2)
    edit_json(parallel / "config.json", mask_token_id=59)
    drafts = {
        "draft model": close,
        "list": close,
        "small draft model": make_checkpoint(folder / "small", seed=3, layers=1, **shape),
        "parallel": parallel,
        "head": make_eagle3(folder / "head", target, seed=4, vocab=40, layer_ids=[0, 1]),
        "other vocabulary": rename(close, folder / "renamed", dropped=12).path,
    }
    return Bench(target, drafts)


TOKENS = (2, 3, 5, 7, 9, 33)
"""Few different tokens, so that constraints affect each other."""
SHORT = Automaton(({9: 1}, {3: 2, 33: 2}, {}), frozenset({2}))
"""Grammar in which only a stop id may follow after two tokens."""
EDGES = [
    Asked(0, None, (), (1, 4), 9, SHORT, 11),  # `min_tokens` yields
    Asked(0, (9, 3, 33), (), (1,), 0, SHORT, 12),  # the end is not among the allowed ids
    Asked(2, (2, 3), ((2, 2), (2, 3), (3, 3, 3)), (), 0, None, 13),  # a 2 that comes is the last token
    Asked(1, (2, 3, 5, 7), ((2, 3), (3, 5, 7), (7, 7)), (3,), 4, None, 14),
]


@st.composite
def automata(draw: Any) -> Automaton:
    """Draw automata of up to four states, none of which is a dead end."""
    count = draw(st.integers(1, 4))
    following, complete = [], set()
    for state in range(count):
        own = draw(st.dictionaries(st.sampled_from(TOKENS), st.integers(0, count - 1), max_size=3))
        if not own or draw(st.booleans()):
            complete.add(state)
        following.append(own)
    return Automaton(tuple(following), frozenset(complete))


@st.composite
def requests_of(draw: Any) -> Asked:
    """Draw requests with any constraints, tight ones in half of the cases."""
    grammar, tight = draw(st.none() | automata()), draw(st.booleans())
    allowed = st.lists(st.sampled_from((*TOKENS, 1, 4)), min_size=1, max_size=3 if tight else 8, unique=True).map(tuple)
    word = st.lists(st.sampled_from(TOKENS), min_size=1 + tight, max_size=3).map(tuple)
    return Asked(
        prompt=draw(st.integers(0, len(PROMPTS) - 1)),
        allowed=draw(allowed if tight else st.none() | allowed),
        bad_words=tuple(draw(st.lists(word, min_size=3 * tight, max_size=9))),
        stop_ids=tuple(
            draw(st.lists(st.sampled_from((1, 4, 5)), min_size=grammar is not None, max_size=2, unique=True))
        ),
        min_tokens=draw(st.sampled_from((0, 0, 1, 4, 9, MAX_TOKENS))),
        grammar=grammar,
        seed=draw(st.integers(0, 2**31)),
    )


def watch_draft_faults(engine: Engine) -> None:
    """Fail a step in which a masked-out row of a draft is mistaken for a fault of the drafter."""

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        assert not (slot.results_arrays["flags"][: header.num_decode] & FLAG_DRAFT_NON_FINITE).any()

    engine.watch = watch


def made(engine: Engine, jobs: list[Asked], temperature: float) -> list[tuple[list[int], str, str | None]]:
    """Return output, finish reason and error of each request. A rejected one has the reason `rejected`."""
    watch_draft_faults(engine)
    requests: list[Request | InvalidRequestError] = []
    for i, asked in enumerate(jobs):
        request = asked.request(i, temperature)
        try:
            engine.add_request(request)
            requests.append(request)
        except InvalidRequestError as error:
            requests.append(error)
    run(engine)
    found = []
    for request in requests:
        if isinstance(request, Request):
            error = None if request.error is None else str(request.error)
            found.append((request.output_token_ids, str(request.finish_reason), error))
        else:
            found.append(([], "rejected", str(request)))
    return found


def check(asked: Asked, tokens: list[int], reason: str, error: str | None) -> None:
    """Check that each token may follow those before it, and that the end is where it must be."""
    for i, token in enumerate(tokens):
        assert token in asked.may_follow(tokens[:i])
        assert i + 1 == len(tokens) or not asked.ends(tokens[: i + 1])
    never = not asked.may_follow([], at_the_door=True)
    # `allowed_token_ids` of stop ids alone and `min_tokens` are rejected whatever the grammar.
    contradicts = asked.min_tokens > 0 and asked.allowed is not None and {*asked.allowed} <= {*asked.stop_ids}
    assert (reason == "rejected") == (never or contradicts)
    if reason == "rejected":
        assert (tokens, "finite" in str(error)) == ([], False)
    elif reason == "error":
        assert error is not None
        assert not asked.may_follow(tokens)
        assert f": no token is allowed at position {len(PROMPTS[asked.prompt]) + len(tokens)}, " in error
        for name, is_given in (
            ("allowed_token_ids=", asked.allowed is not None),
            ("bad_words=", bool(asked.bad_words)),
            ("structured_outputs=", asked.grammar is not None),
            ("min_tokens=", len(tokens) < asked.min_tokens and bool(asked.stop_ids)),
        ):
            assert (name in error) == is_given
    else:
        assert error is None
        assert reason == ("stop" if asked.ends(tokens) else "length")
        assert reason == "stop" or len(tokens) == MAX_TOKENS


HOW = [("rejection", 0.0), ("coupled", 0.0), ("coupled", 1.0), ("rejection", 1.0)]
"""Rule and temperature."""


@pytest.mark.parametrize("drafter", DRAFTERS)
@sweep(45)
@example(jobs=EDGES, k=5, how=HOW[0])
@example(jobs=EDGES, k=5, how=HOW[2])
@example(jobs=EDGES, k=5, how=HOW[3])
@given(jobs=st.lists(requests_of(), min_size=1, max_size=6), k=st.integers(1, 6), how=st.sampled_from(HOW))
def test_text_and_end_are_those_of_no_drafts(
    bench: Bench, drafter: str, jobs: list[Asked], k: int, how: tuple[str, float]
) -> None:
    rule, temperature = how
    found = made(bench.engine(drafter, rule, k), jobs, temperature)
    for asked, (tokens, reason, error) in zip(jobs, found, strict=True):
        event(reason)
        check(asked, tokens, reason, error)
        if temperature == 0.0 and reason != "rejected":
            assert (tokens, reason) == greedy(bench.target, asked)
    if how != ("rejection", 1.0):
        assert found == made(bench.engine(None, rule, 0), jobs, temperature)

"""Functions of specrs that vLLM calls, tested without vLLM: texts that move between rows, end and return; drafts; the
proposer's API.

tests/integrations/hosts has the same inside a real vLLM (`make test-vllm`).
"""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs import core
from specrs.errors import InvalidConfigError, UnsupportedConfigError
from specrs.integrations import vllm
from specrs.integrations.suffix_decoding import SuffixDecodingCache

MAX_LEN, DEPTH = 48, 8


def vllm_config(
    k: int = 5, least: int | None = 1, most: int | None = 3, factor: float = 1.0, least_prob: float = 0.1, **fields: Any
) -> Any:
    """Make the part of vLLM's configuration that the proposers read. `least` and `most` are sizes of n-grams; `factor`
    and `least_prob` are settings of suffix decoding."""
    defaults = {
        "num_speculative_tokens": k,
        "suffix_decoding_max_tree_depth": DEPTH,
        "suffix_decoding_max_cached_requests": 100,
        "suffix_decoding_max_spec_factor": factor,
        "suffix_decoding_min_token_prob": least_prob,
    }
    own = {"prompt_lookup_min": least, "prompt_lookup_max": most} | fields
    speculative = SimpleNamespace(**defaults)
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
        additional_config={"specrs": own} if least or most else {},
    )


def naive_draft(text: list[int], outputs: list[list[int]], most: int, factor: float, least_prob: float) -> list[int]:
    """Draft by suffix decoding, counting substrings one by one, in the text itself and in all outputs. A pattern of m
    tokens has at most `factor * m` drafts, each of which follows the pattern in at least `least_prob` of its places."""

    def count(texts: list[list[int]], part: list[int]) -> int:
        return sum(t[i : i + len(part)] == part for t in texts for i in range(len(t) - len(part) + 1))

    best: tuple[float, list[int]] = (0.0, [])
    for texts in ([text], outputs):
        rooms = [(min(most, int(factor * m), DEPTH - m), m) for m in range(1, min(DEPTH, len(text) + 1))]
        for room, m in sorted(rooms, reverse=True):
            part, score, whole = text[-m:], 0.0, count(texts, text[-m:])
            while whole and len(part) < m + room:
                found, token = max((count(texts, [*part, t]), -t) for t in range(4))
                if not found or found / whole < least_prob:
                    break
                part, score = [*part, -token], score + found / whole
            if score > best[0] + 1e-9:
                best = (score, part[m:])
    return best[1]


suffix_settings = st.tuples(st.sampled_from([0.5, 1.0, 1.5, 4.0]), st.sampled_from([0.0, 0.1, 0.4, 1.0]))
"""Values of `max_spec_factor` and `min_token_prob`, exact in products with small integers."""


class Batch:
    """vLLM's rows: requests come, go, and change places."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.sampled: list[list[int]] = []

    def step(self, proposer: Any) -> list[list[int]]:
        ids = np.full((8, MAX_LEN), -5, dtype=np.int32)
        lengths = np.zeros(8, dtype=np.int32)
        for i, text in enumerate(self.texts):
            ids[i, : len(text)], lengths[i] = text, len(text)
        return proposer.propose(self.sampled, lengths, ids)


@pytest.mark.parametrize("which", ["NgramProposer", "SuffixProposer"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_drafts_do_not_depend_on_places(which: str, data: st.DataObject) -> None:
    """Check that drafts depend on the texts and settings alone: rows are reordered and dropped between steps."""
    tokens = st.integers(0, 3)
    factor, least_prob = data.draw(suffix_settings, label="settings")
    proposer, batch = getattr(vllm, which)(vllm_config(factor=factor, least_prob=least_prob)), Batch()
    started: list[list[int]] = []  # the prompt of each row
    ended: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 8), label="steps")):
        rows = list(zip(batch.texts, started, strict=True))
        order = data.draw(st.permutations(range(len(rows))), label="order")
        rows = [rows[i] for i in order]
        if rows and data.draw(st.booleans(), label="one ends"):
            text, prompt = rows.pop()
            ended.append(text[len(prompt) :])
        if len(rows) < 4:
            # No two texts are alike: each starts with a number of its own.
            prompt = [4 + len(ended) + 20 * len(rows), *data.draw(st.lists(tokens, max_size=6), label="prompt")]
            if all(prompt[0] != other[0] for _, other in rows):
                rows.append((list(prompt), prompt))
        batch.texts, started = [text for text, _ in rows], [prompt for _, prompt in rows]
        batch.sampled = []
        for text in batch.texts:
            new = data.draw(st.lists(tokens, min_size=1, max_size=4), label="sampled")[: MAX_LEN - len(text)]
            if text != started[len(batch.sampled)] and data.draw(st.integers(0, 5)) == 0:
                new = []  # a step without it
            text.extend(new)
            batch.sampled.append(new)
        drafts = batch.step(proposer)
        assert proposer.num_faults == 0
        outputs = ended + [text[len(prompt) :] for text, prompt in zip(batch.texts, started, strict=True)]
        for text, new, draft in zip(batch.texts, batch.sampled, drafts, strict=True):
            most = min(5, MAX_LEN - len(text) - 1)
            if not new or most <= 0:
                assert draft == []
            elif which == "NgramProposer":
                assert draft == core.NgramProposer(1, 3).propose(np.array(text), most).tolist()
            else:
                assert draft == naive_draft(text, outputs, most, factor, least_prob)


def test_the_better_way_is_taken_and_learned() -> None:
    """Check that the better method is chosen: suffix drafts if the last occurrence misleads and the most frequent one
    does not, and the reverse."""
    best = vllm.BestProposer(vllm_config())
    for way, other in (("suffix", "ngram"), ("ngram", "suffix")):
        best._statistics[way].stood, best._statistics[other].stood = 5.0, 0.1
        best._statistics[way].expected = best._statistics[other].expected = 5.0
        batch = Batch()
        batch.texts = [[1, 2, 3, 1, 2, 3, 1, 2, 0, 1, 2]]
        batch.sampled = [[2]]
        (draft,) = batch.step(best)
        alone = {"suffix": vllm.SuffixProposer(vllm_config()), "ngram": vllm.NgramProposer(vllm_config())}[way]
        assert [draft] == batch.step(alone)
        assert draft[0] == (3 if way == "suffix" else 0)
        before = best._statistics["suffix"].stood
        batch.texts[0].extend([3, 1])
        batch.sampled = [[3, 1]]
        batch.step(best)
        assert best._statistics["suffix"].stood > before, "what came is what suffix drafts said, verified or not"
        best.reset()


def test_a_fault_costs_drafts_only(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, batch = vllm.SuffixProposer(vllm_config()), Batch()
    batch.texts, batch.sampled = [[1, 2, 1, 2]], [[2]]
    monkeypatch.setattr(proposer, "draft", lambda text, most: 1 / 0)
    assert batch.step(proposer) == [[]]
    assert batch.step(proposer) == [[]]
    assert proposer.num_faults == 2
    assert [record.message for record in caplog.records] == [
        "drafting failed; vLLM goes on without drafts in this step"
    ]
    monkeypatch.undo()
    assert batch.step(proposer) == [[1, 2]]


def test_settings_of_ngrams() -> None:
    for given_sizes, sizes in (((None, None), (5, 5)), ((2, None), (2, 2)), ((None, 4), (4, 4)), ((2, 4), (2, 4))):
        made = vllm.NgramProposer(vllm_config(5, *given_sizes))._ngrams
        assert (made.prompt_lookup_min, made.prompt_lookup_max) == sizes
    with pytest.raises(InvalidConfigError, match=r"additional_config\['specrs'\].*prompt_lookup_mix"):
        vllm.NgramProposer(vllm_config(prompt_lookup_mix=1))
    with pytest.raises(InvalidConfigError, match="prompt_lookup_max=0: "):
        vllm.NgramProposer(vllm_config(5, 1, 0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_suffix_cache_drafts_as_a_naive_counter(data: st.DataObject) -> None:
    tokens = st.integers(0, 3)
    most_cached = data.draw(st.sampled_from([-1, 1, 0]), label="max_cached_requests")
    factor, least_prob = data.draw(suffix_settings, label="settings")
    cache = SuffixDecodingCache(DEPTH, most_cached)
    running: dict[str, tuple[list[int], list[int]]] = {}
    ended: dict[str, list[int]] = {}
    for step in range(data.draw(st.integers(1, 14), label="steps")):
        what = data.draw(st.sampled_from(["start", "append", "append", "speculate", "speculate", "stop", "evict"]))
        name = data.draw(st.sampled_from(sorted(running)), label="request") if running else None
        if what == "start" or name is None:
            name, prompt = f"r{step}", data.draw(st.lists(tokens, max_size=8))
            cache.start_request(name, np.array(prompt, dtype=np.int32))
            running[name] = (prompt, [])
        elif what == "append":
            new = data.draw(st.lists(tokens, min_size=1, max_size=5))
            cache.add_active_response(name, new)
            running[name][1].extend(new)
        elif what == "stop":
            cache.stop_request(name)
            _, output = running.pop(name)
            if most_cached and output:
                ended[name] = output
                while 0 <= most_cached < len(ended):
                    del ended[next(iter(ended))]
        elif what == "evict" and ended:
            gone = data.draw(st.sampled_from(sorted(ended)))
            cache.evict_cached_response(gone)
            del ended[gone]
        elif what == "speculate":
            text = running[name][0] + running[name][1]
            most = data.draw(st.integers(0, 6))
            outputs = [] if not most_cached else [*ended.values(), *(output for _, output in running.values())]
            draft = cache.speculate(
                name,
                np.array(text[-DEPTH:], dtype=np.int32),
                max_spec_tokens=most,
                max_spec_factor=factor,
                min_token_prob=least_prob,
            )
            assert draft.token_ids == naive_draft(text, outputs, most, factor, least_prob)
            assert draft.parents == [i - 1 for i in range(len(draft.token_ids))]
            assert sum(draft.probs) == pytest.approx(draft.score)
        assert cache.active_requests == running.keys()
        assert cache.cached_requests == (ended.keys() | running.keys() if most_cached else ended.keys())


def test_what_the_suffix_cache_refuses() -> None:
    cache = SuffixDecodingCache()
    for call in (cache.stop_request, cache.evict_cached_response, lambda name: cache.speculate(name, [1])):
        with pytest.raises(ValueError, match="req_id='a'"):
            call("a")
    cache.start_request("a", [1, 2, 1])
    with pytest.raises(ValueError, match="req_id='a': is running or cached"):
        cache.start_request("a", [1])
    with pytest.raises(ValueError, match="context: is not the end of the text"):
        cache.speculate("a", [2, 2])
    with pytest.raises(ValueError, match="context: is not the end of the text"):
        cache.speculate("a", [1, 1, 2, 1])
    for wrong in ({"max_spec_offset": 1}, {"use_tree_spec": True}, {"min_token_prob": 0.5}, {"max_spec_factor": 2.0}):
        with pytest.raises(UnsupportedConfigError, match=next(iter(wrong))):
            cache.speculate("a", [1], **wrong)
    assert cache.speculate("a", [1]).token_ids == [2]


def test_register_stands_in_for_a_package_that_is_not_there() -> None:
    code = """
import importlib.util, sys
from specrs.integrations import vllm
from specrs.integrations.suffix_decoding import SuffixDecodingCache
assert importlib.util.find_spec("arctic_inference") is None
vllm.register(); vllm.register()
assert importlib.util.find_spec("arctic_inference") is not None
import arctic_inference.suffix_decoding as found
assert found.SuffixDecodingCache is SuffixDecodingCache
assert not {"torch", "vllm"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

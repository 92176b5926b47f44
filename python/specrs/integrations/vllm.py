"""Drafts from the text for vLLM, as its custom proposers: n-gram, suffix, or whichever of them does better.

    LLM(model=..., speculative_config={
        "method": "custom_class", "model": "specrs.integrations.vllm.BestProposer", "num_speculative_tokens": 8})

`NgramProposer` and `SuffixProposer` are the other classes. Options `suffix_decoding_*` go into the same dictionary.
vLLM drops the sizes of n-grams there for custom proposers, so they go into `LLM(additional_config={"specrs":
{"prompt_lookup_max": 4}})`.

`register()` lets vLLM's own method "suffix" find `SuffixDecodingCache` here. If both packages are installed, vLLM calls
it by itself. vLLM verifies the drafts, so specrs does not change its text. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from specrs import core
from specrs.errors import InvalidConfigError, unknown_key
from specrs.integrations.suffix_decoding import SuffixDecodingCache, SuffixDecodingDraft

logger = logging.getLogger("specrs")
_DEFAULT_PROMPT_LOOKUP = 5
_NGRAM_KEYS = ("prompt_lookup_min", "prompt_lookup_max")
_DECAY = 0.98
"""Factor by which a method's statistics decay with each of its drafts."""


class _Text:
    """Tokens of one request that were seen so far."""

    def __init__(self, request_id: int, tokens: np.ndarray) -> None:
        self.request_id = request_id
        self._tokens = np.empty(max(256, 2 * len(tokens)), dtype=np.int64)
        self._length = 0
        self.append(tokens)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of the request, `[n]` int64."""
        return self._tokens[: self._length]

    def append(self, tokens: np.ndarray) -> None:
        """Append new tokens to the text."""
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate((self.tokens, np.empty(2 * end - self._length, dtype=np.int64)))
        self._tokens[self._length : end] = tokens
        self._length = end


class _Proposer:
    """Base of the custom proposers that vLLM calls. vLLM passes no request ids, so texts are recognized by their
    tokens.

    A row of vLLM's batch may move to another place between calls, end, or be recomputed. A row whose tokens continue no
    known text is a new request. A text that no row continues has ended.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read the settings in `vllm_config.speculative_config`."""
        self.config = vllm_config.speculative_config
        self.num_speculative_tokens = int(self.config.num_speculative_tokens)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self._rows: list[_Text | None] = []
        self._ids = itertools.count()
        self.num_faults = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafts for each row of the batch; empty for a row that sampled nothing or has no room.

        If drafting fails, there are no drafts: the failure is logged once, counted in `num_faults`, and all texts are
        forgotten.
        """
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:
            if not self.num_faults:
                logger.exception("drafting failed; vLLM goes on without drafts in this step")
            self.num_faults += 1
            self.reset()
            return [[] for _ in sampled_token_ids]

    def reset(self) -> None:
        """Forget all texts."""
        self._rows = []

    def _propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: np.ndarray, token_ids_cpu: np.ndarray
    ) -> list[list[int]]:
        rows = self._follow(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        drafts: list[list[int]] = []
        for sampled, text in zip(sampled_token_ids, rows, strict=True):
            most = 0 if text is None else min(self.num_speculative_tokens, self.max_model_len - len(text.tokens) - 1)
            drafts.append(self.draft(text, most) if sampled and text is not None and most > 0 else [])
        return drafts

    def _follow(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens: np.ndarray, token_ids: np.ndarray
    ) -> list[_Text | None]:
        before: list[_Text] = [text for text in self._rows if text is not None]
        rows: list[_Text | None] = []
        for i, sampled in enumerate(sampled_token_ids):
            now = token_ids[i, : int(num_tokens[i])]
            here = self._rows[i] if i < len(self._rows) else None
            candidates = sorted(before, key=lambda text: text is not here)  # most rows stay where they were
            text = next((text for text in candidates if _goes_on(text.tokens, now, len(sampled))), None)
            if text is not None:
                before.remove(text)
                new = now[len(text.tokens) :].astype(np.int64)
                if len(new):
                    text.append(new)
                    self.appended(text, new)
            elif sampled:
                split = max(0, len(now) - len(sampled))
                text = _Text(next(self._ids), now[:split].astype(np.int64))
                self.started(text)
                new = now[split:].astype(np.int64)
                text.append(new)
                self.appended(text, new)
            rows.append(text)
        for text in before:
            self.ended(text)
        self._rows = rows
        return rows

    def draft(self, text: _Text, most: int) -> list[int]:
        """Return at most `most` > 0 draft tokens that continue the text."""
        raise NotImplementedError

    def started(self, text: _Text) -> None:
        """Called for a new request. `text` is its prompt."""

    def appended(self, text: _Text, tokens: np.ndarray) -> None:
        """Called after `tokens` were appended to `text`."""

    def ended(self, text: _Text) -> None:
        """Called when the request of `text` has ended."""


def _goes_on(known: np.ndarray, now: np.ndarray, sampled: int) -> bool:
    """Return True if `now`, whose last `sampled` tokens are new, continues the text `known`."""
    return len(known) == len(now) - sampled and np.array_equal(known, now[: len(known)])


class NgramProposer(_Proposer):
    """Proposer of the tokens that followed the last earlier occurrence of the longest n-gram at the end of the text
    (prompt lookup)."""

    def __init__(self, vllm_config: Any) -> None:
        """Read `prompt_lookup_min` and `prompt_lookup_max`. If neither is set, both are 5; if one is set, both have its
        value.

        Raises `InvalidConfigError` for another key, or for wrong sizes.
        """
        super().__init__(vllm_config)
        given_config = vllm_config.additional_config
        own = given_config.get("specrs", {}) if isinstance(given_config, Mapping) else {}
        for key in own:
            if key not in _NGRAM_KEYS:
                raise unknown_key(InvalidConfigError, "additional_config['specrs']", key, _NGRAM_KEYS)
        least, most = (own.get(key) for key in _NGRAM_KEYS)
        given = least if most is None else most
        default = _DEFAULT_PROMPT_LOOKUP if given is None else given
        self._ngrams = core.NgramProposer(default if least is None else least, default if most is None else most)

    def draft(self, text: _Text, most: int) -> list[int]:
        """Return at most `most` > 0 tokens that followed the text's last n-gram earlier in it."""
        return list(self._ngrams.propose(text.tokens, most).tolist())


class SuffixProposer(_Proposer):
    """Proposer of the tokens that followed the end of the text most often, in it and in other requests' outputs (suffix
    decoding)."""

    def __init__(self, vllm_config: Any) -> None:
        """Read `suffix_decoding_max_tree_depth`, `suffix_decoding_max_cached_requests`,
        `suffix_decoding_max_spec_factor` and `suffix_decoding_min_token_prob`."""
        super().__init__(vllm_config)
        self.reset()

    def reset(self) -> None:
        """Forget all texts, also those of ended requests."""
        super().reset()
        self._cache = core.SuffixCache(
            max_tree_depth=self.config.suffix_decoding_max_tree_depth,
            max_cached_requests=self.config.suffix_decoding_max_cached_requests,
            max_spec_factor=self.config.suffix_decoding_max_spec_factor,
            min_token_prob=self.config.suffix_decoding_min_token_prob,
        )

    def draft(self, text: _Text, most: int) -> list[int]:
        """Return at most `most` > 0 tokens that the suffix tree proposes."""
        return self.scored(text, most)[0]

    def scored(self, text: _Text, most: int) -> tuple[list[int], float]:
        """Return drafts, and the number of them that is expected to be accepted, by the counts."""
        tokens, score, _ = self._cache.propose(text.request_id, most)
        return tokens.tolist(), float(score)

    def started(self, text: _Text) -> None:
        """Add a request with its prompt to the suffix cache."""
        self._cache.start_request(text.request_id, text.tokens)

    def appended(self, text: _Text, tokens: np.ndarray) -> None:
        """Append new tokens of a request to the suffix cache."""
        self._cache.append(text.request_id, tokens)

    def ended(self, text: _Text) -> None:
        """End a request in the suffix cache, which may keep its output for others."""
        self._cache.stop_request(text.request_id)


class _Statistics:
    """Decaying counts of accepted and expected drafts of one method. Both methods are judged on every text, even if the
    other one drafted, because each proposal can be compared with the tokens that were generated."""

    def __init__(self) -> None:
        self.stood, self.expected = 1.0, 1.0

    def record(self, expected: float, stood: int) -> None:
        self.stood = _DECAY * self.stood + stood
        self.expected = _DECAY * self.expected + expected

    @property
    def ratio(self) -> float:
        return self.stood / max(self.expected, 1e-9)


class BestProposer(SuffixProposer):
    """Proposer of n-gram or suffix drafts. For each request and step, it uses the method of which more draft tokens are
    expected to be accepted."""

    def __init__(self, vllm_config: Any) -> None:
        """Read the settings of `NgramProposer` and `SuffixProposer`."""
        super().__init__(vllm_config)
        self._ngram = NgramProposer(vllm_config)
        self._statistics = {"ngram": _Statistics(), "suffix": _Statistics()}

    def reset(self) -> None:
        """Forget all texts and what was proposed for them."""
        super().reset()
        self._proposed: dict[int, dict[str, tuple[list[int], float]]] = {}

    def draft(self, text: _Text, most: int) -> list[int]:
        """Return at most `most` > 0 drafts of the better method, and remember both proposals for `appended`."""
        tokens = self._ngram.draft(text, most)
        proposed = {"suffix": self.scored(text, most), "ngram": (tokens, float(len(tokens)))}
        self._proposed[text.request_id] = proposed
        best = max(proposed, key=lambda way: proposed[way][1] * self._statistics[way].ratio)
        return proposed[best][0]

    def appended(self, text: _Text, tokens: np.ndarray) -> None:
        """Compare both methods' last proposals with the new tokens, then add the tokens to the suffix cache."""
        for way, (drafts, expected) in self._proposed.pop(text.request_id, {}).items():
            if drafts:
                pairs = zip(drafts, tokens.tolist(), strict=False)
                stood = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                self._statistics[way].record(expected, stood)
        super().appended(text, tokens)

    def ended(self, text: _Text) -> None:
        """Forget the request's proposals and end it in the suffix cache."""
        self._proposed.pop(text.request_id, None)
        super().ended(text)


def register() -> None:
    """Let vLLM's method "suffix" use specrs: its import of `arctic_inference.suffix_decoding` finds
    `SuffixDecodingCache` here, unless that package is installed. May be called more than once."""
    name = "arctic_inference"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    package, module = ModuleType(name), ModuleType(f"{name}.suffix_decoding")
    for made in (package, module):
        made.__spec__ = ModuleSpec(made.__name__, None, is_package=made is package)
        made.__doc__ = "specrs.integrations.suffix_decoding, under the name that vLLM imports."
    package.__path__ = []
    module.SuffixDecodingCache = SuffixDecodingCache  # type: ignore[attr-defined]
    module.SuffixDecodingDraft = SuffixDecodingDraft  # type: ignore[attr-defined]
    package.suffix_decoding = module  # type: ignore[attr-defined]
    sys.modules[name], sys.modules[module.__name__] = package, module

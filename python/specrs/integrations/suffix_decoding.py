"""`SuffixDecodingCache` with the API that vLLM's method "suffix" imports from `arctic_inference.suffix_decoding`.

`specrs.core.SuffixCache` does the work. Tree drafts, `max_spec_offset`, and a context that is not the end of the
request's own text are not supported and rejected.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specrs.core import SuffixCache
from specrs.errors import UnsupportedConfigError, invalid

_UNLIMITED = 2**31 - 1


@dataclass
class SuffixDecodingDraft:
    """A chain of draft tokens: `parents[i]` is i - 1. `score` is the sum of their probabilities; every entry of `probs`
    is the mean."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    match_len: int = 0


@dataclass
class _Active:
    handle: int
    prompt: np.ndarray
    output: list[int]


class SuffixDecodingCache:
    """Suffix trees of running requests, and one over all outputs. Request ids may be any hashable values. Calls mutate
    it.

    `max_cached_requests`: number of ended requests whose outputs are kept; -1 for any number, 0 for none.
    """

    def __init__(self, max_tree_depth: int = 64, max_cached_requests: int = -1) -> None:
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self._cache: SuffixCache | None = None
        self._settings: tuple[float, float] | None = None
        self._handles = itertools.count()
        self._active: dict[Hashable, _Active] = {}
        self._cached: dict[Hashable, tuple[int, list[int]]] = {}  # the oldest first

    @property
    def active_requests(self) -> KeysView[Hashable]:
        """Ids of the running requests."""
        return self._active.keys()

    @property
    def cached_requests(self) -> KeysView[Hashable]:
        """Ids of requests whose output is kept. Running requests are among them, unless no outputs are kept."""
        self._forget_evicted()
        return (dict.fromkeys(self._cached) | (dict.fromkeys(self._active) if self.max_cached_requests else {})).keys()

    def start_request(self, req_id: Hashable, prompt_token_ids: Sequence[int] | np.ndarray) -> None:
        """Add a request with its prompt. Raises ValueError if it is already running, or if its output is kept."""
        if req_id in self._active or req_id in self.cached_requests:
            raise ValueError(f"req_id={req_id!r}: is running or cached; stop and evict it first")
        request = _Active(next(self._handles), _tokens(prompt_token_ids), [])
        if self._cache is not None:
            self._cache.start_request(request.handle, request.prompt)
        self._active[req_id] = request

    def add_active_response(self, req_id: Hashable, token_ids: int | Sequence[int] | np.ndarray) -> None:
        """Append output tokens to a running request. Raises ValueError if it is not running."""
        request, added = self._running(req_id), _tokens(token_ids)
        if self._cache is not None:
            self._cache.append(request.handle, added)
        request.output.extend(added.tolist())

    def stop_request(self, req_id: Hashable) -> None:
        """End a running request; its output is kept for others. Raises ValueError if it is not running."""
        request = self._running(req_id)
        if self._cache is not None:
            self._cache.stop_request(request.handle)
        del self._active[req_id]
        if self.max_cached_requests and request.output:
            self._cached[req_id] = (request.handle, request.output)
        self._forget_evicted()

    def evict_cached_response(self, req_id: Hashable) -> None:
        """Forget the output of an ended request. Raises ValueError if it is not kept."""
        self._forget_evicted()
        if req_id not in self._cached:
            raise ValueError(f"req_id={req_id!r}: is not cached, or still running")
        handle, _ = self._cached.pop(req_id)
        if self._cache is not None:
            self._cache.evict(handle)

    def speculate(
        self,
        req_id: Hashable,
        context: Sequence[int] | np.ndarray,
        max_spec_tokens: int | None = None,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        use_tree_spec: bool = False,
    ) -> SuffixDecodingDraft:
        """Return the draft with the highest score for a running request whose text ends with `context`.

        `max_spec_tokens`: maximum number of tokens; None for the depth of the trees. `max_spec_factor` and
        `min_token_prob` are fixed by the first call.

        Raises:
            ValueError: the request is not running, or its text does not end with `context`.
            UnsupportedConfigError: an argument is not implemented, or differs from the first call's.
        """
        request = self._running(req_id)
        for name, value, only in (("max_spec_offset", max_spec_offset, 0), ("use_tree_spec", use_tree_spec, False)):
            if value != only:
                raise invalid(UnsupportedConfigError, name, value, f"not implemented; allowed: {only}")
        cache = self._with_settings(float(max_spec_factor), float(min_token_prob))
        given = _tokens(context)
        start = max(0, len(given) - len(request.output))
        missing = len(request.prompt) - start
        known = np.concatenate(
            (request.prompt[max(missing, 0) :], _tokens(request.output[max(0, len(request.output) - len(given)) :]))
        )
        if missing < 0 or not np.array_equal(given, known[len(known) - len(given) :]):
            raise ValueError(f"context: is not the end of the text of req_id={req_id!r}")
        most = self.max_tree_depth if max_spec_tokens is None else max(0, int(max_spec_tokens))
        drafts, score, match_len = cache.propose(request.handle, most)
        count = len(drafts)
        return SuffixDecodingDraft(
            token_ids=drafts.tolist(),
            parents=list(range(-1, count - 1)),
            probs=[score / count] * count if count else [],
            score=float(score),
            match_len=int(match_len),
        )

    def _running(self, req_id: Hashable) -> _Active:
        request = self._active.get(req_id)
        if request is None:
            raise ValueError(f"req_id={req_id!r}: is not running")
        return request

    def _with_settings(self, factor: float, least: float) -> SuffixCache:
        """Return the core's cache with these settings. The first call creates it, and adds what was added before."""
        if self._settings is None:
            most = self.max_cached_requests if self.max_cached_requests >= 0 else _UNLIMITED
            self._cache = SuffixCache(
                max_tree_depth=self.max_tree_depth,
                max_cached_requests=most,
                max_spec_factor=factor,
                min_token_prob=least,
            )
            self._settings = (factor, least)
            for handle, output in self._cached.values():
                self._cache.start_request(handle, _tokens([]))
                self._cache.append(handle, _tokens(output))
                self._cache.stop_request(handle)
            for request in self._active.values():
                self._cache.start_request(request.handle, request.prompt)
                self._cache.append(request.handle, _tokens(request.output))
        names = ("max_spec_factor", "min_token_prob")
        for name, value, first in zip(names, (factor, least), self._settings, strict=True):
            if value != first:
                raise invalid(UnsupportedConfigError, name, value, f"changes are not implemented; allowed: {first}")
        assert self._cache is not None
        return self._cache

    def _forget_evicted(self) -> None:
        """Forget the requests whose outputs the core has evicted."""
        kept = len(self._cached)
        if self._cache is not None:
            kept = self._cache.stats()["num_cached_requests"]
        elif self.max_cached_requests >= 0:
            kept = min(kept, self.max_cached_requests)
        for req_id in list(self._cached)[: len(self._cached) - kept]:
            del self._cached[req_id]


def _tokens(token_ids: Any) -> np.ndarray:
    return np.ascontiguousarray(token_ids, dtype=np.int64).reshape(-1)

"""Compiles grammars within a time limit, off the caller's thread: tried in a worker process, then built here.

One `Compiler` per tokenizer and vocabulary size, kept as long as the tokenizer. Follows no request.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from specrs.errors import EngineError
from specrs.processes.child import Child
from specrs.structured import worker
from specrs.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    import tokenizers

    from specrs.tokenizer import Tokenizer

logger = logging.getLogger("specrs")

COMPILE_TIMEOUT = 5.0
"""Seconds a grammar may take to compile."""
MEMORY_LIMIT = 4 * 2**30
"""Bytes of address space of a worker; its libraries and the tokenizer take a quarter at most."""
START_TIMEOUT = 60.0
"""Seconds a worker may take to start: it reads the tokenizer, of 150,000 tokens in about a second."""
MAX_WORKERS = 2
"""Grammars compiled at a time. A hostile one keeps one worker busy until the time is up."""
CACHE_SIZE = 128
"""Compiled grammars kept, the least recently used leave first."""
MAX_LOGGED = 1000
"""Different warnings that a compiler logs, each once."""

_END = "<|specrs: the grammar is complete|>"


class Start:
    """A grammar before its first token."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        """`grammar`: the worker's answer."""
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._matcher = worker.make_matcher(tokenizer, grammar)
        self.error = self._matcher.get_error() if self._matcher.is_error() else None

    def copy(self) -> LLMatcher:
        """A matcher of its own. Its automata are those of all copies, so that each state is computed once."""
        return self._matcher.deep_copy()

    def renew(self) -> LLMatcher:
        """A copy whose automata start anew: they only grow, for all copies together, up to the library's limits."""
        self._matcher = worker.make_matcher(self._tokenizer, self._grammar)
        return self.copy()


class Compiler:
    """Turns parameters into grammars for one tokenizer. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: tokens of the model, at or above the tokenizer's number; the rest is padding."""
        self._backend = backend
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # of cache and idle workers; never held for long, callers wait for it
        self._setup_lock = threading.Lock()
        self._setup_message = b""
        self._tokenizer: LLTokenizer | None = None
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._closed = False
        self._logged: set[str] = set()
        self._cache: OrderedDict[str, Start] = OrderedDict()
        self._pool = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="specrs-grammar")
        self.end_token_id = -1

    def submit(self, params: StructuredOutputsParams) -> Future[Start]:
        """The compiled grammar, which is shared.

        The future raises `InvalidRequestError` for what is wrong with `params`, `EngineError` if no worker starts.
        """
        key = params.specification()
        with self._lock:
            start = self._cache.get(key)
            if start is not None:
                self._cache.move_to_end(key)
        if start is not None:
            done: Future[Start] = Future()
            done.set_result(start)
            return done
        return self._pool.submit(self._compile, params, key)

    def close(self) -> None:
        """End the worker processes; what is still being compiled fails."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()  # its own thread closes it
        for process in idle:
            process.close()

    def _compile(self, params: StructuredOutputsParams, key: str) -> Start:
        tokenizer, setup = self._setup()
        process = self._take(setup)
        answer = None
        try:
            answer = process.ask(key.encode(), COMPILE_TIMEOUT)
        finally:
            self._give_back(process, keep=answer is not None)
        if answer is None:
            if self._closed:
                raise EngineError("structured_outputs: the tokenizer is gone, and its compiler with it")
            time, memory = f"{COMPILE_TIMEOUT:g} s", f"{MEMORY_LIMIT / 2**30:g} GiB"
            why = f"takes more than {time if process.timed_out else memory} to compile"
            raise params.refusal(f"{why}; allowed is a simpler one")
        if "error" in answer:
            raise params.refusal(f"cannot be compiled: {answer['error']}", answer.get("field"))
        start = Start(tokenizer, answer["grammar"])
        if start.error is not None:
            raise params.refusal(f"cannot be compiled: {worker.reason(start.error)}")
        for field, keywords in answer.get("ignored", ()):
            text = f"{field}: the grammar does not enforce {', '.join(keywords)}"
            if text not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(text)
                logger.warning("%s", text)
        with self._lock:
            self._cache[key] = start
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return start

    def _take(self, setup: bytes) -> Child:
        """An idle worker that still runs, or a new one."""
        process = None
        with self._lock:
            while self._idle and process is None:
                process = self._idle.pop()
                if not process.alive:
                    process.close()
                    process = None
        if process is None:
            process = Child(
                worker.__file__, setup, purpose="structured_outputs: compiling", start_timeout=START_TIMEOUT
            )
        with self._lock:
            self._busy.add(process)
            if self._closed:
                process.kill()
        return process

    def _give_back(self, process: Child, *, keep: bool) -> None:
        """Keep a worker for the next grammar, or end it."""
        with self._lock:
            self._busy.discard(process)
            keep = keep and not self._closed
            if keep:
                self._idle.append(process)
        if not keep:
            process.close()

    def _setup(self) -> tuple[LLTokenizer, bytes]:
        """The library's tokenizer, and the first message of a worker; made once."""
        with self._setup_lock:
            if self._tokenizer is None:
                text, self.end_token_id = _with_end_token(self._backend)
                size = max(self._vocab_size, self.end_token_id + 1)
                setup = {"tokenizer": text, "vocab_size": size, "end": self.end_token_id, "memory": MEMORY_LIMIT}
                self._setup_message = json.dumps(setup | {"seconds": 2 * COMPILE_TIMEOUT}).encode()
                self._tokenizer = LLTokenizer(text, n_vocab=size, eos_token=[self.end_token_id])
            return self._tokenizer, self._setup_message


def _with_end_token(backend: tokenizers.Tokenizer) -> tuple[str, int]:
    """The tokenizer as JSON with one more token, and its id.

    The library wants one end token, and allows it where the text is complete. It gets one of its own: so a mask holds
    what the grammar allows, and what ends a request stays the request's to say.
    """
    import tokenizers

    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.add_special_tokens([tokenizers.AddedToken(_END, special=True, normalized=False)])
    end_token_id = copy.token_to_id(_END)
    assert end_token_id is not None
    return copy.to_str(), end_token_id


_COMPILERS: weakref.WeakKeyDictionary[Tokenizer, dict[int, Compiler]] = weakref.WeakKeyDictionary()
_COMPILERS_LOCK = threading.Lock()


def compiler_of(tokenizer: Tokenizer, vocab_size: int) -> Compiler:
    """The compiler of a tokenizer, made once; it ends with the tokenizer."""
    with _COMPILERS_LOCK:
        sizes = _COMPILERS.setdefault(tokenizer, {})
        if vocab_size not in sizes:
            sizes[vocab_size] = Compiler(tokenizer.backend, vocab_size)
            weakref.finalize(tokenizer, sizes[vocab_size].close)
        return sizes[vocab_size]

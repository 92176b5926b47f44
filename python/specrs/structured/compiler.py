"""Compiles grammars within a time limit, without blocking the caller: first as a trial in a worker process, then in
this process.

There is one `Compiler` per tokenizer and vocabulary size, kept as long as the tokenizer. Follows no request.
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
from specrs.structured.layout import Layout
from specrs.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    import tokenizers

    from specrs.tokenizer import Tokenizer

logger = logging.getLogger("specrs")

COMPILE_TIMEOUT = 5.0
"""Maximum seconds for compiling a grammar."""
MEMORY_LIMIT = 4 * 2**30
"""Maximum bytes of address space of a worker. Its libraries and the tokenizer take at most a quarter of it."""
START_TIMEOUT = 60.0
"""Maximum seconds for starting a worker. It reads the tokenizer, which takes about a second for 150,000 tokens."""
MAX_WORKERS = 2
"""Maximum number of grammars that are compiled at a time. A hostile one occupies one worker until its time is up."""
CACHE_SIZE = 128
"""Maximum number of compiled grammars that are kept. The least recently used are dropped first."""
MAX_LOGGED = 1000
"""Maximum number of different warnings that a compiler logs, each once."""

_END = "<|specrs: the grammar is complete|>"


class Start:
    """A compiled grammar before its first token."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        """Build the grammar from the worker's answer, `grammar`."""
        self.layout = Layout(lambda token: tokenizer.decode_bytes([token]))
        """White space and punctuation of earlier outputs with this grammar, shared by all requests that have the
        grammar."""
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._matcher = worker.make_matcher(tokenizer, grammar)
        self.error = self._matcher.get_error() if self._matcher.is_error() else None

    def copy(self) -> LLMatcher:
        """Return a new matcher. It shares its automata with all copies, so each state is computed only once."""
        return self._matcher.deep_copy()

    def renew(self) -> LLMatcher:
        """Return a matcher with new, empty automata, which copies that are made later share. Shared automata only grow,
        for all copies together, up to the library's limits."""
        self._matcher = worker.make_matcher(self._tokenizer, self._grammar)
        return self.copy()


class Compiler:
    """Compiler of grammars for one tokenizer. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
        """Prepare to compile. `vocab_size`: number of the model's token ids, at least the tokenizer's; ids past the
        tokenizer's are padding."""
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
        """Start to compile a grammar, or find it in the cache. The result may be shared by requests.

        The future raises `InvalidRequestError` if `params` are wrong, `EngineError` if no worker starts.
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
        """End the worker processes. Grammars that are still being compiled fail."""
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
            raise params.refusal(f"{why}; use a simpler one")
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
        """Return an idle worker that still runs, or a new one."""
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
        """Return the library's tokenizer, and the first message to a worker. Both are made once."""
        with self._setup_lock:
            if self._tokenizer is None:
                text, self.end_token_id = _with_end_token(self._backend)
                size = max(self._vocab_size, self.end_token_id + 1)
                setup = {"tokenizer": text, "vocab_size": size, "end": self.end_token_id, "memory": MEMORY_LIMIT}
                self._setup_message = json.dumps(setup | {"seconds": 2 * COMPILE_TIMEOUT}).encode()
                self._tokenizer = LLTokenizer(text, n_vocab=size, eos_token=[self.end_token_id])
            return self._tokenizer, self._setup_message


def _with_end_token(backend: tokenizers.Tokenizer) -> tuple[str, int]:
    """Return the tokenizer as JSON with one more token, and that token's id.

    The library wants one end token, and allows it when the text is complete. It gets a token of its own. A mask thus
    shows what the grammar allows, and the request's own stop ids decide how it ends.
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
    """Return the compiler of a tokenizer and vocabulary size. It is made once and ends with the tokenizer."""
    with _COMPILERS_LOCK:
        sizes = _COMPILERS.setdefault(tokenizer, {})
        if vocab_size not in sizes:
            sizes[vocab_size] = Compiler(tokenizer.backend, vocab_size)
            weakref.finalize(tokenizer, sizes[vocab_size].close)
        return sizes[vocab_size]

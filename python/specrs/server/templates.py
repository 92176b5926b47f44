"""Renders chat templates in child processes with a time limit. A template is a program, and a thread that runs one
cannot be stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from specrs.chat_template import Rendered
from specrs.errors import InvalidRequestError
from specrs.processes.child import Child
from specrs.server import template_worker
from specrs.tokenizer import Tokenizer

RENDER_TIMEOUT = 5.0
"""Maximum seconds for rendering one chat."""
START_TIMEOUT = 60.0
"""Maximum seconds for starting a worker process."""
MEMORY_LIMIT = 2 * 2**30
"""Maximum bytes of address space of a worker process."""
MAX_WORKERS = 2


class TemplateRenderer:
    """Renderer of chats in worker processes. Gives the result of `Tokenizer.render_chat`."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None) -> None:
        """Start the first worker. `chat_template` replaces the checkpoint's; None: the checkpoint's."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._threads = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="specrs-template")
        self._idle: SimpleQueue[Child] = SimpleQueue()
        self._all: set[Child] = set()
        self._closed = False
        self._threads.submit(lambda: self._keep(self._start()))

    async def render(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> Rendered:
        """Return the text of the prompt for `messages`. `options` are those of `Tokenizer.chat_arguments`.

        Raises `InvalidRequestError` if the template rejects the chat or takes too long.
        """

        def render() -> Rendered:
            arguments = self._tokenizer.chat_arguments(messages, chat_template=self._chat_template, **options)
            return self._render(json.dumps(arguments).encode())

        return await asyncio.get_running_loop().run_in_executor(self._threads, render)

    def close(self) -> None:
        """End the worker processes."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in [*self._all]:
            child.kill()
        self._take_idle()

    def _render(self, message: bytes) -> Rendered:
        child = self._take_idle() or self._start()
        answer = child.ask(message, RENDER_TIMEOUT)
        if answer is None:
            self._end(child)
            why = f"took more than {RENDER_TIMEOUT:g} s" if child.timed_out else "took too much memory"
            raise InvalidRequestError(f"messages: the chat template {why}")
        self._keep(child)
        if "error" in answer:
            raise InvalidRequestError(answer["error"])
        return Rendered(answer["text"], tuple(answer["warnings"]))

    def _keep(self, child: Child) -> None:
        self._idle.put(child)
        if self._closed:
            self._take_idle()

    def _take_idle(self) -> Child | None:
        """Return an idle worker that runs, or None. Ends idle workers that have died, and all of them once the renderer
        is closed."""
        while True:
            try:
                child = self._idle.get_nowait()
            except Empty:
                return None
            if child.alive and not self._closed:
                return child
            self._end(child)

    def _start(self) -> Child:
        setup = json.dumps({"memory": MEMORY_LIMIT, "seconds": 2 * RENDER_TIMEOUT}).encode()
        child = Child(template_worker.__file__, setup, purpose="chat template", start_timeout=START_TIMEOUT)
        self._all.add(child)
        if self._closed:
            child.kill()
        return child

    def _end(self, child: Child) -> None:
        self._all.discard(child)
        child.close()

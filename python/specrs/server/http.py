"""uvicorn's h11 protocol with deadlines. No client can hold a connection by sending or reading nothing, or very slowly.

httptools is not used because it accepts headers of any length. Errors that occur before a request reaches the
application are JSON, too.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from specrs.server.errors import APIError, unavailable
from specrs.server.limits import HTTPLimits

logger = logging.getLogger("specrs")


class DeadlineProtocol(H11Protocol):
    """One HTTP connection with deadlines.

    A request's header must be complete `header_timeout` seconds after the connection was made, or after its first byte
    on a connection that is kept. Its body must be complete `body_timeout` seconds after the header. The application
    answers a late body itself; if it does not, this class closes the connection. A client that leaves the send buffer
    full for `write_timeout` seconds is cut off, and so is one that does not read the rest of its answer.
    """

    limits = HTTPLimits()

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._read_deadline: asyncio.TimerHandle | None = None
        self._read_state: Any = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._close_deadline: asyncio.TimerHandle | None = None
        self._silent_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._silent_since = self.loop.time()
        if len(self.connections) > self.limits.max_connections:
            # one that has said nothing makes place for one that may
            silent = [one for one in self.connections if isinstance(one, DeadlineProtocol) and one.is_silent]
            longest = min(silent, key=lambda one: one._silent_since or 0.0)
            longest._refuse(unavailable(f"More than {self.limits.max_connections} connections."))
            if longest is self:
                return
        self._expect(h11.IDLE)

    @property
    def is_silent(self) -> bool:
        """True if the client has sent nothing yet, or nothing since its last answer."""
        return self._silent_since is not None and not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadlines()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._silent_since = None
        if self._read_deadline is None and self.conn.their_state is h11.IDLE:
            self._expect(h11.IDLE)  # the first bytes of another request
        if self.conn.their_state is h11.IDLE and data.startswith(b"PRI * HTTP/2"):
            # h11 would take it for a request; routers that look for gRPC wait for what says that there is none
            self._refuse(APIError(400, "HTTP/2 is not spoken here."))
            return
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._silent_since = self.loop.time()
        self._follow()
        if self.transport.is_closing():
            self._abort_later()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self.limits.write_timeout, self._slow_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def shutdown(self) -> None:
        super().shutdown()
        self._abort_later()

    def send_400_response(self, msg: str) -> None:
        fault = sys.exc_info()[1]
        status = fault.error_status_hint if isinstance(fault, h11.RemoteProtocolError) else 400
        if status == 431:
            self._refuse(APIError(431, f"The header is longer than {self.limits.max_header_size} bytes."))
        else:
            self._refuse(APIError(400, "This is no HTTP/1.1 request."))

    def _follow(self) -> None:
        """Set the deadline for what is awaited from the client now. While the client waits for its answer there is
        none."""
        state = self.conn.their_state
        if state is not self._read_state:
            self._cancel_read_deadline()
            if state is h11.SEND_BODY:
                self._expect(h11.SEND_BODY)

    def _expect(self, state: Any) -> None:
        self._cancel_read_deadline()
        self._read_state = state
        # after the application's own deadline for the body
        seconds = self.limits.header_timeout if state is h11.IDLE else self.limits.body_timeout + 1.0
        self._read_deadline = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        self._read_deadline = None
        if self._read_state is h11.IDLE:
            self._refuse(APIError(408, f"The header took more than {self.limits.header_timeout:g} s."))
        else:
            self.transport.abort()

    def _slow_reader(self) -> None:
        logger.warning("a client took nothing for %g s; its connection is cut off", self.limits.write_timeout)
        self.transport.abort()

    def _refuse(self, error: APIError) -> None:
        """Answer with `error` without calling the application, and close the connection."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = {"content-type": "application/json", "content-length": str(len(error.encoded))}
            response = h11.Response(
                status_code=int(error.status),
                headers=[*headers.items(), *error.headers.items(), ("connection", "close")],
                reason=error.status.phrase.encode(),
            )
            for event in (response, h11.Data(data=error.encoded), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        """Abort the connection if closing takes too long. Closing waits until everything is sent, which a slow client
        can delay."""
        if self._close_deadline is None and self.transport.is_closing():
            self._close_deadline = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def _cancel_read_deadline(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None
        self._read_state = None

    def _cancel_deadlines(self) -> None:
        self._cancel_read_deadline()
        for deadline in (self._write_deadline, self._close_deadline):
            if deadline is not None:
                deadline.cancel()
        self._write_deadline = self._close_deadline = None

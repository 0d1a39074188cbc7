"""`Connection`: one connection of a client, with limits of time, size and number.

In: bytes of a socket. Out: requests for the application. A head that is invalid is refused (400) or too long (431), and
one connection too many (503). One whose request arrives too slowly, or whose answer is not read, is cut: its request
then ends as if the client had left. Writing pauses as soon as the socket is full, so an unread answer takes no more
memory than its tokens.
"""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ktc.inference.serving.refusals import RequestRefused, error_object

LONGEST_HEAD: Final = 32768  # bytes
HEAD_SECONDS: Final = 10.0  # from the first byte of a request to the end of its head
REQUEST_SECONDS: Final = 60.0  # from there to the end of its body
STALLED_SECONDS: Final = 60.0  # in which a client reads nothing of what waits for it
_MOST: Final = 1024


def most_connections() -> int:
    """Return the number of connections that the limit of open files leaves room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // 2)


class Connection(H11Protocol):
    """The protocol of uvicorn with limits."""

    _until: asyncio.TimerHandle | None = None  # when a request must have come
    _in_body = False
    _stalled: asyncio.TimerHandle | None = None
    _unsent = 0  # bytes that waited when it was looked at last

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or refuse one connection too many."""
        super().connection_made(cast("Any", transport))
        self.transport.set_write_buffer_limits(high=0)  # `pause_writing` for any byte that the socket does not take
        if len(self.connections) > most_connections():
            self._refuse(RequestRefused(503, "too many connections", "too_many_connections"))
            return
        self._expect(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, and watch the time that a request takes."""
        super().data_received(data)
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            if self._until is None or self._in_body:
                self._expect(HEAD_SECONDS)
            self._in_body = False
        elif theirs is h11.SEND_BODY:
            if not self._in_body:
                self._expect(REQUEST_SECONDS)
            self._in_body = True
        else:
            self._expect(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the timers."""
        self._expect(None)
        self._watch_reader(None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Watch whether the client reads on."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._watch_reader(STALLED_SECONDS)

    def resume_writing(self) -> None:
        """Stop watching: everything is sent."""
        self._watch_reader(None)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP; where an answer is under way, cut the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
        elif len(self.conn.trailing_data[0]) > LONGEST_HEAD:
            self._refuse(too_long())
        else:
            self._refuse(RequestRefused(400, "this is not a request of HTTP/1.1"))

    def cut(self) -> None:
        """End the connection, if it does not wait for another request."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self.transport.abort()

    def _refuse(self, refused: RequestRefused) -> None:
        body = json.dumps(error_object(refused)).encode()
        headers = [("content-type", "application/json"), ("connection", "close"), ("content-length", str(len(body)))]
        events = (
            h11.Response(status_code=refused.status_code, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    def _expect(self, seconds: float | None) -> None:
        if self._until is not None:
            self._until.cancel()
        self._until = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _watch_reader(self, seconds: float | None) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        self._stalled = None if seconds is None else self.loop.call_later(seconds, self._look_at_reader)

    def _look_at_reader(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent >= self._unsent:
            self.transport.abort()
            return
        self._unsent = unsent
        self._watch_reader(STALLED_SECONDS)


def too_long() -> RequestRefused:
    """Return the refusal of a head with more than `LONGEST_HEAD` bytes."""
    return RequestRefused(431, f"the head of a request has at most {LONGEST_HEAD} bytes")

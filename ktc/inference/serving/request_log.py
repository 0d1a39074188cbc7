"""One line for each request that a server answered or refused. It has counts and times, never a text of a client.

In: the head of a request, then what its answer becomes. Out: a line for a function, when the answer has ended.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

UNLOGGED: Final = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds
_LONGEST: Final = 120  # characters of a path, which the client chose
CHOICE: Final = "/"  # before the number of one of several answers; not a character of an id


@dataclass(slots=True)
class LoggedRequest:
    """One request under way. `status` 0: its client left before the answer began."""

    id: str
    method: str
    path: str
    client: str
    begun: float = field(default_factory=time.perf_counter)
    status: int = 0
    refused: str = ""
    model: str = ""
    prompt_tokens: int = 0
    new_tokens: int = 0
    first: float | None = None
    finishes: list[str] = field(default_factory=list[str])

    def add(self, new_tokens: int, finish: str = "") -> None:
        """Count tokens of an answer, and how it ended."""
        if new_tokens and self.first is None:
            self.first = time.perf_counter() - self.begun
        self.new_tokens += new_tokens
        if finish:
            self.finishes.append(finish)

    def line(self) -> str:
        """Return the line."""
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        words = [at, self.client, self.method, _printable(self.path), str(self.status or "left")]
        if self.model:
            how = ", ".join(dict.fromkeys(self.finishes)) or "no end"
            words.append(f"{self.model}: {self.prompt_tokens} tokens read, {self.new_tokens} written ({how})")
        if self.refused:
            words.append(self.refused)
        times = "" if self.first is None else f"first after {self.first:.2f} s, "
        return " ".join(words) + f", {times}all in {time.perf_counter() - self.begun:.2f} s"


class RequestLog:
    """The requests under way by their ids. All calls are on the event loop."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write
        self._requests: dict[str, LoggedRequest] = {}

    def begin(self, method: str, path: str, client: str, wanted_id: str = "") -> LoggedRequest:
        """Return a new request. Its id is its client's, unless another request has it now."""
        name = wanted_id if wanted_id and wanted_id not in self._requests else str(uuid.uuid4())
        self._requests[name] = request = LoggedRequest(name, method, path, client)
        return request

    def of(self, request_id: str) -> LoggedRequest | None:
        """Return the request with an id, also with the id of one of its answers; None for an unknown one."""
        return self._requests.get(request_id.partition(CHOICE)[0])

    def end(self, request: LoggedRequest) -> None:
        """Write the line of a request."""
        self._requests.pop(request.id, None)
        if self._write is not None and request.path not in UNLOGGED:
            self._write(request.line())


def _printable(path: str) -> str:
    shown = path[:_LONGEST].encode("unicode_escape").decode("ascii")
    return shown if len(path) <= _LONGEST else f"{shown}..."

"""The rows of `tests/inference/serving/attacks` as bytes for a socket, and the answers of a server to them.

In: rows of TOML. Out: an `Attack` for each value, body and request, with the expected status and code; an `Answer`.
"""

from __future__ import annotations

import json
import re
import socket
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from places import TESTS

FOLDER: Final = TESTS / "inference" / "serving" / "attacks"
_REPEATED: Final = re.compile(r"\{\{(.*?)\*(\d+)\}\}", re.DOTALL)
_GOOD: Final[Mapping[str, dict[str, Any]]] = {
    "completions": {"prompt": "Rain", "max_tokens": 1},
    "chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    "responses": {"input": "Hello", "max_output_tokens": 1},
}


@dataclass(frozen=True, slots=True)
class Attack:
    """One request. `code` "" stands for any; `answers` 0 for any number of responses."""

    name: str
    sent: bytes
    status: int
    code: str = ""
    answers: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The first response on a connection: `status` 0 without one, and the bytes of all of them."""

    status: int
    head: str
    body: bytes
    whole: bytes

    @property
    def error(self) -> Mapping[str, Any]:
        """The `error` object of OpenAI's API, {} without one."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        error = found.get("error") if isinstance(found, dict) else None
        return error if isinstance(error, dict) else {}


def attacks() -> Iterator[Attack]:
    """All rows."""
    for row in _rows("fields"):
        for value in row["values"]:
            good = {name: json.dumps(fit) for name, fit in _GOOD[row["path"]].items() if name != row["field"]}
            if row["field"] == "max_completion_tokens":
                del good["max_tokens"]
            fields = [f'"{name}": {fit}' for name, fit in good.items()]
            body = _bytes("{" + ", ".join([*fields, f'"{row["field"]}": {value}']) + "}")
            yield _posted(f"{row['path']} {row['field'][:20]} {value[:60]}", row, body)
    for row in _rows("bodies"):
        for text in row["bodies"]:
            yield _posted(f"{row['path']} body {text[:60]!r}", row, _bytes(text))
    for row in _rows("heads"):
        for number, text in enumerate(row["requests"]):
            sent = _bytes(text.replace("|", "\r\n"))
            yield Attack(f"{row['name']} {number}", sent, row["status"], row.get("code", ""), row.get("answers", 0))


def _posted(name: str, row: Mapping[str, Any], body: bytes) -> Attack:
    return Attack(name, post(row["path"], body), row["status"], row.get("code", ""))


def post(path: str, body: bytes) -> bytes:
    """A whole request that posts JSON to a path below /v1, on a connection of its own."""
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def answer(port: int, sent: bytes, seconds: float = 20.0) -> Answer:
    """Send bytes over a connection, end its sending side where it can be, and read what comes back."""
    with socket.create_connection(("127.0.0.1", port), seconds) as connection:
        with suppress(OSError):  # refused while it was sent
            connection.sendall(sent)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> Answer:
    """Read a response, and what comes until the connection ends where its length is not said."""
    whole = b""
    try:
        while not _is_complete(whole) and (part := connection.recv(65536)):
            whole += part
    except OSError:
        pass
    head, _, body = whole.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return Answer(status, head.decode("latin-1").lower(), body, whole)


def _is_complete(whole: bytes) -> bool:
    head, ended, body = whole.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return bool(ended and length) and len(body) >= int(length[1])


def _rows(name: str) -> list[dict[str, Any]]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))["attack"]


def _bytes(text: str) -> bytes:
    return _REPEATED.sub(lambda found: found[1] * int(found[2]), text).encode("latin-1")

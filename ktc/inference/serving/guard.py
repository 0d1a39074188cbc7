"""`Guard`: the outermost middleware, which lets only whole and well-formed requests through to the handlers.

In: an ASGI request and its `Gate`. Out: the same request with its body read and checked, its images kept beside it
(`BODY_IMAGES`), or OpenAI's error object: another host or origin (403), no key (401), another type (415), too many
bytes (413), too slow (408), not JSON (400). A path that takes no POST refuses one before its body is read (405, 404).
Large bodies are parsed on a thread of their own.
An exception of a handler is 500, once in the log, and never ends the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

from ktc.inference.serving.body_images import BODY_IMAGES, BodyImages, opened, too_large
from ktc.inference.serving.connection import LONGEST_HEAD, too_long
from ktc.inference.serving.keys import admits
from ktc.inference.serving.refusals import RequestRefused, error_object
from ktc.inference.serving.request_log import RequestLog

log = logging.getLogger(__name__)
PROBES: Final = frozenset({"/health", "/ready"})  # asked by those who do not know the key, or the name
PAGE: Final = "/"  # the chat page holds nothing secret, and asks its reader for the key
BODY_SECONDS: Final = 30.0  # until a body must have arrived
_LOCAL: Final = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_ID: Final = b"x-request-id"
_REQUEST_ID: Final = re.compile(rb"[\w.-]{1,128}", re.ASCII)
_DEEPEST: Final = 32  # levels of JSON
_LONGEST_NUMBER: Final = 40  # characters
_PARSED_AT_ONCE: Final = 1 << 16  # bytes of a body; larger ones are parsed beside the event loop
_LINGER: Final = 2.0  # seconds in which the rest of a refused body is read, so that its client sees the answer


@dataclass(frozen=True, slots=True)
class Gate:
    """Who may ask, and how much. Without `key_sha256`, requests must name this machine as their host.

    A body has at most `body_bytes` besides its images, and these `image_bytes`. All bodies under way have
    `bodies_bytes`, and so have those that are too large for a text, so that these never stop texts.
    """

    key_sha256: bytes | None = None
    body_bytes: int = 4 << 20
    image_bytes: int = 0
    bodies_bytes: int = 256 << 20

    @property
    def most_bytes(self) -> int:
        """The most bytes of a body."""
        return self.body_bytes + self.image_bytes


@dataclass(slots=True)
class _Budget:
    """Bytes of bodies under way."""

    limit: int
    used: int = 0


@dataclass(slots=True)
class _Reserved:
    """Bytes of a budget that one body has."""

    budget: _Budget = field(default_factory=lambda: _Budget(0))
    num_bytes: int = 0

    def keep(self, num_bytes: int) -> None:
        """Release all but `num_bytes`."""
        self.budget.used -= max(self.num_bytes - num_bytes, 0)
        self.num_bytes = min(self.num_bytes, num_bytes)

    def move(self, budget: _Budget) -> None:
        """Take the bytes from another budget, if it has room."""
        if budget.used + self.num_bytes <= budget.limit:
            self.budget.used -= self.num_bytes
            self.budget = budget
            budget.used += self.num_bytes


class Guard:
    """ASGI middleware around all others."""

    def __init__(
        self, app: Any, gate: Gate, requests: RequestLog, methods: Mapping[str, Collection[str]] | None = None
    ) -> None:
        """`methods` are those of each path of the application; without them, it refuses others itself."""
        self._app, self._gate, self._requests, self._methods = app, gate, requests, methods
        self._texts, self._large = _Budget(gate.bodies_bytes), _Budget(max(gate.bodies_bytes, 2 * gate.most_bytes))
        self._parsing = ThreadPoolExecutor(1, "ktc-parsing")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _headers(scope)
        client = (scope.get("client") or ("unknown",))[0]
        logged = self._requests.begin(scope["method"], scope["path"], client, headers.get("x-request-id", ""))
        scope["headers"] = [*(pair for pair in scope["headers"] if pair[0] != _ID), (_ID, logged.id.encode())]

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                logged.status = message["status"]
            await send(message)

        reserved, token = _Reserved(), None
        try:
            _require_head(scope)
            self._require_caller(scope["path"], headers)
            if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
                self._require_post(scope["path"])
                reserved = self._reserve(headers)
                body, images = await self._opened(await self._body(headers, receive), reserved)
                receive, token = _replayed(body, receive), BODY_IMAGES.set(images)
                del body
            await self._app(scope, receive, sending)
        except RequestRefused as refused:
            logged.refused = refused.code
            await _refuse(refused, receive, sending)
        except Exception:  # the server continues
            log.exception("a request failed")
            if not logged.status:
                await _refuse(RequestRefused(500, "the request failed; the log of the server says more"), None, sending)
        finally:
            if token is not None:
                BODY_IMAGES.get().drop()
                BODY_IMAGES.reset(token)
            reserved.keep(0)
            self._requests.end(logged)

    def _require_caller(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise RequestRefused for another host or origin (403), and for a missing key (401)."""
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            raise RequestRefused(403, "pages of other origins may not use this server", "origin_not_allowed")
        if path in PROBES:
            return
        if self._gate.key_sha256 is None:
            if not _LOCAL.fullmatch(headers.get("host", "")):
                message = "the `Host` header must name this machine; a proxy sends `Host: localhost`"
                raise RequestRefused(403, message, "host_not_allowed")
        elif (
            path != PAGE
            and not path.startswith("/updates/")
            and not admits(headers.get("authorization", ""), self._gate.key_sha256)
        ):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise RequestRefused(401, "the API key is missing or wrong", headers=challenge)

    def _require_post(self, path: str) -> None:
        """Raise RequestRefused for a path that takes no POST (405), and for an unknown one (404)."""
        methods = None if self._methods is None else sorted(self._methods.get(path, ()))
        if methods is None or "POST" in methods:
            return
        if not methods:
            raise RequestRefused(404, "there is nothing at this path")
        allowed = ", ".join(methods)
        raise RequestRefused(405, f"this path takes {allowed}, not POST", headers={"Allow": allowed})

    def _reserve(self, headers: Mapping[str, str]) -> _Reserved:
        """Return the bytes that a body may take. Raises RequestRefused."""
        if "content-length" in headers and "transfer-encoding" in headers:
            raise RequestRefused(400, "a request has a `Content-Length` or a `Transfer-Encoding`, not both")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestRefused(415, "the body must have `Content-Type: application/json`")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestRefused(415, "compressed bodies are not read", "unsupported_encoding")
        length = int(headers.get("content-length", self._gate.most_bytes))
        if length > self._gate.most_bytes:
            raise too_large(self._gate.most_bytes)
        budget = self._texts if length <= self._gate.body_bytes else self._large
        if budget.used + length > budget.limit:
            raise RequestRefused(503, "too many bodies arrive at once", headers={"Retry-After": "1"})
        budget.used += length
        return _Reserved(budget, length)

    async def _opened(self, body: bytearray, reserved: _Reserved) -> tuple[bytes, BodyImages]:
        """Return the JSON of a body and its images; dropping them releases their bytes."""
        reserved.keep(len(body))
        given = (body, self._gate.body_bytes, _json_object, bool(self._gate.image_bytes))
        if len(body) <= _PARSED_AT_ONCE:
            rest, texts = opened(*given)
        else:
            rest, texts = await asyncio.get_running_loop().run_in_executor(self._parsing, opened, *given)
        if texts and reserved.budget is self._texts:  # a small body with images waits for them as a large one does
            reserved.move(self._large)
        return rest, BodyImages(texts, lambda: reserved.keep(len(rest)))

    async def _body(self, headers: Mapping[str, str], receive: Any) -> bytearray:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestRefused(400, "the client left before its body was whole")
                    body += message.get("body", b"")
                    if len(body) > self._gate.most_bytes:
                        raise too_large(self._gate.most_bytes)
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            message = f"the body took longer than {BODY_SECONDS:g} seconds"
            raise RequestRefused(408, message) from None


def _require_head(scope: Any) -> None:
    """Raise RequestRefused for a head that is too long (431), and for another version of HTTP (400)."""
    if len(scope["raw_path"]) + sum(len(name) + len(value) for name, value in scope["headers"]) > LONGEST_HEAD:
        raise too_long()
    if scope["http_version"] not in ("1.0", "1.1"):
        raise RequestRefused(400, "this is not a request of HTTP/1.1")


def _headers(scope: Any) -> dict[str, str]:
    """Return the headers by their names, several of a name joined, without an invalid request id."""
    headers = dict[str, str]()
    for name, value in scope["headers"]:
        if name == _ID and not _REQUEST_ID.fullmatch(value):
            continue
        key = name.decode("latin-1")
        headers[key] = f"{headers[key]}, {value.decode('latin-1')}" if key in headers else value.decode("latin-1")
    return headers


def _json_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a body, of finite numbers and of names that differ. Raises RequestRefused (400)."""
    try:
        value: Any = json.loads(
            body.decode(), object_pairs_hook=_unique, parse_constant=_not_json, parse_int=_whole, parse_float=_finite
        )
        json.dumps(value, ensure_ascii=False).encode()  # no lone surrogates
    except (ValueError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise RequestRefused(400, f"the body is not JSON: {words}", "invalid_json") from error
    if not isinstance(value, dict):
        raise RequestRefused(400, "the body must be a JSON object", "invalid_json")
    if _depth(cast("Any", value)) > _DEEPEST:
        raise RequestRefused(400, f"the body has more than {_DEEPEST} levels", "invalid_json")
    return cast("dict[str, Any]", value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has a name twice")
    return fields


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number of JSON")


def _whole(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError("a number is too long")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return number


def _depth(value: Any) -> int:
    """Return the levels of a JSON value, without recursion."""
    levels, these = 0, list[Any]([value])
    while these := [_inner(inner) for inner in these if isinstance(inner, (dict, list))]:
        levels += 1
        these = list(itertools.chain.from_iterable(these))
    return levels


def _inner(value: Any) -> list[Any]:
    return list(cast("dict[str, Any]", value).values()) if isinstance(value, dict) else value


def _replayed(body: bytes, receive: Any) -> Any:
    """Return a `receive` that has the whole body first, and then what the connection says."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Any:
        return left.pop() if left else await receive()

    return receiving


async def _refuse(refused: RequestRefused, receive: Any, send: Any) -> None:
    """Answer, close the connection, and read on for a moment where a body may still be on its way."""
    body = json.dumps(error_object(refused)).encode()
    headers = {"Content-Type": "application/json", "Connection": "close", "Content-Length": str(len(body))}
    pairs = [(name.encode(), value.encode()) for name, value in {**headers, **(refused.headers or {})}.items()]
    await send({"type": "http.response.start", "status": refused.status_code, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if refused.status_code == 413 and receive is not None:
        try:
            async with asyncio.timeout(_LINGER):
                while (await receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            pass
    await send({"type": "http.response.body", "body": b""})

"""Refused requests, in the form of OpenAI's errors: `{"error": {"message", "type", "param", "code"}}`.

In: a status, a code, a message and the field concerned. Out: an `HTTPException`, and the JSON of its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import HTTPException

_CODES: Final[Mapping[int, str]] = {
    400: "invalid_request", 401: "invalid_api_key", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    408: "request_timeout", 409: "conflict", 413: "request_too_large", 415: "unsupported_media_type",
    429: "rate_limit_exceeded", 431: "header_too_large", 500: "internal_error", 501: "not_implemented",
    503: "unavailable", 507: "out_of_memory",
}  # fmt: skip


class RequestRefused(HTTPException):
    """A request that is not answered. `param` is the field concerned, if it is one."""

    def __init__(
        self, status: int, message: str, code: str = "", param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Without a code, the status has one."""
        super().__init__(status, message, dict(headers) if headers else None)
        self.code, self.param = code or _CODES[status], param


def error_object(error: Exception) -> dict[str, Any]:
    """Return the body of the answer to a refused request: an `HTTPException` of anyone."""
    status, words = int(getattr(error, "status_code", 500)), str(getattr(error, "detail", error))
    code = getattr(error, "code", None) or _CODES.get(status, "internal_error")
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": words[:1000], "type": kind, "param": getattr(error, "param", None), "code": code}}

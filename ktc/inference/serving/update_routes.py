"""The paths of updates: who may ask, and what an answer says.

In: a POST with the key and a small JSON body, from this machine. Out: JSON with the seconds that the update took, or
the diagnostics of its refusal. An update continues where its client leaves.
Refused: another machine (403), a missing or wrong key (401), a body that is too large or invalid (400, 413), a second
update (409), an input (400), requests that run too long (503), memory (507). The key is compared before the body is
read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, KtcError, to_json
from ktc.inference.serving.keys import admits, read_key
from ktc.inference.serving.refusals import RequestRefused
from ktc.inference.serving.request import Refused
from ktc.inference.serving.updates import Applied, UpdateRunning, Updates

log = logging.getLogger(__name__)
PATHS: Final = frozenset({"/updates/weights", "/updates/adapters", "/updates/adapters/remove"})
_LARGEST_BODY: Final = 16384
_HINT: Final = "`(umask 077; openssl rand -hex 32 > key)`, then `--updates FOLDER --update-key key`"
Body = TypeVar("Body", bound="_Body")


@dataclass(frozen=True, slots=True)
class UpdateAccess:
    """Updates are taken from below `root`, from clients with the key of this SHA-256."""

    root: Path
    key_sha256: bytes


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Weights(_Body):
    folder: str
    patience: Annotated[int, Field(ge=0, le=86400)] = 600  # seconds


class _Name(_Body):
    name: str


class _Adapter(_Name):
    folder: str


def read_access(root: Path | None, key_file: Path | None) -> UpdateAccess | None:
    """Return the access of `--updates` and `--update-key`, None without both. Raises InputRefused (G727)."""
    if root is None and key_file is None:
        return None
    if root is None or key_file is None:
        raise _refused("`--updates` and `--update-key` are given together or not at all")
    if not root.is_dir():
        raise _refused(f"there is no folder `{root}`")
    return UpdateAccess(root.resolve(), read_key(key_file, "G727", _HINT))


def _refused(message: str) -> InputRefused:
    return InputRefused(Diagnostic("G727", message, hint=_HINT))


def add_routes(app: Any, access: UpdateAccess, updates: Updates) -> None:
    """Add the paths to a FastAPI application."""

    @app.post("/updates/weights")
    async def weights(request: Request) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        asked = await _asked(request, access, _Weights)
        return await _applied(lambda: updates.weights(asked.folder, float(asked.patience)))

    @app.post("/updates/adapters")
    async def adapters(request: Request) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        asked = await _asked(request, access, _Adapter)
        return await _applied(lambda: updates.adapter(asked.name, asked.folder))

    @app.post("/updates/adapters/remove")
    async def remove(request: Request) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        asked = await _asked(request, access, _Name)
        return await _applied(lambda: updates.remove(asked.name))


async def _asked(request: Request, access: UpdateAccess, wanted: type[Body]) -> Body:
    host = request.client.host if request.client is not None else ""
    if not (host == "::1" or host.startswith("127.")):
        raise RequestRefused(403, "updates are taken from this machine only")
    if not admits(request.headers.get("authorization", ""), access.key_sha256):
        raise RequestRefused(401, "the key of updates is missing or wrong", headers={"WWW-Authenticate": "Bearer"})
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_BODY:
            raise RequestRefused(413, f"the body has more than {_LARGEST_BODY} bytes")
    try:
        return wanted.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = "".join(f"`{part}`: " for part in fault["loc"])
        raise RequestRefused(400, f"the body is not what this path takes: {place}{fault['msg']}"[:300]) from error


async def _applied(update: Callable[[], Applied]) -> JSONResponse:
    try:
        applied = await asyncio.shield(asyncio.to_thread(update))
    except UpdateRunning as error:
        raise RequestRefused(409, "another update is under way") from error
    except TimeoutError as error:
        raise RequestRefused(503, "requests ran for longer than `patience`; the model is as before") from error
    except Refused as error:
        raise RequestRefused(503, str(error)) from error
    except KtcError as error:
        status = 507 if isinstance(error, HostLacks) else 400
        return JSONResponse({"refused": [to_json(diagnostic) for diagnostic in error.diagnostics]}, status)
    except Exception as error:
        log.exception("an update failed")
        raise RequestRefused(500, f"the update failed: {type(error).__name__}; the log says more") from error
    log.info("update applied: %s", applied.what)
    return JSONResponse({
        "applied": applied.what, "seconds_of_checks": round(applied.checked, 3),
        "seconds_of_waiting": round(applied.waited, 3),
    })  # fmt: skip

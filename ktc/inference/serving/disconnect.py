"""ASGI middleware that cancels a request when its client disconnects, also before any part of the answer is sent."""

from __future__ import annotations

import asyncio
from typing import Any


class CancelOnDisconnect:
    """Runs the application in a task; a disconnect cancels it. Handlers pass the cancellation to the engine."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def watch() -> None:
            while True:
                message = await receive()
                messages.put_nowait(message)
                if message["type"] == "http.disconnect":
                    return

        answer = asyncio.ensure_future(self._app(scope, messages.get, send))
        watcher = asyncio.ensure_future(watch())
        try:
            await asyncio.wait({answer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                await asyncio.wait({answer})
            if not answer.cancelled():
                answer.result()  # raises the application's exception
        finally:
            for task in (answer, watcher):
                task.cancel()

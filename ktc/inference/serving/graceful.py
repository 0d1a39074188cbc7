"""`GracefulServer`: the server of uvicorn, which ends what runs before it stops.

In: SIGINT, SIGTERM or `should_exit`. Out: running requests are answered for at most `grace` seconds, while new ones are
refused (503) and `/ready` says so; the others then end with an error. A second signal of either kind stops at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from ktc.inference.serving.connection import Connection

if TYPE_CHECKING:
    import socket

    from ktc.inference.serving.engine import Engine

_TICK: Final = 0.05  # seconds
_FLUSH: Final = 2.0  # seconds in which clients take the ends of their answers


class GracefulServer(uvicorn.Server):
    """A server whose requests `engine` answers."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float) -> None:
        """Serve; at the end, wait at most `grace` seconds for running requests."""
        super().__init__(config)
        self._engine, self._grace = engine, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop, at the second signal at once."""
        self.force_exit = self.force_exit or self.should_exit
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what runs, end the rest, and close."""
        self._engine.refuse()
        await self._until(lambda: not self._engine.num_active, self._grace)
        ended = asyncio.ensure_future(asyncio.to_thread(self._engine.stop))  # within one step
        await self._until(ended.done, _FLUSH)
        await self._until(lambda: not self.server_state.tasks, _FLUSH)
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            if isinstance(connection, Connection):
                connection.cut()
        await self._until(lambda: not self.server_state.tasks, _FLUSH)
        await super().shutdown(sockets)

    async def _until(self, reached: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not (reached() or self.force_exit or time.monotonic() > end):
            await asyncio.sleep(_TICK)

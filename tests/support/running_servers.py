"""A server of `ktc serve` in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ktc.inference.serving import server as serve
from ktc.inference.serving.models import ServedModels
from ktc.inference.serving.request import Limits


@contextmanager
def served(models: ServedModels, limits: Limits, access: Any = None, **more: Any) -> Iterator[str]:
    """The URL of a server that shares batches, until the end of the context."""
    with running(models, limits, access, **more) as (url, _):
        yield url


@contextmanager
def running(models: ServedModels, limits: Limits, access: Any = None, **more: Any) -> Iterator[tuple[str, Any]]:
    """The URL of a server and the server itself, which may have ended before the context does."""
    listening = serve.listen("127.0.0.1", 0)
    server, notes = serve.make_server(models, limits, access, **more)
    assert notes == ()
    url = serve.url(listening)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield url, server
    finally:
        server.should_exit = True
        thread.join(timeout=20)
    assert not thread.is_alive()

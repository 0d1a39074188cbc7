"""An OpenAI-compatible endpoint for one compiled model, by the server that transformers brings.

In: a `LanguageModel` and a socket that listens. Out: a server that runs until it is stopped. Refused: a missing package
of the extra `serve` (H230), an address that cannot be had (G720), a tokenizer that the server cannot use (G721).
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ktc import versions
from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.generate.language_model import LanguageModel

if TYPE_CHECKING:
    from uvicorn import Server

PACKAGES = ("fastapi", "openai", "pydantic", "uvicorn")
_GRACE = 5  # seconds that running answers get once the server is to end


def require_server() -> None:
    """Raises HostLacks (H230) for packages that are missing, and for a transformers without its server."""
    faults = list(_missing())
    if faults:
        raise HostLacks(*faults)


def _missing() -> Iterator[Diagnostic]:
    missing = [name for name in PACKAGES if versions.installed(name) is None]
    if missing:
        named = ", ".join(f"`{name}`" for name in missing)
        yield Diagnostic("H230", f"`ktc serve` needs {named}, not installed here", hint="`pip install 'ktc[serve]'`")
    if importlib.util.find_spec("transformers.cli.serving") is None:
        found = versions.installed("transformers")
        message = (
            f"`ktc serve` is the server of transformers 5.6 to 5.23, and {found} is installed, which has none there"
        )
        yield Diagnostic("H230", message, hint="`pip install 'transformers~=5.23'`")


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address; port 0 takes a free one. Raises InputRefused (G720)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # a name that no server can have, as `a..b`
        raise _unavailable(host, port, error) from error
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen()
    except OSError as error:
        opened.close()
        raise _unavailable(host, port, error) from error
    return opened


def exposure(host: str) -> tuple[Diagnostic, ...]:
    """A warning (G722) where other machines could reach the server: it asks nobody who they are."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return ()
    message = f"the server listens at `{host}`: whoever reaches it may use the model, there is no password"
    hint = "keep it at 127.0.0.1 and put a proxy with authentication before it"
    return (Diagnostic("G722", message, hint=hint, severity="warning"),)


def make_server(opened: LanguageModel) -> Server:
    """The server, not yet running: `run(sockets=[...])` runs it until `should_exit` is set or a signal ends it."""
    import uvicorn

    from ktc.generate.serving_app import serving_app

    if not getattr(opened.tokenizer, "is_fast", False):
        message = "the server of transformers streams with fast tokenizers, and the model's is a slow one"
        raise InputRefused(Diagnostic("G721", message, hint="`ktc generate --chat` takes it"))
    app = serving_app(opened)
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE))


def url(listening: socket.socket) -> str:
    """The base of every path, as clients want it."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _unavailable(host: str, port: int, error: OSError | UnicodeError) -> InputRefused:
    message = f"the server cannot listen at `{host}` port {port}: {getattr(error, 'strerror', None) or error}"
    return InputRefused(Diagnostic("G720", message, hint="name another with `--port`; `--port 0` takes a free one"))

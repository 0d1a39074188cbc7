"""An OpenAI-compatible endpoint for a compiled model and its adapters, using the server of transformers.

Input: `ServedModels`, `Limits` and a listening socket. Output: a server that runs until it is stopped. Refused: a
missing package of the extra `serve` (H230), an unavailable address (G720), an unsupported tokenizer (G721).
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.foundation import versions
from ktc.inference.serving.models import ServedModels
from ktc.inference.serving.request import Limits

if TYPE_CHECKING:
    from uvicorn import Server

    from ktc.inference.serving.request_images import ImageAllowance
    from ktc.inference.serving.update_routes import UpdateAccess

PACKAGES = ("fastapi", "openai", "prometheus_client", "pydantic", "uvicorn")
_BYTES_PER_TOKEN = 32
_BYTES_AROUND = 1 << 16
_LARGEST_BODY = 16 << 20  # of a model without a longest length
KEY_HINT: Final = "`(umask 077; openssl rand -hex 32 > key)`, then `--api-key-file key`"
_CHUNK_OF_GPU: Final = 2048  # tokens
GRACE: Final = 10.0  # seconds for running answers when the server stops
_CLOSING: Final = 5  # seconds for connections, when no request runs any more


def require_server() -> None:
    """Raise HostLacks (H230) for missing packages, and for a transformers without its server."""
    faults = list(_missing())
    if faults:
        raise HostLacks(*faults)


def _missing() -> Iterator[Diagnostic]:
    missing = [name for name in PACKAGES if versions.installed(name) is None]
    if missing:
        named = ", ".join(f"`{name}`" for name in missing)
        yield Diagnostic("H230", f"`ktc serve` requires {named}, not installed here", hint="`pip install 'ktc[serve]'`")
    if importlib.util.find_spec("transformers.cli.serving") is None:
        release = versions.installed("transformers")
        message = f"`ktc serve` needs the server of transformers 5.6 to 5.23; the installed {release} does not have it"
        yield Diagnostic("H230", message, hint="`pip install 'transformers~=5.23'`")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket at that address; port 0 takes a free one. Raises InputRefused (G720)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid name such as `a..b`
        raise _unavailable(host, port, error) from error
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen()
    except OSError as error:
        opened.close()
        raise _unavailable(host, port, error) from error
    return opened


def exposure(host: str, has_key: bool) -> tuple[Diagnostic, ...]:
    """Return a warning (G722) if other machines could reach the server. Raises InputRefused (G722) without a key."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return ()
    if not has_key:
        message = f"every machine that reaches `{host}` could use the model: no key is required"
        raise InputRefused(Diagnostic("G722", message, hint=KEY_HINT))
    message = f"the server listens at `{host}` without encryption: others on the way can read the key and all texts"
    hint = "keep it at 127.0.0.1 behind a proxy with TLS, which sends `Host: localhost`"
    return (Diagnostic("G722", message, hint=hint, severity="warning"),)


def make_server(
    models: ServedModels, limits: Limits, access: UpdateAccess | None = None, key_sha256: bytes | None = None,
    grace: float = GRACE, log_line: Callable[[str], None] | None = None, images: ImageAllowance | None = None,
) -> tuple[Server, tuple[Diagnostic, ...]]:  # fmt: skip
    """Return the server, and notes on how it serves the model. With `access` it takes updates.

    `log_line` gets a line for each request that has ended; it must not raise. `images` bounds those of a request.
    `run(sockets=[...])` runs it until `should_exit` is set or a signal ends it. Raises InputRefused (G721).
    """
    import uvicorn

    from ktc.inference.serving.application import make_application
    from ktc.inference.serving.connection import LONGEST_HEAD, Connection
    from ktc.inference.serving.graceful import GracefulServer
    from ktc.inference.serving.guard import Gate
    from ktc.inference.serving.request_images import ImageAllowance

    if not all(served.opened.streams for served in models.names.values()):
        message = "the server of transformers streams with fast tokenizers only, and the model's is a slow one"
        raise InputRefused(Diagnostic("G721", message, hint="use `ktc generate --chat`"))
    allowed = images or ImageAllowance()
    body_bytes = _body_bytes(served.opened.max_length for served in models.names.values())
    reads_images = any(served.opened.processor is not None for served in models.names.values())
    gate = Gate(key_sha256, body_bytes, allowed.body_bytes if reads_images else 0)
    gate = replace(gate, bodies_bytes=max(gate.bodies_bytes, 2 * body_bytes))
    made = make_application(models, limits, gate, access, log_line, allowed)
    config = uvicorn.Config(
        made.app, http=Connection, ws="none", log_level="error", server_header=False,
        h11_max_incomplete_event_size=LONGEST_HEAD, timeout_graceful_shutdown=_CLOSING,
    )  # fmt: skip
    return GracefulServer(config, made.engine, grace), tuple(_notes(made.unbatched_reason))


def _body_bytes(lengths: Iterable[int | None]) -> int:
    """Return the bytes that a body may have: the longest prompt, of long tokens, and the words around it."""
    known = [length for length in lengths if length is not None]
    return max(known) * _BYTES_PER_TOKEN + _BYTES_AROUND if known else _LARGEST_BODY


def _notes(unbatched_reason: str) -> Iterator[Diagnostic]:
    if unbatched_reason:
        message = f"requests take turns, and share no batch: {unbatched_reason}"
        yield Diagnostic("G724", message, hint="throughput is that of one request", severity="note")


def free_memory(model: Any) -> int:
    """Return the bytes of memory that are available for keys and values: of the model's GPU, or of this machine."""
    import psutil
    import torch

    device = model.get_input_embeddings().weight.device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def default_chunk(model: Any) -> int:
    """Return how many tokens of prompts are read between two steps, if the user does not say.

    More where a GPU computes all experts of a prompt and replays steps of running batches between its layers: there a
    pass takes about as long with more tokens, and no answer waits for the whole of it.
    """
    from ktc.inference.serving.graph_rows import GraphRows
    from ktc.inference.serving.model_runner import unbatched_reason
    from ktc.model.experts.backends.resident_backend import GpuResident
    from ktc.model.experts.backends.streamed_backend import Streamed
    from ktc.model.experts.module import FusedMoe

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    graphs = GraphRows.of(base)
    gives_way = graphs is not None and not graphs.unfit and not unbatched_reason(model)
    experts = [module for module in base.modules() if isinstance(module, FusedMoe)] if gives_way else []
    backends = (layer.backend(_CHUNK_OF_GPU, plain=True) for layer in experts)
    is_read_by_gpu = bool(experts) and all(isinstance(one, (GpuResident, Streamed)) for one in backends)
    return _CHUNK_OF_GPU if is_read_by_gpu else Limits().prefill_chunk


def url(listening: socket.socket) -> str:
    """Return the base URL of every path, as clients expect it."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _unavailable(host: str, port: int, error: OSError | UnicodeError) -> InputRefused:
    message = f"the server cannot listen at `{host}` port {port}: {getattr(error, 'strerror', None) or error}"
    return InputRefused(Diagnostic("G720", message, hint="choose another with `--port`; `--port 0` takes a free one"))

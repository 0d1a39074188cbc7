"""`ktc serve`: a compiled model at an OpenAI-compatible endpoint, until Ctrl-C.

In: the options. Out: the address on stderr (with `--json` also on stdout, when it ends). Invalid options are refused
before the model is loaded.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ktc.cli.options import (
    AdapterFolder,
    CompiledModel,
    Reference,
    Trust,
    Weights,
)
from ktc.cli.session import Session
from ktc.cli.session_options import in_session


@in_session()
def command(
    session: Session,
    out: CompiledModel,
    adapter: AdapterFolder = None,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen at; one that is not local is reachable by others.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 chooses a free one.")] = 8000,
    reference: Reference = False,
    weights: Weights = None,
    trust: Trust = False,
) -> None:
    """Serve a compiled model over HTTP with OpenAI's API: chat, completions and responses, with streaming."""
    session.require_versions()
    from ktc.generate import serve
    from ktc.generate.language_model import open_language_model

    serve.require_server()
    with serve.listen(host, port) as listening:
        session.diagnose(serve.exposure(host))
        opened = open_language_model(
            out, adapter=adapter, reference=reference, weights=weights, trust_remote_code=trust
        )
        session.go_on()
        server = serve.make_server(opened)
        session.result({"url": serve.url(listening), "model": opened.name, "adapter": opened.adapter or None})
        session.console.print(f"{opened.name} is served at {serve.url(listening)} (Ctrl-C ends)", markup=False)
        server.run(sockets=[listening])

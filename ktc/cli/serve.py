"""`ktc serve`: a compiled model at an OpenAI-compatible endpoint, until Ctrl-C or SIGTERM (exit code 130).

In: the options. Out: the address on stderr (with `--json` also on stdout, when it ends). Invalid options are refused
before the model is loaded.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ktc.cli.amounts import size
from ktc.cli.early_checks import require_given, require_readable, require_writable
from ktc.cli.given_model import GivenModel, Recompile, Wish, display_name, run_compiled, tell_random_weights
from ktc.cli.options import ExpertCounts, Reference, TextOnly, Trust, Weights
from ktc.cli.session import INTERRUPTED, Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic

if TYPE_CHECKING:
    from torch import nn

    from ktc.inference.serving.models import ServedModels

# The titles of groups of options in `--help`.
_address_option: Final = partial(typer.Option, rich_help_panel="Address and access")
_load_option: Final = partial(typer.Option, rich_help_panel="Load and memory")
_images_option: Final = partial(typer.Option, rich_help_panel="Images, for a model that reads them")
_updates_option: Final = partial(typer.Option, rich_help_panel="New weights while it runs")


@in_session()
def command(
    session: Session,
    model: GivenModel,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="A|NAME=A",
            help="Use this adapter, a folder that PEFT saved; with a name (repeatable) for requests of that `model`.",
        ),
    ] = None,
    host: Annotated[
        str, _address_option("--host", help="The address to listen at; one that is not local is reachable by others.")
    ] = "127.0.0.1",
    port: Annotated[int, _address_option("--port", min=0, max=65535, help="The port; 0 chooses a free one.")] = 8000,
    max_batch: Annotated[int, _load_option("--max-batch", min=1, help="Requests that run at once.")] = 64,
    max_waiting: Annotated[
        int, _load_option("--max-waiting", min=0, help="Requests that wait beside them; more are answered with 429.")
    ] = 256,
    max_cache_memory: Annotated[
        float | None,
        _load_option(
            "--max-cache-memory", min=0.001, metavar="GIB",
            help="Keys and values of running requests. Default: half of the free memory.",
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        _load_option(
            "--prefill-chunk", min=1,
            help="Tokens of prompts that are read between two steps. Default: 512, or 2,048 where a GPU reads them.",
        ),
    ] = None,
    prefix_cache_memory: Annotated[
        float | None,
        _load_option(
            "--prefix-cache-memory", min=0, metavar="GIB",
            help="Keys and values kept for prompts that begin alike; 0: none. Default: an eighth of the free memory.",
        ),
    ] = None,
    max_images: Annotated[
        int, _images_option("--max-images", min=0, help="Images that a request may have; 0: none.")
    ] = 8,
    max_image_size: Annotated[
        float, _images_option("--max-image-size", min=0.001, metavar="MIB", help="The size of an image's file.")
    ] = 10.0,
    max_image_pixels: Annotated[
        float, _images_option("--max-image-pixels", min=0.001, metavar="MILLIONS", help="The pixels of an image.")
    ] = 32.0,
    updates: Annotated[
        Path | None,
        _updates_option(
            "--updates", metavar="FOLDER",
            help="Take new weights and adapters from folders below this one while running; needs `--update-key`.",
        ),
    ] = None,
    update_key: Annotated[
        Path | None,
        _updates_option("--update-key", metavar="FILE", help="The file of the key that updates need."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _address_option(
            "--api-key-file", metavar="FILE",
            help="The file of the key that every request needs; without it the server listens on this machine only.",
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds for running answers at the end.")
    ] = 10.0,
    expert_counts: ExpertCounts = None,
    reference: Reference = False,
    text_only: TextOnly = False,
    recompile: Recompile = False,
    weights: Weights = None,
    trust: Trust = False,
) -> None:  # fmt: skip
    """Serve a model over HTTP with OpenAI's API: chat, completions and responses, with streaming."""
    require_given(model, map(_adapter_folder, adapter or ()))
    if api_key_file is not None:
        require_readable(api_key_file)
    require_writable(expert_counts)
    session.require_versions()
    from ktc.inference.serving import server as serve
    from ktc.inference.serving.keys import read_key
    from ktc.inference.serving.models import named_adapters, open_served_models
    from ktc.inference.serving.request import Limits
    from ktc.model.loading.kept import add_counts, begin_with

    serve.require_server()
    from ktc.foundation.images import ImageLimits
    from ktc.inference.serving.request_images import ImageAllowance
    from ktc.inference.serving.update_routes import read_access

    adapters = tuple(adapter or ())
    named_adapters(adapters)
    access = read_access(updates, update_key)
    key_sha256 = None if api_key_file is None else read_key(api_key_file, "G730", serve.KEY_HINT)
    session.diagnose(serve.exposure(host, key_sha256 is not None))
    wish = Wish.of("serve", recompile=recompile, trust=trust, weights=weights, text_only=text_only)

    def load(out: Path) -> ServedModels:
        tell_random_weights(session, out, adapters, weights)
        opened = open_served_models(
            out, adapters, reference=reference, weights=weights, trust_remote_code=trust, updates=access is not None,
            name=display_name(model),
        )  # fmt: skip
        if expert_counts is not None:
            begin_with(opened.default.opened.model, expert_counts)
        return opened

    with serve.listen(host, port) as listening:
        models = run_compiled(session, model, wish, load)
        session.raise_if_interrupted()
        free = serve.free_memory(models.default.opened.model)
        cache_bytes = free // 2 if max_cache_memory is None else int(max_cache_memory * 2**30)
        prefix_bytes = free // 8 if prefix_cache_memory is None else int(prefix_cache_memory * 2**30)
        chunk = prefill_chunk or serve.default_chunk(models.default.opened.model)
        limits = Limits(max_batch, max_waiting, cache_bytes, chunk, prefix_bytes)
        log_line = None if session.quiet else _write_line
        pixels = int(max_image_pixels * 1e6)
        allowed = ImageAllowance(max_images, ImageLimits(int(max_image_size * 2**20), pixels))
        server, notes = serve.make_server(models, limits, access, key_sha256, grace, log_line, allowed)
        session.diagnose((*models.notes, *notes))
        opened = models.default.opened
        session.result({
            "url": serve.url(listening), "model": opened.name, "models": list(models.names),
            "adapter": opened.adapter or None, "cache_bytes": cache_bytes,
            "prefix_cache_bytes": prefix_bytes, "updates": access is not None,
            "images": max_images if opened.processor is not None else 0,
        })  # fmt: skip
        names = ", ".join(models.names)
        # The address is the result of a command that does not end, so `-q` keeps it.
        url = serve.url(listening)
        line = f"{names} is served at {url}, with {size(cache_bytes)} of cache (Ctrl-C ends)\nchat page: {url[:-2]}"
        typer.echo(line, err=True)
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:  # the way in which a server ends
            session.exit_code = INTERRUPTED
            session.tell("the server has ended")
        except BaseException:
            if expert_counts is not None:
                _add_counts_after_error(session, opened.model, expert_counts)
            raise
        if expert_counts is not None:
            add_counts(opened.model, expert_counts)


def _add_counts_after_error(session: Session, model: nn.Module, path: Path) -> None:
    """Add the counts of experts, and warn (U003) where that fails too: the server's own error is the one to report."""
    from ktc.model.loading.kept import add_counts

    try:
        add_counts(model, path)
    except Exception as error:  # noqa: BLE001 - a device that has failed raises anything
        message = f"the counts of this run are not in `{path}`: {error}"
        session.diagnose([Diagnostic("U003", message, severity="warning")])


def _write_line(line: str) -> None:
    typer.echo(line, err=True)


def _adapter_folder(word: str) -> Path:
    """Return the folder of `A` or `NAME=A`; a folder that exists as written has no name."""
    return Path(word) if Path(word).is_dir() else Path(word.rpartition("=")[2])

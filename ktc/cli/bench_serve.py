"""`ktc bench serve`: many clients at once on a server of `ktc serve`, beside one client.

In: the options. Out: a table on stdout, and the file of `--output`. A lost or failed request is an error (G726), after
the figures are shown.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ktc.cli.bench_files import require_writable
from ktc.cli.options import CompiledModel, ResultsFile
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused

if TYPE_CHECKING:
    from rich.table import Table

    from ktc.tools.bench.serving.report import Phase


@in_session()
def serve_command(
    session: Session,
    out: CompiledModel,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Clients that send requests at once.")] = 64,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long they send requests.")] = 600,
    one_seconds: Annotated[
        float, typer.Option("--one-seconds", min=1, help="How long one client sends requests before.")
    ] = 60,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="The option of `ktc serve`.")] = 64,
    prompt: Annotated[str, typer.Option("--prompt", metavar="A-B", help="Words of a prompt, drawn evenly.")] = "16-128",
    new_tokens: Annotated[
        str, typer.Option("--new-tokens", metavar="A-B", help="Tokens of an answer, drawn evenly.")
    ] = "16-128",
    cancelled: Annotated[
        float, typer.Option("--cancelled", min=0, max=1, help="The share of streamed answers that clients end early.")
    ] = 0.1,
    output: ResultsFile = None,
) -> None:
    """Load a server of `ktc serve` with one client and then many, streaming or not, some of which cancel."""
    session.require_versions()
    from ktc.inference.serving.server import require_server
    from ktc.tools.bench.serving.load import Load
    from ktc.tools.bench.serving.report import as_json
    from ktc.tools.bench.serving.run import measure, served

    require_server()
    lengths = _span("--prompt", prompt), _span("--new-tokens", new_tokens)
    if output is not None:
        require_writable(output)
    with served(out, ["--max-batch", str(max_batch)]) as url:
        session.go_on()
        loads = Load(1, one_seconds, *lengths, 0.0), Load(clients, seconds, *lengths, cancelled)
        one, many, left = measure(url, *loads)
    report = as_json(one, many, left)
    session.result(report)
    session.show(_table(one, many))
    if output is not None:
        session.emit(json.dumps(report, indent=2), output)
    failed = {**one.failed, **many.failed}
    if failed:
        message = f"{sum(failed.values())} requests were lost or failed: {', '.join(list(failed)[:3])}"
        raise InputRefused(Diagnostic("G726", message, hint="the server's log says more"))
    session.next("ktc", "serve", out)


def _span(option: str, text: str) -> tuple[int, int]:
    """Return `16-128` as two numbers. Raises InputRefused (G725)."""
    low, _, high = text.partition("-")
    if low.isdigit() and high.isdigit() and 0 < int(low) <= int(high):
        return int(low), int(high)
    raise InputRefused(Diagnostic("G725", f"`{option}` is `{text}`, not two numbers", hint=f"`{option} 16-128`"))


def _table(one: Phase, many: Phase) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in (
        "clients", "answered", "cancelled", "failed", "token/s", "ratio", "token/CPU s", "ratio",
        "first token s p50/p99", "next token s p50/p99", "request s p50/p99",
    ):  # fmt: skip
        table.add_column(column, justify="right", overflow="fold")
    for phase in (one, many):
        ratio = phase.tokens_per_second / one.tokens_per_second if one.tokens else 0.0
        of_cpu = phase.tokens_per_cpu_second / one.tokens_per_cpu_second if one.tokens_per_cpu_second else 0.0
        table.add_row(
            str(phase.clients), str(phase.answered), str(phase.cancelled), str(sum(phase.failed.values())),
            f"{phase.tokens_per_second:.1f}", f"{ratio:.2f}x",
            f"{phase.tokens_per_cpu_second:.1f}", f"{of_cpu:.2f}x",
            *(f"{low:.3f} / {high:.3f}" for low, high in (phase.first_token, phase.next_token, phase.request)),
        )  # fmt: skip
    return table

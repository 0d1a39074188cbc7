"""`ktc bench stream`: measure one layer's experts that are streamed to a GPU, beside the bus.

In: the options. Out: a table on stdout, JSON, and the file of `--output`. Without a GPU it is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ktc.cli.bench_files import bar_of, require_writable
from ktc.cli.following import compiling
from ktc.cli.options import ResultsFile
from ktc.cli.session import Session
from ktc.cli.session_options import in_session

if TYPE_CHECKING:
    from rich.console import Group

    from ktc.tools.bench.stream import Report


@in_session()
def stream_command(
    session: Session,
    shape: Annotated[
        str, typer.Option("--shape", help="The sizes of the layer: v2lite, qwen3_30b, v3, or custom.")
    ] = "v2lite",
    hidden: Annotated[int | None, typer.Option("--hidden", min=1, help="Hidden size of a custom shape.")] = None,
    intermediate: Annotated[
        int | None, typer.Option("--intermediate", min=1, help="Intermediate size of a custom shape.")
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option("--experts", min=1, help="Number of experts; a named shape may have fewer than its own."),
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Experts per token of a custom shape.")] = None,
    weight_format: Annotated[str, typer.Option("--format", help="The experts' weight format.")] = "bf16",
    tokens: Annotated[str, typer.Option("--tokens", metavar="N,...", help="Numbers of tokens per call.")] = "2048,8192",
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Measured rounds; the median is reported.")] = 5,
    output: ResultsFile = None,
) -> None:
    """Measure one layer's experts streamed to a GPU: forward, backward, and the time that the bus alone needs."""
    session.require_versions()
    import torch

    from ktc.tools.bench import stream
    from ktc.tools.bench.options import Typed, parse

    sizes = (hidden, intermediate, experts, top_k)
    request = parse(Typed(shape, *sizes, tokens, impls=f"ktc_{weight_format}", rounds=rounds))
    if output is not None:
        require_writable(output)
    stream.require(request, torch.cuda.device_count())
    with bar_of(session) as progress:
        report = stream.run(request, progress, torch.device("cuda:0"))
    session.result(report.to_json())
    session.show(tables(report))
    if output is not None:
        session.emit(json.dumps(report.to_json(), indent=2), output)
    session.next(*compiling("tiny:qwen3_moe"))


def tables(report: Report) -> Group:
    """Return the bus and the rows."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    gigabytes = f"{report.layer_bytes / 1e9:.2f} GB"
    bus = f"{gigabytes} take {report.bus_ms:.1f} ms on the bus ({report.bus_gbps:.1f} GB/s)"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in ("tokens", "forward ms", "GB/s", "backward ms", "GB/s", "of the bus's time"):
        table.add_column(column, justify="right")
    for row in report.rows:
        table.add_row(
            f"{row.tokens:,}",
            f"{row.forward_ms:.1f}",
            f"{row.forward_gbps:.1f}",
            f"{row.backward_ms:.1f}",
            f"{row.backward_gbps:.1f}",
            f"{row.of_bus:.2f}x",
        )
    return Group(Text(f"{report.shape}, {report.weight_format}, on {report.device}: {bus}"), table)

"""`ktc bench`: measure ktc beside its peers. Here is `moe`, the experts of a layer; a table, JSON and a roofline.

In: the options. Out: progress on stderr, the table on stdout, and the files of `--output` and `--plot`. Invalid input
is refused before the first measurement.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ktc.cli.bench_decode import decode_command
from ktc.cli.bench_files import bar_of, require_distinct, require_writable
from ktc.cli.bench_finetune import finetune_command
from ktc.cli.bench_generate import generate_command
from ktc.cli.bench_serve import serve_command
from ktc.cli.bench_stream import stream_command
from ktc.cli.following import compiling
from ktc.cli.options import ResultsFile
from ktc.cli.session import Session
from ktc.cli.session_options import in_session

app = typer.Typer(help="Measure ktc beside its peers.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure ktc beside its peers."""


app.command("decode")(decode_command)
app.command("finetune")(finetune_command)
app.command("generate")(generate_command)
app.command("serve")(serve_command)
app.command("stream")(stream_command)


@app.command("moe")
@in_session()
def moe_command(
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
    tokens: Annotated[str, typer.Option("--tokens", metavar="N,...", help="Numbers of tokens per call.")] = "1,32,512",
    passes: Annotated[
        str, typer.Option("--pass", metavar="PASS,...", help="forward, train (forward and backward), or both.")
    ] = "forward",
    impls: Annotated[
        str,
        typer.Option(
            "--impl",
            metavar="NAME,...",
            help="Implementations: ktc_FORMAT, hf_eager, hf_grouped_mm, hf_batched_mm, compile, onednn_dense, "
            "kt_kernel, kt_kernel_int8, kt_kernel_int4; or the groups ktc, hf, kt, all.",
        ),
    ] = "",
    lora_ranks: Annotated[
        str, typer.Option("--lora-rank", metavar="R,...", help="LoRA ranks on the experts; 0: without LoRA.")
    ] = "0",
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="CPU threads. One thread measures CPU time, more measure wall time.")
    ] = 1,
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Measured rounds; the median is reported. 0 chooses by the cost.")
    ] = 0,
    isas: Annotated[
        str,
        typer.Option("--isa", metavar="ISA,...", help="Instruction sets of ktc's kernels. Default: the best."),
    ] = "",
    kt_python: Annotated[
        Path | None,
        typer.Option("--kt-python", metavar="PATH", help="The Python interpreter of kt-kernel's environment."),
    ] = None,
    output: ResultsFile = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a roofline: a .png or .svg file.")
    ] = None,
) -> None:
    """Measure the routed experts of one layer, ktc's and others', in one process and in interleaved rounds."""
    session.require_versions()
    from ktc.cli.bench_table import tables
    from ktc.tools.bench.options import Typed, parse
    from ktc.tools.bench.picture import require_drawable
    from ktc.tools.bench.plot import draw
    from ktc.tools.bench.run import run

    sizes = (hidden, intermediate, experts, top_k)
    typed = Typed(shape, *sizes, tokens, passes, impls, lora_ranks, isas, threads, rounds, kt_python)
    request = parse(typed)
    if plot is not None:
        require_drawable(plot, "a roofline")
    if output is not None:
        require_writable(output)
    require_distinct({"--output": output, "--plot": plot})
    session.go_on()
    with bar_of(session) as progress:
        report = run(request, progress)
    session.note(f"measured {json.dumps(asdict(request), default=str)}")
    session.result(report.to_json())
    session.show(tables(report))
    if output is not None:
        session.emit(json.dumps(report.to_json(), indent=2), output)
    if plot is not None:
        draw(report, plot)
        session.console.print(f"wrote {plot}")
    session.next(*compiling("tiny:qwen3_moe"))

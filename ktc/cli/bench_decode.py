"""`ktc bench decode`: measure decoding and prefill of a GGUF model, beside stock Hugging Face and llama.cpp.

In: the options. Out: progress on stderr, tables on stdout, and the file of `--output`. Invalid input and a missing
peer are refused before anything is compiled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ktc.cli.bench_files import bar_of, require_writable
from ktc.cli.compiling import settings_of
from ktc.cli.options import ResultsFile, RuleName, Settings
from ktc.cli.session import Session
from ktc.cli.session_options import in_session


@in_session()
def decode_command(
    session: Session,
    model: Annotated[str, typer.Option("--model", help="The sizes of the model: olmoe or qwen3_30b.")] = "olmoe",
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Only the first N layers, and the head.")] = 4,
    file_format: Annotated[
        str, typer.Option("--format", help="The format of the file's matrices: q4_0, q8_0, bf16 or q4_k.")
    ] = "q8_0",
    batches: Annotated[
        str, typer.Option("--batch", metavar="N,...", help="Numbers of sequences of a decode step.")
    ] = "1,8",
    contexts: Annotated[
        str, typer.Option("--context", metavar="N,...", help="Tokens that each sequence of a decode step has.")
    ] = "0,512,4096",
    prefill: Annotated[
        str, typer.Option("--prefill", metavar="N,...", help="Lengths of prompts that are read at once.")
    ] = "512,2048",
    impls: Annotated[
        str, typer.Option("--impl", metavar="NAME,...", help="ktc, and hf: the stock model in bf16.")
    ] = "ktc",
    peer: Annotated[
        str, typer.Option("--peer", metavar="NAME,...", help="Peers that run in a process of their own: llama.cpp.")
    ] = "",
    peer_python: Annotated[
        Path | None,
        typer.Option(
            "--peer-python", metavar="PATH", help="The Python of llama.cpp's environment. Default: build/llama's."
        ),
    ] = None,
    rule: RuleName = "moe-inference",
    settings: Settings = None,
    isa: Annotated[str, typer.Option("--isa", help="The instruction set of ktc's kernels. Default: the best.")] = "",
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="CPU threads. One thread measures CPU time, more measure wall time.")
    ] = 1,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measured rounds; the median is reported.")] = 5,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also show where a decode step of ktc goes, by part of the model.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="Write the model there and keep it for the next run."),
    ] = None,
    output: ResultsFile = None,
) -> None:
    """Measure decode steps and prompts of a GGUF model with random weights, beside peers on the same file."""
    session.require_versions()
    from ktc.cli.decode_table import tables
    from ktc.tools.bench.decode.request import Typed, parse

    typed = Typed(
        model=model,
        layers=layers,
        file_format=file_format,
        batches=batches,
        contexts=contexts,
        prefill=prefill,
        impls=impls,
        peer=peer,
        peer_python=peer_python,
        rule=rule,
        settings=settings_of(settings),
        isa=isa,
        threads=threads,
        rounds=rounds,
        profile=profile,
        folder=folder,
    )
    request = parse(typed)
    if output is not None:
        require_writable(output)
    session.go_on()
    from ktc.tools.bench.decode.run import run

    with bar_of(session) as progress:
        report = run(request, progress)
    session.result(report.to_json())
    session.show(tables(report))
    if output is not None:
        session.emit(json.dumps(report.to_json(), indent=2), output)
    session.next("ktc", "check", rule, "tiny:qwen3_moe")

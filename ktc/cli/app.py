"""The command line: each command reads its options and makes one call; nothing heavy is imported before that.

Exit codes: 0 done, 1 internal error or a failed proof, 2 input refused, 3 the host lacks something, 130 interrupted.
With `--json` stdout carries exactly one JSON object; everything else goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from ktc import host
from ktc.cli import bench, evaluate, export, generate, lf, merge, serve, train
from ktc.cli.options import (
    CompiledModel,
    HostFile,
    IsaName,
    Json,
    LogFile,
    Model,
    OptionalModel,
    Output,
    Quiet,
    Rules,
    Settings,
    Trust,
    Verbose,
    Weights,
)
from ktc.cli.session import INTERRUPTED, Session
from ktc.diagnostics import Diagnostic, InputRefused, render, to_json
from ktc.host import Host

app = typer.Typer(
    name="ktc",
    help="A compiler for mixture-of-experts language models: attention on small GPUs, experts on the CPU, LoRA on top.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
app.add_typer(lf.app, name="lf")
app.command("eval")(evaluate.command)
app.command("generate")(generate.command)
app.command("serve")(serve.command)
train.register(app)
app.command("export")(export.command)
app.command("merge")(merge.command)


Stage = Literal["captured", "matched", "planned", "rewritten"]
Format = Literal["text", "json", "dot", "svg", "html"]
CensusFormat = Literal["text", "json", "markdown"]


_RUNS_MODELS = frozenset({"train", "generate", "serve", "eval", "lf"})


def _print_version(wanted: bool) -> None:
    if wanted:
        from ktc import __version__

        typer.echo(f"ktc {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""


@app.command("compile")
def compile_command(
    model: Model,
    rules: Rules,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The package to write: a folder named like a Python module.")
    ],
    settings: Settings = None,
    isa: IsaName = None,
    host_file: HostFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is a compiled model.")] = False,
    trust: Trust = False,
    pack: Annotated[bool, typer.Option("--pack", help="Keep the packed experts in OUT, for quick starts.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Compile MODEL by RULES into an importable package."""
    with Session(as_json, verbose, quiet, log_file) as session:
        session.require_versions()
        from ktc import compiler
        from ktc.cli.report import StageReport

        report = StageReport(session)
        with report.progress():
            path = compiler.compile(
                model,
                rules,
                out,
                settings=_settings(settings),
                host=_host(host_file, isa),
                force=force,
                trust_remote_code=trust,
                observe=report.observe,
            )
        report.finish_compile(path)
        if pack:
            from ktc.cli.pack import pack as pack_experts

            pack_experts(session, path, trusted=trust)


@app.command("pack")
def pack_command(
    out: CompiledModel,
    weights: Weights = None,
    force: Annotated[bool, typer.Option("--force", help="Pack every layer anew.")] = False,
    trust: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Keep OUT's experts packed on disk, for quick starts; finished layers stay, an interrupted run is gone on with."""
    with Session(as_json, verbose, quiet, log_file) as session:
        from ktc.cli import pack

        pack.pack(session, out, weights, force, trust)


@app.command("verify")
def verify_command(
    out: CompiledModel,
    weights: Weights = None,
    source: Annotated[
        bool, typer.Option("--source", help="Pack the checkpoint again in memory and compare every byte.")
    ] = False,
    trust: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Check every file of OUT against what it was written as, packed experts byte for byte."""
    with Session(as_json, verbose, quiet, log_file) as session:
        from ktc.cli import pack

        pack.verify(session, out, weights, source, trust)


@app.command("check")
def check_command(
    rules: Rules,
    model: OptionalModel = None,
    host_file: HostFile = None,
    settings: Settings = None,
    length: Annotated[int | None, typer.Option("--length", min=1, help="Tokens per sequence that must fit.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Sequences at once that must fit.")] = None,
    trust: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Check RULES; with MODEL also whether and where they fit it, what the plan would be, and what memory it needs."""
    with Session(as_json, verbose, quiet, log_file) as session:
        session.require_versions()
        from ktc import compiler, dsl
        from ktc.cli.report import StageReport

        report = StageReport(session)
        if model is None:
            report.observe("rules", dsl.load(rules, _settings(settings)))
        else:
            from ktc.plan import Point

            with report.progress():
                target = _host(host_file, None)
                asked = Point(batch, length)
                compiler.analyse(
                    model, rules, _settings(settings), target, report.observe, asked, trust_remote_code=trust
                )
        report.finish_check()


@app.command("graph")
def graph_command(
    model: Annotated[str | None, typer.Argument(help="A compiled model, or a model as `ktc compile` takes it.")] = None,
    rules: Annotated[str, typer.Option("--rules", help="The rules by which a model is shown.")] = "moe-lora",
    stage: Annotated[Stage, typer.Option("--stage", help="The stage to show.")] = "rewritten",
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="Only this layer.")] = None,
    form: Annotated[Format, typer.Option("--format", help="The form of the graph.")] = "text",
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", metavar="A B", help="Compare two compiled models, graph files, or stages of MODEL."),
    ] = None,
    trust: Trust = False,
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Show the graph of a model at a stage, or what changed between two."""
    with Session(as_json, verbose, quiet, log_file) as session:
        session.require_versions()
        from ktc.cli import graph

        color = session.color and output is None
        request = graph.Request(model, rules, stage, layer, "json" if as_json else form, diff, color, trust)
        text = graph.render(request)
        if as_json:
            session.result(json.loads(text))
        if output is not None or not as_json:
            session.emit(text, output)


@app.command("import-kt-yaml")
def import_kt_yaml_command(
    file: Annotated[Path, typer.Argument(help="A YAML file of KTransformers optimize rules.")],
    model: Model,
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Turn the optimize rules in FILE into a rule file for MODEL, verified module by module."""
    with Session(as_json, verbose, quiet, log_file) as session:
        session.require_versions()
        from ktc.kt_yaml import import_kt_yaml

        found = import_kt_yaml(file, model)
        session.diagnose(found.warnings, found.sources)
        session.result(found.to_json())
        if output is not None or not as_json:
            session.emit(found.program, output)
        if not quiet:
            typer.echo(str(found.report), err=True, nl=False)


@app.command("fmt")
def fmt_command(
    files: Annotated[list[Path], typer.Argument(help="Rule files, or folders of them.")],
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a file is not laid out so.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Lay rule files out canonically; comments stay where they are."""
    with Session(as_json, quiet=quiet) as session:
        from ktc.dsl import formatter

        changed: list[str] = []
        session.result({"check": check, "changed": changed})
        for path in formatter.rule_files(files):
            if formatter.format_file(path, write=not check):
                changed.append(str(path))
                session.console.print(f"{path}: " + ("is not laid out canonically" if check else "rewritten"))
                session.exit_code = 1 if check else 0


@app.command("explain")
def explain_command(
    code: Annotated[str, typer.Argument(help="A code as messages show it, for example E042.")],
    as_json: Json = False,
) -> None:
    """Say what the code of a message means, with a bad and a good example."""
    with Session(as_json) as session:
        from ktc.dsl.explain import explain

        found = explain(code)
        session.result(asdict(found))
        if not as_json:
            session.emit(str(found), None)


@app.command("census")
def census_command(
    families: Annotated[
        list[str] | None,
        typer.Option("--family", metavar="NAME", help="Only this model type; may be given again. Default: all."),
    ] = None,
    form: Annotated[CensusFormat, typer.Option("--format", help="The form of the table.")] = "text",
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    log_file: LogFile = None,
) -> None:
    """Take every mixture-of-experts family of the installed transformers through the compiler, as small twins."""
    with Session(as_json, verbose, quiet, log_file) as session:
        session.require_versions()
        from ktc.cli import census

        census.run(session, families or (), form, output)


@app.command("doctor")
def doctor_command(as_json: Json = False) -> None:
    """Say what of this machine works for ktc, what is missing and how to get it."""
    with Session(as_json) as session:
        from ktc.cli import doctor
        from ktc.cli.tables import doctor_table

        here, findings = doctor.examine()
        session.show(doctor_table(findings))
        session.result(doctor.to_json(here, findings))
        session.exit_code = 3 if any(finding.state == "missing" for finding in findings) else 0


def _settings(pairs: list[str] | None) -> dict[str, str]:
    """`["rank=8"]` -> `{"rank": "8"}`. Raises InputRefused (U004) for what has no `=`."""
    split = [pair.partition("=") for pair in pairs or ()]
    faults = [
        Diagnostic("U004", f"`--set` wants NAME=VALUE, found `{name}`")
        for name, equals, _ in split
        if not (name and equals)
    ]
    if faults:
        raise InputRefused(*faults)
    return {name.strip(): value for name, _, value in split}


def _host(described: Path | None, isa: str | None) -> Host:
    """The machine to plan for: that of the file, else this one with its GPUs; with `isa` as its best set if given."""
    target = host.read_host_file(described) if described else host.detect(probe_gpu=True)
    return host.restrict(target, isa) if isa else target


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _RUNS_MODELS:
        # PyTorch's threads spin for up to ten milliseconds behind every operation, on the cores that the experts'
        # kernel wants next: 10.6 instead of 1.1 ms for one token backward with 16 cores. Read when torch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if "--json" not in arguments:
        return _exit_code(lambda: app(arguments, prog_name="ktc"))
    try:
        return _exit_code(lambda: app(arguments, prog_name="ktc", standalone_mode=False))
    except Exception as error:  # typer's own classes are not public
        if getattr(error, "exit_code", None) != 2 or not hasattr(error, "format_message"):
            raise
        usage = Diagnostic("U001", str(error), hint="`ktc --help` lists what there is")
        typer.echo(render([usage]), err=True)
        typer.echo(json.dumps({"diagnostics": [to_json(usage)]}, indent=2))
        return 2


def _exit_code(run: Callable[[], object]) -> int:
    """What a run of the app ends with: typer exits, or returns its code where it may not exit."""
    try:
        code = run()
    except SystemExit as stop:
        code = stop.code
    return code if isinstance(code, int) else 0


def run() -> NoReturn:
    """The command `ktc`: ends the process with the exit code of `main`."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == INTERRUPTED:
        # Where the interrupt left code that was run through its C API, CPython remembers it as unhandled, whoever
        # handles it since, and would end by the signal instead of this code.
        os._exit(code)
    sys.exit(code)

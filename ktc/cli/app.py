"""The command line: every command by its name, and the exit codes.

Each command reads its options and makes one call. No heavy library is imported before that call.

Exit codes: 0 done, 1 internal error or a failed proof, 2 input refused, 3 the host lacks something, 130 interrupted.
With `--json` stdout carries exactly one JSON object; everything else goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from ktc.cli import (
    bench,
    census,
    compiling,
    consistency,
    doctor,
    evaluate,
    export,
    generate,
    init,
    lf,
    listing,
    merge,
    pack,
    plan,
    prove,
    quantize,
    rule_files,
    serve,
    train,
)
from ktc.cli.help_pages import Command, Group
from ktc.cli.session import INTERRUPTED
from ktc.cli.usage import is_usage_error, usage_fault
from ktc.diagnostics import render, to_json
from ktc.foundation import environment

app = typer.Typer(
    name="ktc",
    help="A compiler for mixture-of-experts language models: attention on small GPUs, experts on the CPU, LoRA on top.",
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_USE, _COMPILE, _INSPECT = "Use a model", "Compile", "Look into a compiled model"
_CHECKPOINTS, _RULES, _MACHINE = "Adapters and checkpoints", "Rules", "This machine"
_COMMANDS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("train", _USE, train.command()),
    ("generate", _USE, generate.command),
    ("chat", _USE, generate.chat_command),
    ("serve", _USE, serve.command),
    ("eval", _USE, evaluate.command),
    ("init", _COMPILE, init.init_command),
    ("compile", _COMPILE, compiling.compile_command),
    ("check", _COMPILE, compiling.check_command),
    ("plan", _COMPILE, plan.plan_command),
    ("graph", _COMPILE, compiling.graph_command),
    ("pack", _INSPECT, pack.pack_command),
    ("verify", _INSPECT, pack.verify_command),
    ("prove", _INSPECT, prove.prove_command),
    ("consistency", _INSPECT, consistency.command),
    ("export", _CHECKPOINTS, export.command),
    ("merge", _CHECKPOINTS, merge.command),
    ("quantize", _CHECKPOINTS, quantize.command),
    ("fmt", _RULES, rule_files.fmt_command),
    ("explain", _RULES, rule_files.explain_command),
    ("import-kt-yaml", _RULES, rule_files.import_kt_yaml_command),
    ("list", _MACHINE, listing.list_command),
    ("doctor", _MACHINE, doctor.doctor_command),
    ("census", _MACHINE, census.census_command),
)
for _name, _group, _command in _COMMANDS:
    app.command(_name, cls=Command, rich_help_panel=_group)(_command)
app.add_typer(bench.app, name="bench", cls=Group, rich_help_panel=_MACHINE)
app.add_typer(lf.app, name="lf", cls=Group, rich_help_panel=_MACHINE)

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the newer name, and the one before torch 2.9
_RUNS_MODELS = frozenset(
    {
        *("train", "generate", "chat", "serve", "eval", "prove", "consistency", "lf"),
        *("bench finetune", "bench generate", "bench decode"),
    }
)


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
    """Read the options before the command."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not _RUNS_MODELS.isdisjoint((" ".join(arguments[:1]), " ".join(arguments[:2]))):
        environment.let_openmp_sleep()
        # A step has tensors of many sizes; with segments that grow, torch reserves 6.8 instead of 8.3 GB for them.
        if not any(name in os.environ for name in _ALLOCATOR):
            os.environ |= dict.fromkeys(_ALLOCATOR, "expandable_segments:True")
    try:
        return _exit_code(lambda: app(arguments, prog_name="ktc", standalone_mode=False))
    except Exception as error:
        if not is_usage_error(error):
            raise
        fault = usage_fault(error)
        typer.echo(render([fault]), err=True)
        if "--json" in arguments:
            typer.echo(json.dumps({"diagnostics": [to_json(fault)]}, indent=2))
        return 2


def _exit_code(run: Callable[[], object]) -> int:
    """Run the app and return its exit code. Typer raises SystemExit, or returns the code without `standalone_mode`."""
    try:
        code = run()
    except SystemExit as stop:
        code = stop.code
    return code if isinstance(code, int) else 0


def run() -> NoReturn:
    """Run the command `ktc` and end the process with the exit code of `main`."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == INTERRUPTED:
        # If the interrupt left code that was run through the C API, CPython records it as unhandled, even if it is
        # handled later. CPython would then end the process by the signal instead of this code.
        os._exit(code)
    sys.exit(code)

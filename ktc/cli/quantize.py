"""`ktc quantize`: write a checkpoint in INT4. Other commands that write INT4 take its options and its output.

In: the options. Out: a bar on stderr, the counts and sizes, and with `--json` one object.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from ktc.cli.amounts import size
from ktc.cli.early_checks import require_original
from ktc.cli.following import compiling
from ktc.cli.given_model import named_after, original_folder
from ktc.cli.options import ForceOutput, OriginalModel
from ktc.cli.session import Session
from ktc.cli.session_options import in_session

SchemeName = Annotated[
    Literal["int4-g32", "int4-g64", "int4-g128", "int4-channel"],
    typer.Option("--scheme", help="Symmetric INT4 with a scale for 32, 64 or 128 columns, or for a row."),
]
_MODULES = "Routed experts, or all linear layers but the head and routers too"
ModulesName = Annotated[Literal["experts", "linears"], typer.Option("--modules", help=f"{_MODULES}.")]
MergedModules = Annotated[
    Literal["experts", "linears", "trained"],
    typer.Option("--modules", help=f"{_MODULES}, or what the adapter's training rounded."),
]
RequantizeMerged = Annotated[
    bool,
    typer.Option(
        "--requantize-merged",
        help="Merge and round again an adapter that was trained beside rounded weights; the drift is reported.",
    ),
]


@in_session()
def command(
    session: Session,
    model: OriginalModel,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The folder to write: a complete checkpoint. Default: MODEL's name and the scheme."
        ),
    ] = None,
    scheme: SchemeName = "int4-g32",
    modules: ModulesName = "experts",
    force: ForceOutput = False,
) -> None:
    """Write MODEL in INT4 as compressed-tensors' pack-quantized, which transformers, vLLM and ktc load."""
    from ktc.adapters.save import require_new

    output = output or _default_output(model, scheme)
    require_original(model)
    require_new(output, force, (Path(model),))
    session.require_versions()
    write_int4(session, original_folder(model), output, scheme, modules, force=force)


def _default_output(model: str, scheme: str) -> Path:
    """Return a folder beside the model's, or in the current one for a model that was given by name."""
    if Path(model).exists():
        return Path(model).with_name(f"{Path(model).resolve().name}-{scheme}")
    return Path(f"{named_after(model).name}-{scheme}")


def write_int4(
    session: Session, model: Path, output: Path, scheme: SchemeName, modules: MergedModules,
    adapter: Path | None = None, requantise: bool = False, *, force: bool = False,
) -> None:  # fmt: skip
    """Write `model` in INT4 to `output`, with `adapter` merged into it, and show what was written."""
    from ktc.foundation.progress import progress_bar
    from ktc.inference.quantize.checkpoint import quantize
    from ktc.inference.quantize.scheme import SCHEMES

    with progress_bar(f"quantising into {output.name}", session.quiet) as bar:
        done = quantize(
            model, output, SCHEMES[scheme], modules, bar, adapter=adapter, requantise=requantise, force=force
        )
    session.result(asdict(done))
    resumed = f", {done.resumed_files} files found finished" if done.resumed_files else ""
    session.show(
        f"{done.path}: {done.quantised} of {done.tensors} tensors in {scheme}, "
        f"{size(done.bytes_before)} -> {size(done.bytes_after)}{resumed}"
    )
    drift = "" if done.drift is None else f", {done.drift:.2f} times what the adapter changes"
    if done.stacks:
        session.show(f"{done.stacks} stacks of experts became matrices of single experts")
    if not done.loads_in_transformers:
        session.show("stock transformers has no names for single experts in this family; ktc loads the folder")
    session.show(f"rounding changes the weights by {done.rounding_error:.1%}{drift} (Frobenius norms)")
    session.next(*compiling(done.path, "moe-inference"))

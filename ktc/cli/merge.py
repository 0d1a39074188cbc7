"""`ktc merge`: write the original model with an adapter added to its weights.

In: the options. Out: a bar on stderr, the counts of written tensors, and with `--json` one object.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ktc.cli.amounts import size
from ktc.cli.early_checks import require_adapter, require_original
from ktc.cli.given_model import original_folder
from ktc.cli.options import ForceOutput, OriginalModel
from ktc.cli.quantize import MergedModules, RequantizeMerged, SchemeName, write_int4
from ktc.cli.session import Session
from ktc.cli.session_options import in_session


@in_session()
def command(
    session: Session,
    model: OriginalModel,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A folder that PEFT saved.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The folder to write: a complete checkpoint. Default: ADAPTER's name and `-merged`."
        ),
    ] = None,
    int4: Annotated[
        bool, typer.Option("--int4", help="Round the sums to INT4, as `ktc quantize` rounds a checkpoint.")
    ] = False,
    scheme: SchemeName = "int4-g32",
    modules: MergedModules = "experts",
    requantize_merged: RequantizeMerged = False,
    force: ForceOutput = False,
) -> None:
    """Add ADAPTER to the weights of MODEL and write the checkpoint, tensor by tensor."""
    from ktc.adapters.save import require_new

    output = output or adapter.with_name(f"{adapter.resolve().name}-merged")
    require_original(model)
    require_adapter(adapter)
    require_new(output, force, (Path(model), adapter))
    session.require_versions()
    original = original_folder(model)
    if int4 or requantize_merged:
        write_int4(session, original, output, scheme, modules, adapter, requantize_merged, force=force)
        return
    from ktc.adapters.merge import merge
    from ktc.foundation.progress import progress_bar
    from ktc.inference.quantize.trained_grids import merged_grid, rounded_in_training

    grid = merged_grid(rounded_in_training(original, adapter))
    with progress_bar(f"merging into {output.name}", session.quiet) as bar:
        done = merge(adapter, output, original, bar, force=force)
    session.result(asdict(done))
    session.show(f"{done.path}: {done.changed} of {done.tensors} tensors changed, {size(done.bytes)}")
    if grid:
        session.tell(f"note: training rounded weights to `{grid}`, and these are not rounded: `--int4` rounds them")
    session.next("ktc", "verify", done.path, "--source")

"""`ktc export`: write an adapter in another layout, or a model as a GGUF file or in INT4.

In: the options. Out: the output of a `Session`; exit code 1 if `--check` finds a difference.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ktc.cli.amounts import count, size
from ktc.cli.early_checks import require_adapter, require_original
from ktc.cli.given_model import named_after, original_folder
from ktc.cli.options import ForceOutput
from ktc.cli.quantize import MergedModules, RequantizeMerged, SchemeName, write_int4
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused

if TYPE_CHECKING:
    from ktc.adapters.export import Exported
    from ktc.adapters.export_check import Checked

Layout = Literal["per-expert", "peft-fused", "peft-fused-018", "gguf"]
MatrixType = Literal["f32", "f16", "bf16", "q8_0"]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="An adapter: a folder that PEFT saved, or a GGUF adapter (with --model). With --gguf or --int4 a model "
        "too: a folder, a hub id, tiny:NAME, or a compiled model of it.",
    ),
]
OriginalModel = Annotated[
    Path | None,
    typer.Option("--model", metavar="MODEL", help="The original model or a compiled model of it, if it was moved."),
]


@in_session()
def command(
    session: Session,
    source: Source,
    layout: Annotated[
        Layout, typer.Option("--layout", help="The layout to write: per-expert loads in most tools, gguf in llama.cpp.")
    ] = "per-expert",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder or file to write. Default: SOURCE's name and the layout."),
    ] = None,
    gguf: Annotated[bool, typer.Option("--gguf", help="Write a GGUF file, of a model or an adapter.")] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="With --gguf, write the model of an adapter, merged, instead of factors.")
    ] = False,
    kind: Annotated[
        MatrixType, typer.Option("--type", help="With --gguf, the type of matrices. INT4 weights become Q4_0, exactly.")
    ] = "bf16",
    split_size: Annotated[
        float, typer.Option("--split-size", min=0, metavar="GB", help="With --gguf, of a shard; 0: one file.")
    ] = 0,
    int4: Annotated[bool, typer.Option("--int4", help="Write a model, or an adapter's model merged, in INT4.")] = False,
    scheme: SchemeName = "int4-g32",
    modules: MergedModules = "experts",
    requantize_merged: RequantizeMerged = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Load the export with stock peft on a small model of its family and compare the logits."
        ),
    ] = False,
    model: OriginalModel = None,
    force: ForceOutput = False,
) -> None:
    """Write an adapter in the layout of another tool, or a model as GGUF or INT4."""
    is_adapter = source.suffix == ".gguf" or (source / "adapter_config.json").is_file()
    if check and (int4 or (gguf and (merged or not is_adapter))):
        message = "`--check` compares adapters, and this export is a model"
        raise InputRefused(Diagnostic("Q512", message, hint="`ktc verify OUT --source` compares it with its original"))
    _check_places(source, output, model, force=force, is_model=not is_adapter and (int4 or gguf))
    session.require_versions()
    model = None if model is None else original_folder(model)
    if int4 or (gguf and (merged or not is_adapter)):
        original, adapter = (model or _original(source), source) if is_adapter else (original_folder(source), None)
        name = named_after(str(source.resolve() if source.exists() else source)).name
        if int4:
            write_int4(
                session, original, output or _beside(source, f"{name}-{scheme}"), scheme, modules, adapter,
                requantize_merged, force=force,
            )  # fmt: skip
        else:
            out = output or _beside(source, f"{name}-gguf")
            _write_gguf(session, original, out, kind, adapter, int(split_size * 1e9), force=force)
        return
    _export_adapter(session, source, "gguf" if gguf else layout, output, model, check, force=force)


def _check_places(source: Path, output: Path | None, model: Path | None, *, force: bool, is_model: bool) -> None:
    """Raise InputRefused (A601, A603, A609) for folders that cannot be read or written."""
    from ktc.adapters.save import require_new

    if is_model:
        require_original(source)
    elif source.suffix != ".gguf" or not source.is_file():
        require_adapter(source)
    require_original(model, "--model")
    if output is not None:
        require_new(output, force, (source, model))


def _beside(source: Path, name: str) -> Path:
    """Return a path beside a source, or in the current folder for one that is given by name."""
    return source.with_name(name) if source.exists() else Path(name)


def _original(adapter: Path) -> Path:
    """Return the folder of the model that an adapter names."""
    from ktc.adapters.adapter import read_adapter, require_lora
    from ktc.adapters.base_model import find_base

    return find_base(require_lora(read_adapter(adapter))).folder


def _write_gguf(
    session: Session,
    model: Path,
    output: Path,
    kind: MatrixType,
    adapter: Path | None,
    shard_bytes: int,
    *,
    force: bool,
) -> None:
    from ktc.foundation.progress import progress_bar
    from ktc.inference.quantize.gguf_model import write_gguf_model

    with progress_bar(f"writing {output.name}", session.quiet) as bar:
        done = write_gguf_model(model, output, kind, bar, adapter=adapter, shard_bytes=shard_bytes, force=force)
    session.result(asdict(done))
    types = ", ".join(f"{number} {name}" for name, number in sorted(done.types.items()))
    files = done.files[0] if len(done.files) == 1 else count(len(done.files), "file")
    files = "" if done.files == (done.path.name,) else f"{files}, "
    session.show(f"{done.path}: {files}{count(done.tensors, 'tensor')} ({types}), {size(done.bytes)}")
    if done.tokenizer == "none":
        session.tell("note: no tokenizer in the file (none is there, or llama.cpp lacks its kind): it takes numbers")
    if done.left_out:
        session.tell(f"note: left out, since the model has no place for them: {len(done.left_out)} tensors")
    for note in done.notes:
        session.tell(f"note: {note}")
    if done.path.is_dir():
        session.next("ktc", "verify", done.path, "--source")


def _export_adapter(
    session: Session,
    adapter: Path,
    layout: Layout,
    output: Path | None,
    model: Path | None,
    check: bool,
    *,
    force: bool,
) -> None:
    from ktc.adapters.export import export

    done = export(adapter, layout, output, model, force=force)
    session.result(asdict(done))
    session.show(_summary(done))
    if check:
        from ktc.adapters.export_check import check as compare

        checked = compare(adapter, done, model)
        session.result({"check": asdict(checked)})
        session.show(_verdict(checked))
        session.exit_code = 0 if checked.passed else 1
    elif layout != "gguf":
        moved = () if model is None else ("--model", model)
        checked = f"{done.path}-checked"
        session.next("ktc", "export", adapter, *moved, "--layout", layout, "--check", "-o", checked)


def _summary(done: Exported) -> str:
    lines = [
        f"{done.found} -> {done.layout}: {done.path}",
        f"{done.weights} adapted weights, {done.tensors} tensors, {size(done.bytes)}",
        *(f"note: {note}" for note in done.notes),
    ]
    return "\n".join(lines)


def _verdict(checked: Checked) -> str:
    where = f"in stock peft {checked.peft}" if checked.peft else "read back"
    numbers = f"largest difference {checked.difference:.2g}, the adapter's own effect {checked.effect:.2g}"
    if checked.passed:
        return f"the same {where}: relative error {checked.relative:.1e} ({numbers}; {checked.weights} weights)"
    return f"NOT the same: {checked.found} (relative error {checked.relative:.1e}; {numbers})"

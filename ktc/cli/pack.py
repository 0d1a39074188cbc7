"""`ktc pack` and `ktc verify`: write the packed store of a compiled model, and check every file in its folder.

In: the options. Out: the output of a `Session`. An interrupt keeps the layers that are finished, and prints the
command that continues.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ktc.cli.amounts import count, relative, size
from ktc.cli.early_checks import require_compiled
from ktc.cli.following import answering, compiling, loading
from ktc.cli.given_model import GivenModel, Wish, compiled, is_compiled
from ktc.cli.options import CompiledModel, TextOnly, Trust, Use, Weights
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused


@in_session(writes=("model",))
def pack_command(
    session: Session,
    model: GivenModel,
    use: Annotated[
        Use | None,
        typer.Option(
            "--for", help="The use that a MODEL is compiled for first; others share its store. Default: generate."
        ),
    ] = None,
    like: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="OUT", help="Share the layers that this model's store has alike; repeatable."),
    ] = None,
    text_only: TextOnly = False,
    weights: Weights = None,
    force: Annotated[bool, typer.Option("--force", help="Pack every layer again.")] = False,
    trust: Trust = False,
) -> None:
    """Store the packed experts on disk for faster loading; an interrupted run can continue."""
    others = tuple(like or ())
    if force and others:
        message = "`--force` packs every layer, and `--from` takes layers that are packed"
        raise InputRefused(Diagnostic("U006", message, hint="leave one of them out"))
    for folder in others:
        require_compiled(folder)
    wish = Wish.of(use or "generate", recompile=False, trust=trust, weights=weights, text_only=text_only)
    if is_compiled(model):
        require_compiled(Path(model))
        if use is not None:
            message = f"`--for` is for a model that is compiled first, and `{model}` is compiled already"
            raise InputRefused(Diagnostic("U006", message, hint="leave it out"))
    folder, weights = compiled(session, model, wish), weights if is_compiled(model) else None
    pack(session, folder, Packing(weights, force, trust, others))
    session.next("ktc", "verify", relative(folder.absolute()), *loading(weights, trust))


@in_session()
def verify_command(
    session: Session,
    out: CompiledModel,
    weights: Weights = None,
    source: Annotated[
        bool, typer.Option("--source", help="Pack or convert the checkpoint again and compare every byte.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Check that every file of OUT is as it was written, packed experts byte for byte.

    OUT may be a folder that `ktc merge`, `ktc quantize` or `ktc export --gguf` wrote.
    """
    from ktc.adapters.conversion import RECORD

    if not (out / RECORD).is_file():
        require_compiled(out)
    from ktc.cli.tables import findings_table
    from ktc.foundation.progress import progress_bar
    from ktc.inference.quantize.verify import verify_conversion
    from ktc.model.manifest import manifest
    from ktc.model.packing.verify import verify

    with progress_bar(f"verifying {out.name}", session.quiet) as bar:
        if (out / RECORD).is_file() and not (out / manifest.FILE).is_file():
            findings = verify_conversion(out, model=weights, source=source, progress=bar)
        else:
            findings = verify(out, weights=weights, source=source, trust_remote_code=trust, progress=bar)
    session.show(findings_table(findings))
    session.result({"out": out, "findings": [asdict(finding) for finding in findings]})
    session.exit_code = 0 if all(finding.state == "good" for finding in findings) else 1
    if (out / manifest.FILE).is_file():
        session.next(*answering(out, weights=weights, trust=trust))
    elif (out / "config.json").is_file():
        session.next(*compiling(relative(out.absolute()), trust=trust))


@dataclass(frozen=True, slots=True)
class Packing:
    """The options of a run: another checkpoint, every layer again, the model's own code, stores to share with."""

    weights: Path | None = None
    force: bool = False
    trusted: bool = False
    others: tuple[Path, ...] = ()


def pack(session: Session, out: Path, options: Packing = Packing()) -> None:
    """Pack the layers that the store of `out` lacks and report them."""
    from ktc.foundation.progress import progress_bar
    from ktc.model.packed_store.packed_store import renewal
    from ktc.model.packing.pack import pack as pack_store

    started = time.perf_counter()
    session.raise_if_interrupted()
    try:
        with progress_bar(f"packing {out.name}", session.quiet) as bar:
            report = pack_store(
                out, weights=options.weights, force=options.force, trust_remote_code=options.trusted,
                others=options.others, progress=bar,
            )  # fmt: skip
    except KeyboardInterrupt:
        session.console.print(
            f"packed layers are kept; to continue: `{renewal(relative(out.absolute()))}`", markup=False
        )
        raise
    seconds = time.perf_counter() - started
    session.result({"packed": {**asdict(report), "seconds": seconds}})
    done = f"{count(len(report.packed), 'layer')} packed in {seconds:.1f} s, {len(report.kept)} there already"
    done += f", {len(report.linked)} shared with another model" if report.linked else ""
    session.show(f"{relative(report.folder)} holds {size(report.size)}: {done}")

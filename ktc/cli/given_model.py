"""The first argument of `ktc train`, `generate`, `serve`, `pack`: a compiled model, or a MODEL that is compiled first.

In: what the user typed. Out: the folder OUT to work with. A MODEL is compiled by the bundled program `auto` for the use
of the command, into the user's cache (`ktc.stages.link.cached`). Refused (U006): options without an effect.
"""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ktc.cli import completion
from ktc.cli.amounts import relative, size
from ktc.cli.options import AUTO, Use
from ktc.cli.session import Session
from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.foundation import environment

if TYPE_CHECKING:
    from ktc.foundation.host import Host

_T = TypeVar("_T")
_MANIFEST = "ktc.json"
_ROWS = "weights.json"  # of a compiled model, also of one whose manifest is missing

GivenModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|OUT", help="A compiled model, or a model as for `compile`.", autocompletion=completion.models
    ),
]
Recompile = Annotated[bool, typer.Option("--recompile", help="Compile MODEL again, also if the cache has it compiled.")]


@dataclass(frozen=True, slots=True)
class Wish:
    """The compilation that a command needs for a MODEL: its use, the settings of `auto`, and the user's options."""

    use: Use
    settings: Mapping[str, str]
    recompile: bool = False
    trust: bool = False
    weights: Path | None = None
    text_only: bool = False

    @classmethod
    def of(
        cls, use: Use, *, recompile: bool, trust: bool, weights: Path | None, text_only: bool = False,
        experts: bool = False,
    ) -> Wish:  # fmt: skip
        """Return the wish of a command; `experts` adds adapters on the routed experts."""
        settings = {"use": use} | ({"experts": "true"} if experts else {})
        return cls(use, settings, recompile, trust, weights, text_only)


def is_compiled(given: str) -> bool:
    """Return whether the argument names a compiled model: neither a model's folder nor a name."""
    folder = Path(given)
    if folder.is_dir():
        if (folder / _MANIFEST).is_file() or (folder / _ROWS).is_file():
            return True
        return not (folder / "config.json").is_file() and not any(folder.glob("*.gguf"))
    if folder.suffix == ".gguf" and folder.is_file():
        return False
    looks_like_id = given.count("/") == 1 and not given.startswith((".", "/", "~"))
    return not given.startswith("tiny:") and not (looks_like_id and not folder.parent.exists())


def named_after(given: str) -> Path:
    """Return a path whose last part is the name of the model, for results that are named after it."""
    return Path(given.removeprefix("tiny:"))


def display_name(given: str) -> str:
    """Return the name under which a model is shown and served: a folder's last part, or the name that was given."""
    return Path(given).resolve().name if Path(given).is_dir() else given.removeprefix("tiny:")


def original_folder(given: str | Path) -> Path:
    """Return the folder of MODEL with its weights: a hub id is fetched, and `tiny:NAME` is made.

    Raises InputRefused (I101, I110).
    """
    if Path(given).is_dir() or is_compiled(str(given)):
        return Path(given)
    from ktc.stages.capture import open_model

    folder = open_model(str(given)).folder
    assert folder is not None  # only a model object may have none
    return folder


def shown(given: str) -> str | Path:
    """Return the argument for the next command, which takes it as this one did."""
    return Path(given) if is_compiled(given) else given


def run_compiled(session: Session, given: str, wish: Wish, run: Callable[[Path], _T]) -> _T:
    """Return `run` of the compiled model; where its plan was too large for a GPU, of the model in a smaller plan.

    Raises as `compiled` and `run` do; of a GPU's memory only where no smaller plan is left, or the user chose the plan.
    """
    from ktc.foundation.measured_host import this_host

    host = None if is_compiled(given) else this_host()  # once: later, the model itself takes memory of its GPUs
    while True:
        out = compiled(session, given, wish, host)
        try:
            return run(out)
        except RuntimeError as error:
            from ktc.foundation.memory_faults import memory_fault

            fault = memory_fault(error)
            smaller = None if fault is None or fault.code != "U116" else _smaller(host, out)
            if fault is None or smaller is None:
                raise
        _release_gpu_memory()  # outside of `except`, which refers to the failed run
        host = smaller
        message = f"{fault.message}; a plan with less on the GPU runs instead"
        hint = "end other programs on the GPU before the next run"
        session.diagnose([Diagnostic("U118", message, hint=hint, severity="warning")])


@contextmanager
def shown_once(session: Session) -> Generator[Callable[[str], None]]:
    """Yield what writes an answer. Raises HostLacks where memory ends after its first token: it is not repeated."""
    from ktc.foundation.memory_faults import memory_fault

    written = 0

    def write(text: str) -> None:
        nonlocal written
        written += len(text)
        session.stream(text)

    try:
        yield write
    except (RuntimeError, MemoryError) as error:
        fault = memory_fault(error)
        if fault is None or not written:
            raise
        session.stream("\n")
        raise HostLacks(fault) from error


def _smaller(host: Host | None, out: Path) -> Host | None:
    """Return the host whose GPUs have less room than the plan of `out` uses; None where ktc may not choose."""
    from ktc.model.manifest.manifest import read_manifest
    from ktc.stages.choose import with_less_room

    if host is None or environment.world_size() > 1:
        return None
    return with_less_room(host, read_manifest(out).memory)


def tell_random_weights(session: Session, out: Path, adapters: Sequence[object], weights: Path | None) -> None:
    """Report that a small model answers from random weights, where no adapter or other weights change them."""
    from ktc.model.manifest.manifest import read_manifest

    if weights is not None or any(adapters):
        return
    if name := environment.small_model(Path(read_manifest(out).model.name)):
        message = f"`tiny:{name}` has random weights: its answers mean nothing"
        hint = "`ktc train MODEL --data FILE` makes an adapter for `--adapter`; a trained model is a folder or a hub id"
        session.diagnose([Diagnostic("G712", message, hint=hint, severity="note")])


def _release_gpu_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compiled(session: Session, given: str, wish: Wish, host: Host | None = None) -> Path:
    """Return the folder of the compiled model. Raises InputRefused (U006), and as `ktc.compile` does.

    `host` is the machine to plan for, by default this one.
    """
    if is_compiled(given):
        _refuse_idle(given, wish)
        return Path(given)
    if (out := environment.started_for()) is not None:  # which compiled it
        return out
    if wish.weights is not None:
        message = f"`--weights` is for a compiled model, and `{given}` is a model with its weights"
        raise InputRefused(Diagnostic("U006", message, hint="leave it out"))
    from ktc import compiler
    from ktc.cli.report import StageReport
    from ktc.foundation.measured_host import this_host
    from ktc.language import dsl
    from ktc.stages.capture import open_model
    from ktc.stages.link import cached

    host = host or this_host()
    source = open_model(given, trust_remote_code=wish.trust, text_only=wish.text_only)
    out = cached.cached_out(source, dsl.load(AUTO, wish.settings), wish.settings, host)
    with cached.locked_out(out) as exists:
        if exists and not wish.recompile:
            session.tell(f"compiled before, in {relative(out)}; `--recompile` compiles it again")
            _take_packed(session, out, wish.trust)
            return out
        if not exists:
            _tell_other_builds(session, cached.of_other_builds(out))
        report = StageReport(session)
        with report.progress():
            compiler.compile(
                given, AUTO, out, settings=wish.settings, host=host, force=exists, trust_remote_code=wish.trust,
                text_only=wish.text_only, observe=report.observe,
            )  # fmt: skip
        report.warn()
        session.tell(f"compiled into {relative(out)}, again with `--recompile`")
        _take_packed(session, out, wish.trust)
    return out


def _tell_other_builds(session: Session, others: Sequence[Path]) -> None:
    """Report that another version compiled this model before, which is not used, and how to free its space."""
    if others:
        total = sum(file.lstat().st_size for other in others for file in other.rglob("*") if file.is_file())
        command = shlex.join(["rm", "-r", *map(str, others)])
        session.tell(
            "compiled before by another version of ktc or of a library: it is compiled again; "
            f"when no program uses the old one, `{command}` frees up to {size(total)}"
        )


def _take_packed(session: Session, out: Path, trusted: bool) -> None:
    """Link the packed store of another model of the cache, if it has the same layers and `out` has no store."""
    from ktc.model.packed_store import packed_store
    from ktc.stages.link import cached

    others = () if (out / packed_store.FOLDER).exists() else cached.with_packed_store(out)
    if not others:
        return
    from ktc.model.packing import pack

    if report := pack.link(out, others, trust_remote_code=trusted):
        session.tell(f"packed experts ({size(report.size)}) are shared with another use of this model")


def _refuse_idle(given: str, wish: Wish) -> None:
    """Raise InputRefused (U006) for options that only a MODEL has."""
    named = (
        ("--recompile", wish.recompile),
        ("--experts", "experts" in wish.settings),
        ("--text-only", wish.text_only),
    )
    idle = [option for option, is_given in named if is_given]
    if idle and (Path(given) / _MANIFEST).is_file():
        further = "".join(f" {option}" for option in idle if option != "--recompile")
        hint = f"compile again: `ktc compile MODEL -o {given} --force{further}`"
        message = f"`{idle[0]}` is for a model that is compiled first, and `{given}` is compiled already"
        raise InputRefused(Diagnostic("U006", message, hint=hint))

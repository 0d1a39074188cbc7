"""The folder of a training run: claimed by one run at a time, its settings, checkpoints and adapter.

In: a path, and whether to go on or to begin anew. Out: `RunFolder`. Refused: a folder with something else in it (T521),
one that another run uses (T522), no run or no checkpoint to go on with (T523), a half-written checkpoint (T524), other
data or another adapter than the run began with (T525).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ktc.checkpoint.header import HeaderRefused, read_header
from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.files import write_whole
from ktc.tune.settings import TrainSettings

SETTINGS = "train.yaml"
_LOCK = ".lock"
_OURS = ("checkpoint-*", "adapter_*", "README.md", "runs", "ktc_report.json", "report.html", "loss.svg", SETTINGS)
_WEIGHTS, _STATE = "adapter_model.safetensors", "trainer_state.json"
_PICKLED = ("optimizer.pt", "scheduler.pt")

# What decides the numbers of a run that goes on: another value would be another run.
_LASTING = (
    "data", "format", "template", "eval_data", "eval_split", "length", "truncate", "packing", "train_on_prompt",
    "rank", "alpha", "dropout", "rslora", "targets", "batch", "accumulation", "precision", "router_aux_loss", "seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A claimed folder. `resume` is the checkpoint to go on with, or None."""

    path: Path
    resume: Path | None
    lock: FileLock

    def release(self) -> None:
        """Others may have it."""
        self.lock.release()
        (self.path / _LOCK).unlink(missing_ok=True)

    def keep_settings(self, settings: TrainSettings) -> None:
        """Writes `train.yaml`, by which the folder is known as a run's."""
        write_whole(self.path / SETTINGS, settings.to_yaml())

    def keep_adapter(self, model: Any) -> None:
        """Saves a PEFT model's adapter, each file whole and the config last."""
        draft = self.path / f".adapter.{os.getpid()}"
        try:
            model.save_pretrained(str(draft))
            for file in sorted(draft.iterdir(), key=lambda each: each.suffix == ".json"):
                file.replace(self.path / file.name)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def claim(path: Path, *, resume: str | None = None, force: bool = False) -> RunFolder:
    """The folder for this run alone. `resume` is "auto" for the last checkpoint, or the path of one.

    `force` removes what an earlier run has left there, and nothing else. Raises InputRefused (T521 to T524).
    """
    require_usable(path, resume=resume, force=force)
    checkpoint = find_checkpoint(path, resume) if resume else None
    lock = FileLock(path / _LOCK)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        message = f"another run is using `{path}`"
        raise InputRefused(Diagnostic("T522", message, hint="wait for it, or name another `--output`")) from error
    except OSError as error:
        raise InputRefused(Diagnostic("U003", f"cannot write to `{path}`: {error.strerror}")) from error
    if force and not resume:
        _remove_run(path)
    return RunFolder(path, checkpoint, lock)


def require_usable(path: Path, *, resume: str | None = None, force: bool = False) -> None:
    """What `claim` would refuse, but for another run's use, is refused; nothing is written or removed."""
    if resume:
        find_checkpoint(path, resume)
    if path.exists() and not path.is_dir():
        raise InputRefused(Diagnostic("T521", f"`{path}` is a file; a run needs a folder"))
    found = any(each.name != _LOCK for each in path.glob("*")) if path.is_dir() else False
    is_run = (path / SETTINGS).is_file()
    if found and not resume and not (force and is_run):
        raise InputRefused(_occupied(path, is_run))


def _occupied(path: Path, is_run: bool) -> Diagnostic:
    if is_run:
        hint = "`--resume auto` goes on with it, `--force` begins anew, `--output` names another"
        return Diagnostic("T521", f"`{path}` holds a run already", hint=hint)
    return Diagnostic("T521", f"`{path}` is not empty, and no run of ktc", hint="name another `--output`")


def _remove_run(path: Path) -> None:
    """Only what runs write; the file that marks the folder goes last."""
    for pattern in _OURS:
        for each in path.glob(pattern):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()


# Going on ------------------------------------------------------------------------------------------------------------
def find_checkpoint(path: Path, resume: str) -> Path:
    """The whole checkpoint that `resume` means. Raises InputRefused (T523, T524)."""
    if resume != "auto":
        chosen = Path(resume)
        if not chosen.is_dir():
            raise InputRefused(Diagnostic("T523", f"there is no checkpoint `{chosen}`"))
        _require_whole(chosen, None)
        return chosen
    found = _checkpoints(path)
    if not found:
        hint = "`--resume` goes on with a run that was interrupted; leave it out to begin one"
        raise InputRefused(Diagnostic("T523", f"`{path}` has no checkpoint to go on with", hint=hint))
    whole = next((each for each in found[1:] if not checkpoint_faults(each)), None)
    _require_whole(found[0], whole)
    return found[0]


def _checkpoints(path: Path) -> list[Path]:
    """The last one first."""
    numbered = ((re.fullmatch(r"checkpoint-(\d+)", each.name), each) for each in path.glob("checkpoint-*"))
    return [each for _, each in sorted(((int(m[1]), each) for m, each in numbered if m), reverse=True)]


def _require_whole(checkpoint: Path, earlier: Path | None) -> None:
    faults = checkpoint_faults(checkpoint)
    if faults:
        hint = f"go on with `--resume {earlier}`" if earlier else "there is no earlier one: begin anew with `--force`"
        message = f"checkpoint `{checkpoint}` is half-written or damaged: {'; '.join(faults)}"
        raise InputRefused(Diagnostic("T524", message, hint=hint))


def checkpoint_faults(checkpoint: Path) -> tuple[str, ...]:
    """Why a checkpoint cannot be gone on with; none if it is whole."""
    return tuple(_faults(checkpoint))


def _faults(checkpoint: Path) -> Iterator[str]:
    needed = (_WEIGHTS, "adapter_config.json", _STATE, *_PICKLED)
    missing = [name for name in needed if not (checkpoint / name).is_file()]
    if not any(checkpoint.glob("rng_state*.pth")):
        missing.append("rng_state.pth")
    if missing:
        yield f"it lacks {listing(missing)}"
    for name in (_STATE, "adapter_config.json"):
        if name not in missing and not _is_json(checkpoint / name):
            yield f"`{name}` is no JSON"
    for name in _PICKLED:
        if name not in missing and not zipfile.is_zipfile(checkpoint / name):
            yield f"`{name}` is cut short"
    if _WEIGHTS not in missing and not _is_safetensors(checkpoint / _WEIGHTS):
        yield f"`{_WEIGHTS}` is cut short"


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _is_safetensors(path: Path) -> bool:
    try:
        read_header(path)
    except (HeaderRefused, OSError):
        return False
    return True


def require_same_run(path: Path, settings: TrainSettings, kept: TrainSettings) -> None:
    """Raises InputRefused (T525) where a run that goes on would not be the one that began."""
    changed = [name for name in _LASTING if getattr(settings, name) != getattr(kept, name)]
    if changed:
        was = ", ".join(f"`{name}` was `{getattr(kept, name)}`" for name in changed)
        hint = "leave these settings as they were, or begin a new run with another `--output`"
        raise InputRefused(Diagnostic("T525", f"the run in `{path}` began otherwise: {was}", hint=hint))


def settings_of_run(path: Path) -> dict[str, Any]:
    """What the run in `path` began with, as flags. Raises InputRefused (T501 to T503, T523)."""
    from ktc.tune.settings import read_settings

    if not (path / SETTINGS).is_file():
        raise InputRefused(Diagnostic("T523", f"`{path}` is no run of ktc: it has no `{SETTINGS}`"))
    kept = read_settings(path / SETTINGS, {})
    return {each.name: getattr(kept, each.name) for each in fields(kept)}

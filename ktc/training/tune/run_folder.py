"""The folder of a training run: claimed by one run at a time, its settings, checkpoints and adapter.

In: a path, and whether to resume or to start again. Out: `RunFolder`. Refused: a folder with other content (T521), one
that another run uses (T522), a missing run or checkpoint (T523), a half-written checkpoint (T524), data or an adapter
that differ from those of the run (T525).
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ktc.adapters.adapter import read_adapter
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.files import files_into, remove_stale_temp, write_file
from ktc.foundation.machine_faults import failed
from ktc.model.loading.trained_beside import write_record
from ktc.training.trainers import checkpoint_state
from ktc.training.trainers.checkpoints import checkpoints
from ktc.training.tune.settings import TrainSettings
from ktc.training.tune.tokenised import TokenisedData

SETTINGS = "train.yaml"
_LOCK = ".lock"
_OURS = (
    "checkpoint-*",
    "adapter_*",
    "README.md",
    "runs",
    "ktc_report.json",
    "report.html",
    "loss.svg",
    "timeline.svg",
    SETTINGS,
)

_DATA = "# data: "  # the first line of train.yaml

# The settings that determine the numbers of a run. Resuming needs the same values.
_FIXED = (
    "data", "method", "beta", "format", "column", "template", "eval_data", "eval_split", "streaming", "length",
    "truncate", "packing", "train_on_prompt", "rank", "alpha", "dropout", "rslora", "targets", "learning_rate",
    "scheduler", "warmup", "weight_decay", "max_grad_norm", "batch", "accumulation", "precision", "router_aux_loss",
    "seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A claimed folder. `resume` is the checkpoint to resume from, or None.

    `left_out` has a warning (T536) for each later checkpoint, which is damaged.
    """

    path: Path
    resume: Path | None
    lock: FileLock
    left_out: tuple[Diagnostic, ...] = ()

    def release(self) -> None:
        """Release the folder for other runs."""
        self.lock.release()
        with suppress(OSError):  # the error that a failing disk caused is on its way
            (self.path / _LOCK).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what the run has written, and the folder if it is empty then."""
        _remove_run(self.path)
        self.release()
        with suppress(OSError):
            self.path.rmdir()

    def keep_settings(self, settings: TrainSettings, rows: TokenisedData) -> None:
        """Write `train.yaml`, which marks the folder as a run's. A comment has the digest of its data."""
        write_file(self.path / SETTINGS, f"{_DATA}{_told(rows)}\n{settings.to_yaml()}")

    @property
    def has_adapter(self) -> bool:
        """Whether a run has ended here."""
        return (self.path / checkpoint_state.CONFIG).is_file()

    def keep_adapter(self, model: Any) -> None:
        """Save a PEFT model's adapter, each file atomically and the config last."""
        with files_into(self.path) as draft:
            model.save_pretrained(str(draft))
            write_record(draft, model)


def claim(path: Path, *, resume: str | None = None, force: bool = False) -> RunFolder:
    """Claim the folder for this run. `resume` is "auto" for the last checkpoint, or the path of one.

    `force` removes only files of an earlier run. Raise InputRefused (T521 to T524).
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
        raise failed(error, "U003", f"cannot write to `{path}`") from error
    remove_stale_temp(path)
    if force and not resume:
        _remove_run(path)
    return RunFolder(path, checkpoint, lock, _left_out(path, checkpoint) if resume == "auto" and checkpoint else ())


def require_usable(path: Path, *, resume: str | None = None, force: bool = False) -> None:
    """Raise what `claim` would raise, except for T522, and neither write nor remove anything."""
    if resume:
        find_checkpoint(path, resume)
    if path.exists() and not path.is_dir():
        raise InputRefused(Diagnostic("T521", f"`{path}` is a file; a run needs a folder"))
    is_empty = all(entry.name == _LOCK for entry in path.glob("*"))
    if is_empty or resume:
        return
    if not (path / SETTINGS).is_file():
        message = f"`{path}` is not empty, and it is not a run of ktc"
        raise InputRefused(Diagnostic("T521", message, hint="name another `--output`"))
    if not force:
        hint = "`--resume auto` resumes it, `--force` replaces it, `--output` names another folder"
        raise InputRefused(Diagnostic("T521", f"`{path}` already has a run", hint=hint))


def _remove_run(path: Path) -> None:
    """Remove only files that runs write; the file that marks the folder goes last."""
    for pattern in _OURS:
        for entry in path.glob(pattern):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


# Resuming -----------------------------------------------------------------------------------------------------------
def find_checkpoint(path: Path, resume: str) -> Path:
    """Return the complete checkpoint that `resume` names, the last one for "auto". Raise InputRefused (T523, T524)."""
    if resume != "auto":
        chosen = Path(resume)
        if not chosen.is_dir():
            raise InputRefused(Diagnostic("T523", f"there is no checkpoint `{chosen}`"))
        _require_whole(chosen, "use `--resume auto`, which takes the last whole one, or start again with `--force`")
        return chosen
    newest_first = checkpoints(path)
    if not newest_first:
        hint = "`--resume` continues an interrupted run; leave it out to start a new one"
        raise InputRefused(Diagnostic("T523", f"`{path}` has no checkpoint to resume from", hint=hint))
    whole = next((checkpoint for checkpoint in newest_first if not checkpoint_faults(checkpoint)), None)
    if whole is None:
        _require_whole(newest_first[0], "there is no whole one: start again with `--force`")
    return whole or newest_first[0]


def _left_out(path: Path, chosen: Path) -> tuple[Diagnostic, ...]:
    """Return a warning (T536) for each checkpoint after the chosen one, with its faults."""
    hint = f"the run continues from `{chosen}`, the last whole one"
    warnings: list[Diagnostic] = []
    for later in takewhile(lambda checkpoint: checkpoint != chosen, checkpoints(path)):
        faults = "; ".join(checkpoint_faults(later))
        message = f"checkpoint `{later}` is left out, because it is damaged: {faults}"
        warnings.append(Diagnostic("T536", message, hint=hint, severity="warning"))
    return tuple(warnings)


def _require_whole(checkpoint: Path, hint: str) -> None:
    faults = checkpoint_faults(checkpoint)
    if faults:
        message = f"checkpoint `{checkpoint}` is half-written or damaged: {'; '.join(faults)}"
        raise InputRefused(Diagnostic("T524", message, hint=hint))


def checkpoint_faults(checkpoint: Path) -> tuple[str, ...]:
    """Return the reasons why a checkpoint cannot be resumed, empty if it is complete."""
    faults = list(checkpoint_state.faults(checkpoint, complete=True))
    if all((checkpoint / name).exists() for name in (checkpoint_state.WEIGHTS, checkpoint_state.CONFIG)):
        try:
            read_adapter(checkpoint)
        except InputRefused as refused:
            faults += [diagnostic.message for diagnostic in refused.diagnostics]
    return tuple(faults)


def require_same_run(path: Path, settings: TrainSettings, kept: TrainSettings) -> None:
    """Raise InputRefused (T525) if the settings differ from those that the run began with."""
    changed = [name for name in _FIXED if getattr(settings, name) != getattr(kept, name)]
    if changed:
        was = ", ".join(f"`{name}` was `{getattr(kept, name)}`" for name in changed)
        hint = "restore these settings, or start a new run with another `--output`"
        raise InputRefused(Diagnostic("T525", f"the run in `{path}` began with other settings: {was}", hint=hint))


def require_same_data(path: Path, rows: TokenisedData) -> None:
    """Raise InputRefused (T525) if a run began with other tokens. Earlier versions of ktc did not keep their digest.

    Of images the tokens alone are in it, not what the files show.
    """
    first, *_ = (path / SETTINGS).read_text(encoding="utf-8").split("\n")
    was, now = first.removeprefix(_DATA), _told(rows)
    if first.startswith(_DATA) and was != now:
        message = f"the run in `{path}` began with other data: {was:.100}; now {now}"
        hint = "restore the data, the tokenizer and its chat template, or start a new run with another `--output`"
        raise InputRefused(Diagnostic("T525", message, hint=hint))


def _told(rows: TokenisedData) -> str:
    return f"{rows.summary.rows:,} rows, {rows.summary.tokens:,} tokens, digest {rows.digest[:16]}"


def settings_file(path: Path) -> Path:
    """Return the file with the settings of the run in `path`. Raise InputRefused (T523) if `path` is not a run."""
    if not (path / SETTINGS).is_file():
        raise InputRefused(Diagnostic("T523", f"`{path}` is not a run of ktc: it has no `{SETTINGS}`"))
    return path / SETTINGS

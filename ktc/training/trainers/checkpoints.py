"""Checkpoints that are whole or absent: written in a hidden folder by all processes of a run, and renamed by one.

In: the folder of a run, and how the trainer writes a checkpoint. Out: `checkpoint-N`. Older ones are removed after the
new one is in place, each as a whole. Where the machine fails, HostLacks (T529) names the last whole checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ktc.foundation.files import exchange, flush, flush_folder, folder_beside, unfinished_name
from ktc.foundation.machine_faults import failed, is_machine_fault

if TYPE_CHECKING:
    from transformers import TrainerState

_STATE: Final = "trainer_state.json"
_NAME: Final = re.compile(r"checkpoint-\d+")


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, the last one first."""
    named = [path for path in run.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)


def last_kept(run: Path | None) -> str:
    """Return in words which checkpoint of a run is the last one."""
    last = None if run is None else next(iter(checkpoints(run)), None)
    return f"the last checkpoint is `{last}`" if last else "there is no checkpoint yet"


def write_checkpoint(
    run: Path,
    state: TrainerState,
    save: Callable[[Path], None],
    barrier: Callable[[], None],
    *,
    writes: bool,
    keep: int | None,
) -> None:
    """Write `checkpoint-N` of the trainer's step N into `run`, and remove those beyond the last `keep`, not the best.

    `save` writes the folder of that name below the folder that it receives. Every process calls this; `barrier` waits
    for all of them, and the one that `writes` makes the folder and renames it.

    Raises:
        HostLacks: T529 where the machine fails. The checkpoints that were there remain.
    """
    target = run / f"checkpoint-{state.global_step}"
    mark = f"{state.global_step:08d}"[-8:]  # the same name in every process
    with faults_named(run, f"checkpoint `{target}` cannot be written"):
        run.mkdir(parents=True, exist_ok=True)
        with folder_beside(target, mark) if writes else nullcontext(run / unfinished_name(target, mark)) as work:
            barrier()  # the folder is there
            save(work)
            barrier()  # every process has written its part
            best = state.best_model_checkpoint
            if best is not None and Path(best).is_relative_to(work):  # the trainer knows the hidden folder alone
                state.best_model_checkpoint = str(target)
                if writes:
                    state.save_to_json(str(work / target.name / _STATE))
            if writes:
                flush_folder(work / target.name)
                _rename(work / target.name, target)
                _remove_old(run, keep, state.best_model_checkpoint)


@contextmanager
def faults_named(run: Path, message: str) -> Generator[None]:
    """Raise HostLacks (T529) for a fault of the machine inside the block, with the checkpoint to continue from."""
    try:
        yield
    except Exception as error:
        if not is_machine_fault(error):
            raise
        last = next(iter(checkpoints(run)), None)
        kept = f"the last whole checkpoint is `{last}`, and `--resume auto` continues from it"
        raise failed(error, "T529", message, safe=kept if last else "there is no checkpoint yet") from error


def _rename(finished: Path, target: Path) -> None:
    """Put a checkpoint in place of an earlier one of this step, which is removed with the hidden folder."""
    if target.is_dir() and not exchange(finished, target):
        os.rename(target, finished.with_name("old"))
    if finished.is_dir() and not target.exists():
        os.rename(finished, target)
    flush(target.parent)


def _remove_old(run: Path, keep: int | None, best: str | None) -> None:
    """Keep the last `keep` checkpoints, with the best one among them as the trainer counts, and always the last one."""
    if keep is None or keep <= 0:
        return
    last, *others = checkpoints(run)
    kept = {last, *(checkpoint for checkpoint in others if best is not None and checkpoint.name == Path(best).name)}
    for old in others:
        if old in kept:
            continue
        if len(kept) < keep:
            kept.add(old)
            continue
        with folder_beside(old) as work:  # a kill leaves no checkpoint in pieces
            os.rename(old, work / old.name)

"""The sources of training data that a user names: files, folders, patterns, bundled data and data sets of the hub.

In: a name, with `:WEIGHT` after it or not. Out: `DataSource`. Refused (T545): a folder or a pattern without data files,
a folder with files of several kinds, and a weight of 0
or above 1000. A part of a split of the hub is refused too (T546).
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused, listing, nearest
from ktc.training.tune.bundled import data_file
from ktc.training.tune.data_files import ENDINGS

_WEIGHTED: Final = re.compile(r"(.+):(\d+(?:\.\d*)?|\.\d+)", re.DOTALL)
_HUB: Final = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(?::(?:(?P<config>[\w.-]+)/)?(?P<split>[\w.-]+))?")
HUB_WORDS: Final = "write `owner/name:SPLIT` or `owner/name:CONFIG/SPLIT`"
_MOST_WEIGHT: Final = 1000
_PATTERN: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class HubName:
    """A data set of the Hugging Face hub. `config` is None for its only configuration."""

    name: str
    config: str | None
    split: str


@dataclass(frozen=True, slots=True)
class DataSource:
    """A named source: its files in order, or the data set. A row appears `weight` times in a pass over the data."""

    named: str
    weight: float
    files: tuple[Path, ...]
    hub: HubName | None = None


def data_source(given: str) -> DataSource:
    """Return the source that `given` names; a file whose name ends like a weight is itself. Raises InputRefused."""
    named, given_weight = split_weight(given)
    weight = 1.0 if given_weight is None else given_weight
    if not weight:
        hint = "leave the source out, or give it a weight above 0"
        raise InputRefused(Diagnostic("T545", f"`{given}` has the weight 0", hint=hint))
    if weight > _MOST_WEIGHT:
        hint = f"a row appears WEIGHT times in an epoch, at most {_MOST_WEIGHT}; `--epochs` repeats all data"
        raise InputRefused(Diagnostic("T545", f"`{given}` has a weight above {_MOST_WEIGHT}", hint=hint))
    path = data_file(Path(named))
    if path.is_dir():
        return DataSource(named, weight, _files_of_folder(path))
    if path.exists():
        return DataSource(named, weight, (path,))
    if _PATTERN.search(named):
        _refuse_slice(named)
        return DataSource(named, weight, _matching(named))
    hub = _HUB.fullmatch(named)
    if hub and path.suffix.lower() not in ENDINGS and not path.parent.is_dir():
        return DataSource(named, weight, (), HubName(hub["name"], hub["config"], hub["split"] or "train"))
    _require_ending_or_file(path)
    return DataSource(named, weight, (path,))


def _refuse_slice(named: str) -> None:
    """Raise InputRefused (T546) for a part of a split, as `owner/name:train[:10%]`, not a pattern of files."""
    hub = _HUB.fullmatch(named.partition("[")[0])
    if hub and hub["split"] and not Path(hub["name"]).parent.is_dir():
        message = f"the data set `{hub['name']}` is read by whole splits, not by parts of one as in `{named}`"
        raise InputRefused(Diagnostic("T546", message, hint=HUB_WORDS))


def split_weight(given: str) -> tuple[str, float | None]:
    """Return the name and the weight after it, None without one; a path that exists is a name whole."""
    weighted = _WEIGHTED.fullmatch(given)
    if weighted is None or Path(given).exists():
        return given, None
    return weighted[1], float(weighted[2])


def _files_of_folder(folder: Path) -> tuple[Path, ...]:
    files = _data_files(folder.rglob("*"), folder)
    endings = sorted({file.suffix.lower() for file in files})
    if not files:
        message = f"the folder `{folder}` has no file that ends in one of {listing(ENDINGS)}"
        raise InputRefused(Diagnostic("T545", message, hint="name a folder with data, or files"))
    if len(endings) > 1:
        hint = f"name one kind: `{folder}/**/*{endings[0]}`, in quotes"
        message = f"the folder `{folder}` has files of several kinds: {listing(endings)}"
        raise InputRefused(Diagnostic("T545", message, hint=hint))
    return files


def _matching(pattern: str) -> tuple[Path, ...]:
    matches = [Path(name) for name in glob.glob(pattern, recursive=True)]
    files = tuple(sorted(path for path in matches if path.is_file()))
    if files:
        return files
    parent = Path(pattern).parent
    while _PATTERN.search(str(parent)) or not parent.is_dir():
        parent = parent.parent
    inside = listing(sorted(path.name for path in parent.iterdir()), limit=6)
    hint = f"`{parent}` has {inside}; put the pattern in quotes, so that the shell leaves it"
    raise InputRefused(Diagnostic("T545", f"no file matches `{pattern}`", hint=hint))


def _data_files(paths: Iterable[Path], root: Path) -> tuple[Path, ...]:
    """Return the data files among `paths` in order, without those that are hidden or in a hidden folder."""
    shown = (path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts))
    return tuple(sorted(path for path in shown if path.suffix.lower() in ENDINGS and path.is_file()))


def _require_ending_or_file(path: Path) -> None:
    """Name the nearest file for one that is not there. Raises InputRefused (T510)."""
    folder = path.parent
    if path.suffix.lower() not in ENDINGS or not folder.is_dir():
        return  # reading it refuses it
    files = sorted(_data_files(folder.iterdir(), folder), key=lambda file: file.suffix.lower() == path.suffix.lower())
    named = {file.stem: file for file in files}  # of several with one stem, that with the same ending
    near = nearest(path.stem, named)  # without the endings, in which unlike names are alike
    if near is not None:
        hint = f"did you mean `{named[near]}`?"
        raise InputRefused(Diagnostic("T510", f"cannot read `{path}`: No such file or directory", hint=hint))

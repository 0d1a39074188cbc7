"""Candidates for the shell's completion of arguments: programs, small models, models and compiled models in folders.

In: what the user has typed so far. Out: the words that begin with it. Nothing is loaded, and torch is not imported: a
shell waits for the answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_COMPILED = "ktc.json"
_MODELS = (_COMPILED, "config.json")
_RULES = ".ktr"


def models(incomplete: str) -> list[str]:
    """Return small models, and folders that are models or may have some below."""
    from ktc.model.hf.model_names import TINY, TWIN_SETTINGS

    return [*_starting((f"{TINY}{name}" for name in TWIN_SETTINGS), incomplete), *_folders(incomplete)]


def compiled_models(incomplete: str) -> list[str]:
    """Return folders that are compiled models or may have some below."""
    return _folders(incomplete)


def programs(incomplete: str) -> list[str]:
    """Return bundled programs, rule files, and folders that may have some."""
    from ktc.language.dsl import bundled

    files = [path for path in _entries(incomplete) if path.endswith(_RULES)]
    return [*_starting(bundled(), incomplete), *files, *_folders(incomplete)]


def machines(incomplete: str) -> list[str]:
    """Return bundled machines, and files that may describe one."""
    from ktc.foundation.host_file import bundled_names

    files = [path for path in _entries(incomplete) if path.endswith(".toml")]
    return [*_starting(bundled_names(), incomplete), *files]


def _starting(names: Iterator[str] | tuple[str, ...] | list[str], incomplete: str) -> Iterator[str]:
    return (name for name in names if name.startswith(incomplete))


def _folders(incomplete: str) -> list[str]:
    """Return the folders that begin so: a model as it is, another one with a slash, to continue below it."""
    folders = [path for path in _entries(incomplete) if Path(path).is_dir()]
    return [path if any((Path(path) / file).is_file() for file in _MODELS) else f"{path}/" for path in folders]


def _entries(incomplete: str) -> Iterator[str]:
    """Yield the visible entries of the folder in `incomplete` whose names begin as its last part does."""
    folder, name = os.path.split(incomplete)
    try:
        entries = sorted(os.listdir(folder or "."))
    except OSError:
        return
    for entry in entries:
        if entry.startswith(name) and (name or not entry.startswith(".")):
            yield os.path.join(folder, entry)

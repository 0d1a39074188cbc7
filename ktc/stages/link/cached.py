"""Compiled models in the user's cache, for commands that were given a MODEL: `CACHE/compiled/NAME_DIGEST_BUILD`.

In: a model, a checked program with its settings, and a host. Out: the folder OUT for exactly these, and a lock. Two
models, programs, hosts, versions or builds of ktc never share a folder. Refused (I160): a cache that others may write
to, since OUT is code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from filelock import FileLock

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import resources
from ktc.foundation.environment import cache_dir
from ktc.foundation.files import file_digest
from ktc.foundation.host import Host
from ktc.foundation.machine_faults import failed
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.manifest import manifest
from ktc.model.packed_store import packed_store
from ktc.model.packed_store.packed_store import checkpoint_digest
from ktc.stages.capture import ModelSource

FOLDER: Final = "compiled"
_DIGITS: Final = 16  # of a folder's name, for what is compiled
_BUILD_DIGITS: Final = 8  # for what compiles it
_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def cached_out(source: ModelSource, rules: RuleSet, settings: Mapping[str, str], host: Host) -> Path:
    """Return the folder for a compiled model; nothing may be there yet. Raises InputRefused (I160, L405)."""
    stem = re.sub(r"\W+", "_", Path(source.name).name.removeprefix("tiny:")).strip("_").lower() or "model"
    stem = stem if stem[0].isalpha() else f"model_{stem}"
    compiled = _digest(_facts(source, rules, settings, host))[:_DIGITS]
    return _private_folder() / f"{stem}_{compiled}_{_digest(_build())[:_BUILD_DIGITS]}"


def of_other_builds(out: Path) -> tuple[Path, ...]:
    """Return the compiled models of the cache that differ from `out` only in the versions that compiled them."""
    alike = out.name[:-_BUILD_DIGITS] + "?" * _BUILD_DIGITS
    return tuple(sorted(path.parent for path in out.parent.glob(f"{alike}/{manifest.FILE}") if path.parent != out))


def with_packed_store(out: Path) -> tuple[Path, ...]:
    """Return the other compiled models of the cache that have a packed store, those that were compiled last first."""
    folders = (path.parent for path in out.parent.glob(f"*/{packed_store.FOLDER}") if path.is_dir())
    return tuple(sorted((folder for folder in folders if folder != out), key=lambda f: -f.stat().st_mtime))


@contextmanager
def locked_out(out: Path) -> Generator[bool]:
    """Lock the folder of a compiled model against other processes, and yield whether one is there."""
    with FileLock(out.with_suffix(".lock")):
        yield (out / manifest.FILE).is_file()


def _facts(source: ModelSource, rules: RuleSet, settings: Mapping[str, str], host: Host) -> Mapping[str, object]:
    """Identify what is compiled, and for which machine; a checkpoint by its shards' names, sizes and times."""
    return {
        "model": source.name,
        "config": None if source.folder is None else file_digest(source.folder / "config.json"),
        "checkpoint": None if source.index is None else checkpoint_digest(source.index),
        "code": dict(source.code),
        "class": source.config.architectures,  # `--text-only` names another one
        "rules": dict(rules.sources),
        "settings": dict(settings),
        "host": asdict(host),
    }


def _build() -> Mapping[str, object]:
    """Identify what compiles it: ktc by its text, since a version has many builds in development."""
    return {
        "versions": asdict(manifest.Versions.installed()),
        "schema": manifest.SCHEMA,
        "ktc": resources.compiler_digest(),
    }


def _digest(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=sorted).encode()).hexdigest()


def _private_folder() -> Path:
    """Return the folder of compiled models, which only the user can enter. Raises InputRefused (I160)."""
    folder = cache_dir() / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        hint = "set KTC_CACHE_DIR to a writable folder"
        raise failed(error, "I160", f"the cache of compiled models `{folder}` cannot be made", hint=hint) from error
    why = f"it belongs to user {status.st_uid}" if status.st_uid != os.geteuid() else ""
    why = why or ("others may write to it" if status.st_mode & _OTHERS else "")
    if why:
        message = f"the cache of compiled models `{folder}` is not used: {why}, and a compiled model is code"
        hint = f"`chmod 700 {folder}` after a look at it, or set KTC_CACHE_DIR to a folder of yours"
        raise InputRefused(Diagnostic("I160", message, hint=hint))
    return folder

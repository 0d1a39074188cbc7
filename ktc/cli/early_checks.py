"""Refusals that need neither torch nor transformers: a command makes them before it imports its work.

In: the arguments. Out: nothing. Raises the errors that the work itself would raise, seconds earlier; the work checks
again, because files change and Python programs call it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ktc.cli.given_model import is_compiled
from ktc.diagnostics import Diagnostic, InputRefused

if TYPE_CHECKING:
    from ktc.foundation.host import Host


def require_model(name: str) -> None:
    """Raise InputRefused (I100, I102, I110) if the argument MODEL names no model."""
    from ktc.model.hf import model_names

    model_names.require_model(name)


def require_compiled(*folders: Path) -> None:
    """Raise InputRefused (L400 to L402) if an argument OUT is not a compiled model."""
    from ktc.model.manifest.manifest import read_manifest

    for folder in folders:
        read_manifest(folder)


def require_given(given: str, adapters: Iterable[Path | None] = ()) -> None:
    """Raise InputRefused if MODEL|OUT is neither a model nor a compiled one, or an adapter is none (A601, A602)."""
    if not is_compiled(given):
        require_model(given)
    elif not (Path(given) / "weights.json").is_file():  # a damaged one is loaded to find everything
        require_compiled(Path(given))
    for adapter in adapters:
        require_adapter(adapter)


def require_adapter(folder: Path | None) -> None:
    """Raise InputRefused (A601, A602) for a folder with neither file of an adapter."""
    from ktc.adapters.folder import CONFIG, WEIGHTS, no_adapter

    if folder is not None and not (folder / CONFIG).is_file() and not (folder / WEIGHTS).is_file():
        raise InputRefused(no_adapter(folder))


def require_original(given: str | Path | None, option: str = "") -> None:
    """Raise InputRefused (A603) for a folder that is neither a compiled model nor a checkpoint.

    A name of the hub is not looked up, and one of a small model must exist (I110).
    """
    from ktc.adapters.folder import no_original
    from ktc.model.manifest.manifest import FILE

    if given is None:
        return
    if not is_compiled(str(given)) and not Path(given).is_dir():
        require_model(str(given))
        return
    folder = Path(given)
    if not (folder / "config.json").is_file() and not (folder / FILE).is_file():
        raise InputRefused(no_original(folder, option))


def require_out(out: Path, force: bool) -> None:
    """Raise InputRefused (I140 to I143) if a compiled model cannot be written to `out`."""
    from ktc.model.manifest.out_place import check_out

    check_out(out, force)


def require_rules(rules: str, settings: Mapping[str, str]) -> None:
    """Raise InputRefused with the faults of a program that is not one, or does not take the settings."""
    from ktc.language import dsl

    dsl.load(rules, settings)


def require_host(described: str | None, isa: str | None = None) -> None:
    """Raise InputRefused or HostLacks for a machine's description, or an instruction set that it does not have."""
    if described is not None or isa is not None:
        described_host(described, isa, probe_gpu=False)


def described_host(described: str | None, isa: str | None, *, probe_gpu: bool = True) -> Host:
    """Return the machine in the file, otherwise this one with its GPUs; `isa` becomes its best instruction set."""
    from ktc.foundation import host
    from ktc.foundation.host_file import read_host
    from ktc.foundation.measured_host import this_host

    if described:
        target = read_host(described)
    else:
        target = this_host() if probe_gpu else host.detect(probe_gpu=False)
    return host.restrict(target, isa) if isa else target


def require_readable(*files: Path | None) -> None:
    """Raise InputRefused (U005) for an input file that does not exist or cannot be read."""
    for file in files:
        if file is None:
            continue
        reason = "there is no such file" if not file.exists() else "it is a folder" if file.is_dir() else ""
        if not reason and not os.access(file, os.R_OK):
            reason = "permission denied"
        if reason:
            raise InputRefused(Diagnostic("U005", f"cannot read `{file}`: {reason}", hint="name a file that exists"))


def require_writable(file: Path | None) -> None:
    """Raise InputRefused (U003) for an output file in a folder that does not exist, or at the place of a folder."""
    if file is None:
        return
    reason = "it is a folder" if file.is_dir() else "" if file.absolute().parent.is_dir() else "there is no such folder"
    if reason:
        raise InputRefused(Diagnostic("U003", f"cannot write `{file}`: {reason}"))

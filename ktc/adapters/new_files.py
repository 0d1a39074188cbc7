"""Files and folders that come into being whole: written beside their place, flushed to the disk, then renamed.

In: where something is to be. Out: a place beside it to write to. Refused: what is already there (A609), and where
nothing can be written (U003). After an error nothing is left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.files import flush

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """A folder beside `path` that becomes `path` when the block ends."""
    _require_new(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise InputRefused(Diagnostic("U003", f"cannot write `{path}`: {error.strerror}")) from error
    try:
        beside.chmod(0o755)
        yield beside
        for file in sorted(beside.iterdir()):
            flush(file)
        beside.rename(path)
        flush(path.parent)
    except OSError as error:
        raise InputRefused(Diagnostic("U003", f"cannot write `{path}`: {error.strerror}")) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def new_file(path: Path) -> Generator[Path]:
    """A file beside `path` that becomes `path` when the block ends."""
    _require_new(path)
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        flush(beside)
        beside.rename(path)
        flush(path.parent)
    except OSError as error:
        raise InputRefused(Diagnostic("U003", f"cannot write `{path}`: {error.strerror}")) from error
    finally:
        beside.unlink(missing_ok=True)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A safetensors file of these tensors."""
    from safetensors import torch as safetensors

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}  # cut out of a stack, they may not be
    cast("Any", safetensors).save_file(whole, path, metadata={"format": "pt"})


def _require_new(path: Path) -> None:
    if path.exists():
        message = f"`{path}` is there already"
        raise InputRefused(Diagnostic("A609", message, hint="name another with `-o`, or remove it first"))

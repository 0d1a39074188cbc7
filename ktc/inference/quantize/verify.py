"""Verification of converted checkpoints: merged, INT4 and GGUF folders.

In: a folder with the record of its conversion. Out: a `Finding` per file of weights: its digest, and with `source` also
whether converting the original again gives the same bytes. That writes the files once more, next to the folder, and
removes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from ktc.adapters.conversion import Conversion, read_record
from ktc.adapters.merge import merge
from ktc.foundation.files import file_digest, folder_beside, refusing
from ktc.foundation.progress import Progress
from ktc.inference.quantize.checkpoint import quantize
from ktc.inference.quantize.gguf_model import MatrixType, write_gguf_model
from ktc.inference.quantize.scheme import SCHEMES
from ktc.inference.quantize.selection import Modules
from ktc.model.packing.verify import Finding

_AGAIN = "convert the model again"


def verify_conversion(
    folder: Path, *, model: Path | None = None, source: bool = False, progress: Progress | None = None
) -> tuple[Finding, ...]:
    """Compare the files with their record, and with `source` the record with the original.

    `model` names the original if it has moved. Raises InputRefused (Q513, and what the conversion refuses).
    """
    made = read_record(folder)
    recorded = [_compared("weights", folder / file, expected) for file, expected in made.files.items()]
    return (*recorded, *(_against_source(folder, made, model or Path(made.model), progress) if source else ()))


def _compared(name: str, path: Path, expected: str) -> Finding:
    if not path.is_file():
        return Finding(name, "missing", f"no `{path.name}`", _AGAIN)
    digest = file_digest(path)
    if digest == expected:
        return Finding(name, "good", f"{path.name}, sha256 {digest[:12]}")
    return Finding(name, "altered", f"{path.name}: expected sha256 {expected[:12]}, found {digest[:12]}", _AGAIN)


def _against_source(folder: Path, made: Conversion, model: Path, progress: Progress | None) -> Iterator[Finding]:
    with refusing(folder), folder_beside(folder.absolute()) as scratch:
        _convert(made, model, scratch / "again", progress)
        for file, expected in made.files.items():
            yield _compared("converted again", scratch / "again" / file, expected)


def _convert(made: Conversion, model: Path, out: Path, progress: Progress | None) -> None:
    adapter = Path(made.adapter) if made.adapter else None
    settings = made.settings
    if made.kind == "merge" and adapter is not None:
        merge(adapter, out, model, progress)
    elif made.kind == "gguf":
        kind, shard_bytes = cast("MatrixType", settings["type"]), int(settings["shard_bytes"])
        write_gguf_model(model, out, kind, progress, adapter=adapter, shard_bytes=shard_bytes)
    else:
        modules, requantise = cast("Modules", settings["modules"]), settings["requantise"] == "True"
        quantize(model, out, SCHEMES[settings["scheme"]], modules, progress, adapter=adapter, requantise=requantise)

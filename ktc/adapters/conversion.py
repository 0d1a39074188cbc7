"""The record of a conversion in its folder: the model, the adapter, the options, and the digests of the files.

In: a folder that is filled. Out: `ktc_conversion.json` in it, by which `ktc verify` compares the files, and makes them
again. Refused: a record that cannot be read (Q513).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.decode import Undecodable, decode, read_json
from ktc.foundation.files import file_digest, write_file
from ktc.foundation.regular_files import read_regular

RECORD: Final = "ktc_conversion.json"
Kind = Literal["merge", "int4", "gguf"]


@dataclass(frozen=True, slots=True)
class Conversion:
    """`settings` are the options by name; `files` has the sha256 of each file of weights, `others` are beside them."""

    kind: Kind
    model: str
    adapter: str
    settings: Mapping[str, str]
    files: Mapping[str, str]
    others: tuple[str, ...]


def write_record(
    folder: Path, kind: Kind, model: Path, adapter: Path | None, settings: Mapping[str, str], files: Iterable[str]
) -> None:
    """Write the record of the finished `files` in `folder`."""
    digests = {file: file_digest(folder / file) for file in files}
    named = str(adapter.absolute()) if adapter else ""
    others = tuple(sorted({path.name for path in folder.iterdir()} - digests.keys()))
    made = Conversion(kind, str(model.absolute()), named, settings, digests, others)
    write_file(folder / RECORD, json.dumps(asdict(made), indent=2) + "\n")


def read_record(folder: Path) -> Conversion:
    """Return the record in `folder`. Raises InputRefused (Q513)."""
    try:
        content: object = read_json(read_regular(folder / RECORD))
        if isinstance(content, dict):  # an earlier version did not write `others`
            content = {"others": list[str](), **cast("dict[str, object]", content)}
        record = decode(content, Conversion)
    except (OSError, ValueError, Undecodable) as error:
        message = f"`{folder / RECORD}` cannot be read: {error}"
        raise InputRefused(Diagnostic("Q513", message, hint="convert the model again")) from error
    if any("/" in file or file.startswith(".") for file in record.files):
        message = f"`{folder / RECORD}` names a file outside of its folder"
        raise InputRefused(Diagnostic("Q513", message, hint="convert the model again"))
    return record

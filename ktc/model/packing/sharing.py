"""Layers that packed stores share: one file on disk, which has a name in each store (a hard link).

In: the layers that a store lacks, and the folders of other compiled models. Out: the files of theirs that are complete
and of equal origin, and links to them. A layer's origin has its kernel, sizes, rows and checkpoint, and not the rules:
models for training and for answering have equal layers. A packed file is never written in place: a store that is packed
again, or removed, leaves those of others as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ktc.diagnostics import InputRefused
from ktc.foundation.files import replaced_file
from ktc.model.packed_store import packed_file, packed_store
from ktc.model.packed_store.packed_file import Damaged, Header
from ktc.model.packed_store.packed_store import Layer


def linked_layers(store: Path, layers: Iterable[Layer], others: Sequence[Path]) -> dict[str, Header]:
    """Link into `store` each layer that a sealed store of `others` has alike; return their headers by module name.

    A layer that the system does not link, as between two file systems, is left out.
    """
    listed = dict(_sealed(others))
    headers: dict[str, Header] = {}
    for layer in layers:
        for folder, seals in listed.items():
            name = packed_store.file_name(layer.step.fqn)
            header = _linked(folder / packed_store.FOLDER / name, store / name, layer, seals.get(layer.step.fqn, ""))
            if header is not None:
                headers[layer.step.fqn] = header
                break
    return headers


def _sealed(others: Iterable[Path]) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Yield the folders with a sealed store, with the digests of its headers by module name."""
    for folder in others:
        with suppress(OSError, InputRefused):
            yield folder, {entry.fqn: entry.header for entry in packed_store.read_index(folder).layers}


def _linked(file: Path, target: Path, layer: Layer, seal: str) -> Header | None:
    """Link a packed file, if it is that of the seal and the layer: looked at again once it has its new name."""
    if not _is_alike(file, layer, seal):
        return None
    with suppress(OSError):
        target.unlink(missing_ok=True)  # its mode is not that of the file that others have
        with replaced_file(target) as beside:
            os.link(file.resolve(strict=True), beside)
        if _is_alike(target, layer, seal):
            return packed_file.read_header(target)
        target.unlink()
    return None


def _is_alike(file: Path, layer: Layer, seal: str) -> bool:
    try:
        header = packed_file.read_header(file)
    except (Damaged, OSError):
        return False
    return packed_store.header_digest(header) == seal and not packed_store.changed(header, layer)

"""Layers that packed stores share: one file on disk, which has a name in each store (a hard link).

In: the layers that a store lacks, and the folders of other compiled models. Out: the files of theirs that are complete
and of equal origin, and links to them. A layer's origin has its kernel, sizes, rows and checkpoint, and not the rules:
models for training and for answering have equal layers. A packed file is never written in place: a store that is packed
again, or removed, leaves those of others as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ktc.diagnostics import InputRefused
from ktc.foundation.files import replaced_file
from ktc.model.loading.opened import open_folder
from ktc.model.packed_store import packed_file, packed_store
from ktc.model.packed_store.packed_file import Damaged, Header
from ktc.model.packed_store.packed_store import Layer


def equal_layers(layers: Iterable[Layer], others: Sequence[Path]) -> dict[str, tuple[Path, Header]]:
    """Return by module name the file and the header of each layer that the store of one of `others` has alike."""
    return {layer.step.fqn: alike for layer in layers if (alike := next(_alike(layer, others), None))}


def has_all_layers(out: Path, others: Sequence[Path], *, trust_remote_code: bool = False) -> bool:
    """Return whether the stores of `others` have every layer of the compiled model `out`, which has some.

    Raises InputRefused as `open_folder` does.
    """
    opened = open_folder(out, None, trusted=trust_remote_code)
    layers = packed_store.layers(opened.manifest, opened.rows, opened.index)
    return bool(layers) and len(equal_layers(layers, others)) == len(layers)


def link_layer(file: Path, target: Path) -> bool:
    """Give a packed file the name `target` too, in place of an earlier file. Return whether the system permits it."""
    with suppress(OSError), replaced_file(target) as beside:
        os.link(file, beside)
        return True
    return False


def _alike(layer: Layer, others: Sequence[Path]) -> Iterator[tuple[Path, Header]]:
    for folder in others:
        path = folder / packed_store.FOLDER / packed_store.file_name(layer.step.fqn)
        try:
            header = packed_file.read_header(path)
            listed = {entry.fqn: entry for entry in packed_store.read_index(folder).layers}
        except (Damaged, OSError, InputRefused):
            continue
        sealed = layer.step.fqn in listed and listed[layer.step.fqn].header == packed_store.header_digest(header)
        if sealed and not packed_store.changed(header, layer):
            yield path, header

"""A compiled folder opened without its weights.

In: OUT, and the folder of its checkpoint. Out: a frozen `Opened`. Refused: as `ktc.load`, before it reads a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from ktc.model.checkpoint import CheckpointIndex, WeightSource, open_index
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.loading import load, load_as
from ktc.model.manifest.manifest import Manifest, read_manifest
from ktc.model.packed_store.packed_store import PackedStore


@dataclass(frozen=True, slots=True)
class Opened:
    """A compiled model's folder, checked as for a load, and its checkpoint. `store` is a packed store to read from."""

    folder: Path
    manifest: Manifest
    stock_class: type[PreTrainedModel]
    library: KernelLibrary | None
    rows: tuple[WeightSource, ...]
    index: CheckpointIndex
    store: PackedStore | None = None


def open_folder(path: Path, weights: str | Path | None, *, trusted: bool) -> Opened:
    """Open the compiled model in `path`, whose checkpoint is `weights` if it has moved. Raises as `ktc.load` does."""
    folder = path.resolve()
    manifest = read_manifest(folder)
    checkpoint = Path(manifest.model.folder if weights is None else weights)
    library = load_as.check_fit(manifest, folder, checkpoint, reference=False)
    stock = load.stock_class(manifest, folder, checkpoint, trust_remote_code=trusted)
    return Opened(folder, manifest, stock, library, load_as.read_rows(folder, manifest), open_index(checkpoint))

"""Checkpoint folders: their tensors and byte ranges, read from headers alone. No model names here.

Values are read by `ktc.model.checkpoint.reader`, which imports torch; this package does not.
"""

from __future__ import annotations

from ktc.model.checkpoint.gguf_types import BLOCK_TYPES
from ktc.model.checkpoint.header import ITEM_SIZE, TensorEntry
from ktc.model.checkpoint.index import CheckpointIndex, has_weights, open_index
from ktc.model.checkpoint.quantised import StoredWeight, stored_weights
from ktc.model.checkpoint.source import (
    Part,
    Quantised,
    Span,
    Step,
    Stored,
    Transform,
    WeightSource,
    read_sources,
    scale_shape,
    write_sources,
)  # fmt: skip

__all__ = [
    "BLOCK_TYPES", "ITEM_SIZE", "CheckpointIndex", "Part", "Quantised", "Span", "Step", "Stored", "StoredWeight",
    "TensorEntry", "Transform", "WeightSource", "has_weights", "open_index", "read_sources", "scale_shape",
    "stored_weights", "write_sources",
]  # fmt: skip

"""Checkpoint folders: what tensors they hold and where their bytes lie, from headers alone. No model names here.

Reading values is `ktc.checkpoint.reader`, which needs torch; this package does not.
"""

from __future__ import annotations

from ktc.checkpoint.header import ITEM_SIZE, TensorEntry
from ktc.checkpoint.index import CheckpointIndex, has_weights, open_index
from ktc.checkpoint.source import Part, Transform, WeightSource, read_sources, write_sources

__all__ = [
    "ITEM_SIZE",
    "CheckpointIndex",
    "Part",
    "TensorEntry",
    "Transform",
    "WeightSource",
    "has_weights",
    "open_index",
    "read_sources",
    "write_sources",
]

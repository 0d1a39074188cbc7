"""Rows of `weights.json` that fill a linear layer with blocks of a GGUF file or of INT4.

In: the model and a row. Out: whether the row fits, and its bytes in the layer. Refused: scales that are not finite
(L407).
"""

from __future__ import annotations

from torch import nn

from ktc.diagnostics import InputRefused
from ktc.model.checkpoint import CheckpointIndex, WeightSource, gguf_values
from ktc.model.checkpoint.reader import TensorReader
from ktc.model.checkpoint.values import read_blocks
from ktc.model.graph.typed import owner_of
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.packed_store.finite_weights import not_finite
from ktc.model.packed_store.stored_experts import Loader, Pack


def misfit_of_blocks(layer: StoredLinear, source: WeightSource) -> str:
    """Return why a row cannot fill the layer's weight; "" if only shapes are left to compare."""
    return "" if source.plain_rows == layer.format else f"the layer holds blocks of {layer.format}"


def rows_loader(model: nn.Module, source: WeightSource, allow_nonfinite: bool) -> Loader | None:
    """Return the loader of a row of a layer that keeps blocks; `None` for all other modules."""
    layer, leaf = owner_of(model, source.target)
    if not isinstance(layer, StoredLinear) or leaf != "weight":
        return None

    def load(reader: TensorReader, index: CheckpointIndex, expert: int | None) -> Pack:
        read = read_blocks(reader, index, source, None)

        def pack() -> None:
            blocks = read()
            if not (allow_nonfinite or gguf_values.are_finite(blocks, layer.format)):
                raise InputRefused(not_finite(source, expert))
            layer.load_blocks(blocks)

        return pack

    return load

"""Which layers of a model may read their caches in pages.

In: a model with attention of ktc. Out: the kernels of the layers whose decoding steps they compute on the CPU. Whether
a layer gives its steps to the kernel is known when one has been taken (`copies` of `paged_tensor.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from ktc.model.attention.decode import DecodeAttention


def paged_layers(model: nn.Module) -> dict[int, DecodeAttention]:
    """Return the kernel of every layer that may read pages, by the layer's number.

    Sparse attention is left out: its index has the positions of a band.
    """
    found = dict[int, DecodeAttention]()
    for module in cast("Iterator[Any]", model.modules()):
        decode = getattr(module, "decode", None)
        if isinstance(decode, DecodeAttention) and module.sparse is None and _is_on_cpu(module):
            found[int(module.layer_idx)] = decode
    return found


def _is_on_cpu(module: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())

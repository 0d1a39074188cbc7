"""Which layers of a model read their caches in pages.

In: a model with attention of ktc. Out: the kernels of the layers whose decoding steps read pages where they are. Others
would copy all of a cache in each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from ktc.attention.absorbed import AbsorbedAttention
from ktc.attention.decode import DecodeAttention
from ktc.attention.int8_decode import Int8DecodeAttention
from ktc.attention.interface import implementation_of


def paged_layers(model: nn.Module) -> dict[int, DecodeAttention]:
    """Return the kernel of every layer that reads pages, by the layer's number."""
    found = dict[int, DecodeAttention]()
    for module in cast("Iterator[Any]", model.modules()):
        decode = getattr(module, "decode", None)
        if isinstance(decode, DecodeAttention) and _is_on_cpu(module) and _reads_pages(module, decode):
            found[int(module.layer_idx)] = decode
    return found


def _is_on_cpu(module: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


def _reads_pages(module: Any, decode: DecodeAttention) -> bool:
    """Return whether a module gives the kernel its steps; a cache of codes is read by nothing else."""
    if isinstance(decode, Int8DecodeAttention):
        return True
    if getattr(module, "sparse", None) is not None:
        return False  # its index has the positions of a band
    if isinstance(module, AbsorbedAttention):
        return module.absorption.serves(1, 1 << 20) and implementation_of(module) != "eager"
    return True

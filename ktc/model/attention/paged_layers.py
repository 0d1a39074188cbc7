"""Which layers of a model may read their caches in pages.

In: a model with attention of ktc. Out: the kernels of the layers whose decoding steps they compute on the CPU. Whether
a layer really uses the kernel is known after a step (`copies` of `paged_tensor.py`).
"""

from __future__ import annotations

from torch import nn

from ktc.model.attention.decode import DecodeAttention, decoders


def paged_layers(model: nn.Module) -> dict[int, DecodeAttention]:
    """Return the kernel of every layer that may read pages, by the layer's number.

    Sparse attention is left out: its index has positions of contiguous caches.
    """
    return {
        int(module.layer_idx): decode
        for module, decode in decoders(model)
        if module.sparse is None and all(parameter.device.type == "cpu" for parameter in module.parameters())
    }

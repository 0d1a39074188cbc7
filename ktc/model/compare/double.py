"""Stock code in fp64: every fp32 that its operators name is lifted too.

In: calls of operators inside the context. Out: the same calls with fp64 in the place of fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ktc.model.experts.private_api import TorchDispatchMode, pytree
from ktc.model.experts.products.grouped_products import outer, times_columns


class InDouble(TorchDispatchMode):
    """Replace fp32 by fp64 in every call inside: stock code casts to fp32 wherever it needs to be exact.

    Grouped products, for which PyTorch has no kernel in fp64, are computed one by one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wider: Any = pytree.tree_map(_widened, (args, kwargs or {}))
        if func.name() == "aten::_grouped_mm" and wider[0][0].dtype == torch.float64:
            one, other, *ends = wider[0]
            return _grouped_products(one, other, ends[0] if ends else wider[1].get("offs"))
        return func(*wider[0], **wider[1])


def _grouped_products(one: Tensor, other: Tensor, ends: Tensor | None) -> Tensor:
    """Return the products of `torch._grouped_mm`: `ends` cut the dimension that is not three-dimensional."""
    if ends is None:
        return torch.bmm(one, other)
    if one.dim() == other.dim():
        return outer(one.t(), other, ends)
    if one.dim() == 3:
        return _grouped_products(other.t(), one.transpose(1, 2), ends).t()
    products = times_columns(one, other, ends)
    return functional.pad(products, (0, 0, 0, one.shape[0] - products.shape[0]))  # rows after the last end are zero


def _widened(argument: object) -> object:
    return torch.float64 if argument is torch.float32 else argument

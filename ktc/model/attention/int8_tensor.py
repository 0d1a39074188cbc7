"""`Int8Tensor`: keys or values of a cache as int8 codes with a scale for each position and head.

In: numbers (..., L, d). Out: codes and scales (a number is code * scale), as a tensor that has the model's dtype for
PyTorch. Choosing sequences and positions keeps codes. Any other operation reads decoded numbers. Writing into the
tensor is refused, but for `zero_`. An operator of ktc reads `codes` and `scales`.

A scale belongs to a position and a head, since a new position is then written alone. Scales per channel, or per block
of positions, would change with every key that is greater than the earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from ktc.model.attention.paged_tensor import PagedTensor
from ktc.model.experts.private_api import schema_of, tree_map_only, wrapper_tensor

GREATEST: Final = 127  # code
_LEAST: Final = 2.0**-100  # a row below has no finite inverse scale for certain, and counts as zero

_ATEN: Final = torch.ops.aten
_BY_ROWS: Final = frozenset({  # of views and copies that leave the last dimension as it is
    _ATEN.slice.Tensor, _ATEN.select.int, _ATEN.index_select.default, _ATEN.index.Tensor, _ATEN.clone.default,
    _ATEN.detach.default, _ATEN.alias.default, _ATEN.unsqueeze.default,
})  # fmt: skip


def quantise(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (..., L, d) int8 and scales (..., L, 1) fp32 of numbers (..., L, d).

    A row is round(x * (127 / largest)), to nearest even, and its scale largest / 127. A row with an infinity or a NaN
    has codes of 0 and the scale NaN.
    """
    wide = numbers.float()
    largest = wide.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    most = largest.new_full((), GREATEST)  # a tensor: a number is multiplied with the reciprocal, and rounded twice
    factor = torch.where(finite & (largest >= _LEAST), most / largest, 0.0)
    codes = torch.where(finite, (wide * factor).round(), 0.0).to(torch.int8)
    scales = torch.where(largest >= _LEAST, largest / most, 0.0)
    return codes, torch.where(finite, scales, torch.nan)


class Int8Tensor(Tensor):
    """`codes` int8 (..., L, d) and `scales` fp32 (..., L, 1)."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls: type[Int8Tensor], codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Int8Tensor:
        """Make a tensor that has `dtype` for PyTorch."""
        made: Any = wrapper_tensor(
            cls, codes.shape, dtype, codes.device, strides=codes.stride(), storage_offset=codes.storage_offset()
        )
        made.codes, made.scales = codes, scales
        return cast("Int8Tensor", made)

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """Everything is done by `__new__`."""

    @classmethod
    def of(cls, numbers: Tensor) -> Int8Tensor:
        """Return the codes of numbers (..., L, d)."""
        return cls(*quantise(numbers), numbers.dtype)

    def decoded(self) -> Tensor:
        """Return the numbers in the tensor's dtype."""
        return (self.codes.float() * self.scales).to(self.dtype)

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Int8Tensor({tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Keep codes where an operation chooses sequences or positions; decode for all others."""
        first = args[0] if args else None
        if isinstance(first, Int8Tensor):
            if _keeps_rows(func, first, args):
                codes, scales = (func(part, *args[1:], **(kwargs or {})) for part in (first.codes, first.scales))
                return Int8Tensor(codes, scales, first.dtype)
            if func is _ATEN.zero_.default:
                first.codes.zero_()
                first.scales.zero_()
                return first
            if schema_of(func).is_mutable:
                raise NotImplementedError(f"`{func}` would write into the codes of a cache")
        decoded = tree_map_only(Int8Tensor, Int8Tensor.decoded, (tuple(args), dict(kwargs or {})))
        return func(*decoded[0], **decoded[1])


def _keeps_rows(func: Any, tensor: Int8Tensor, args: Sequence[Any]) -> bool:
    """Return whether an operation on codes and on scales alike leaves rows whole."""
    if func not in _BY_ROWS:
        return False
    last = tensor.dim() - 1
    if func is _ATEN.index.Tensor:
        return len(args[1]) <= last
    if func in (_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.index_select.default):
        dim = args[1] if len(args) > 1 else 0
        whole = func is _ATEN.slice.Tensor and _is_all(args, tensor.shape[-1])
        return dim % tensor.dim() != last or whole
    if func is _ATEN.unsqueeze.default:
        return args[1] % (tensor.dim() + 1) <= last - 1
    return True


def _is_all(args: Sequence[Any], size: int) -> bool:
    start, end, step = (*args[2:], *(None, None, 1)[len(args) - 2 :])
    return start in (None, 0) and (end is None or end >= size) and step == 1


def plain(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor: it is decoded where it holds codes, and copied where it is in pages."""
    return tensor.decoded() if isinstance(tensor, Int8Tensor | PagedTensor) else tensor

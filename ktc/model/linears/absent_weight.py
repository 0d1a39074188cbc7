"""`AbsentWeight`: the weight of a layer that holds it in another form, as PEFT and torch see it.

In: a shape, a dtype and a device. Out: a tensor that has these, and no values of its own. Refused (L448): everything
that would compute with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, InputRefused

# What PEFT and torch ask of a weight without its values; properties are `__get__`.
_WITHOUT_VALUES: Final = frozenset(
    {"__get__", "__repr__", "__format__", "dim", "size", "numel", "element_size", "is_floating_point", "is_complex"}
)


class AbsentWeight(Tensor):
    """A weight's shape, dtype and device without its values. Raises `InputRefused` (L448) for what computes with it."""

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> AbsentWeight:
        """Return one, which takes no memory."""
        return torch.zeros((), dtype=dtype, device=device).expand(*shape).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _WITHOUT_VALUES:
            message = f"`{name}` reads the weight of a layer that holds it in another form"
            hint = "leave the layer out of `place(stream = ...)`, or write `kt_linear(gemv, prefill = torch)`"
            raise InputRefused(Diagnostic("L448", message, hint=hint))
        return cast("Any", super()).__torch_function__(func, types, args, kwargs or {})

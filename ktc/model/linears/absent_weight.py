"""`AbsentWeight`: the weight of a layer that holds it in another form, as PEFT and torch see it.

In: a shape, a dtype and a device. Out: a tensor that has these, and no values of its own. Refused (L448): everything
that would compute with it. `LinearWithoutWeight` is the base of such layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.load_state import Loads

# The properties that PEFT and torch read of a weight beside its values; a property is `__get__`.
_WITHOUT_VALUES: Final = frozenset(
    {"__get__", "__repr__", "__format__", "dim", "size", "numel", "element_size", "is_floating_point", "is_complex"}
)


class AbsentWeight(Tensor):
    """A weight's shape, dtype and device without its values. Computing with it raises `InputRefused` (L448)."""

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


class LinearWithoutWeight(nn.Linear):
    """A linear layer that holds its weight in another form. `loads` has the state of that weight."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.loads = Loads(["weight"])

    def restore(self, name: str) -> None:
        """Await a load into the same memory. Until `process`, calls are refused (L460) with `name`, the module's."""
        self.loads.restore(name)

    def process(self) -> None:
        """Admit calls again. Raises InputRefused (L460) without a load."""
        self.loads.process()

"""The training of a layer's expert weights, which are kept beside their packed form: rounded, trained, or merged.

Three meanings of INT4 in training, which are never mixed in one layer:

- frozen (`masters` None): the weights are rounded to the grid once, and adapters train beside them;
- trained (`masters` a dtype): the stock tensors are parameters, packed again after each optimizer step;
- merged: frozen stock tensors, to which the adapter is added before they are rounded and packed.

Gradients pass the rounding unchanged (straight-through estimator, Bengio et al., arXiv:1308.3432).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ktc.diagnostics import Diagnostic
from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.experts.private_api import version_of

MASTERS: Final = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class WeightTraining:
    """`grid`: the values that weights are rounded to, `None` for all. `masters`: the dtype of trained weights."""

    grid: Int4Grid | None = None
    masters: torch.dtype | None = None
    merged: bool = False

    def __post_init__(self) -> None:
        if self.merged and (self.masters is not None or self.grid is None):
            raise ValueError("an adapter is merged into frozen weights that are then rounded to a grid")

    @property
    def trains(self) -> bool:
        """Whether the weights are parameters of an optimizer."""
        return self.masters is not None

    def stored_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the stock tensors of a model of `dtype`: masters are never narrower than its weights."""
        return dtype if self.masters is None else torch.promote_types(self.masters, dtype)

    @property
    def repacks(self) -> bool:
        """Whether packed weights change with the parameters that they are made of."""
        return self.trains or self.merged

    @classmethod
    def parse(cls, grid: str | None, masters: str | None, *, merged: bool = False) -> WeightTraining:
        """Return the value of the words in a recipe. Raises `ValueError` for others."""
        if masters is not None and masters not in MASTERS:
            raise ValueError(f"`{masters}` names no dtype of masters")
        return cls(Int4Grid.parse(grid), MASTERS[masters] if masters else None, merged)


def not_rounded(fqn: str, why: str) -> Diagnostic:
    """Return the refusal (L463) of weights that cannot be rounded to a grid."""
    hint = "if the loss is not finite either, resume from a checkpoint before, with a lower learning rate"
    return Diagnostic("L463", f"the weights of `{fqn}` cannot be rounded: {why}", hint=hint)


FROZEN: Final = WeightTraining()


class _Steps:
    """Counts the steps of all optimizers: a fused one changes parameters without changing their versions."""

    def __init__(self) -> None:
        self.taken = 0
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.taken += 1


_STEPS: Final = _Steps()
State = tuple[int | float | tuple[int, int], ...]


def state_of(parameters: Iterable[Tensor], scales: Iterable[float] = ()) -> State:
    """Return a value that differs after parameters changed: by an optimizer, in place, or by another storage.

    They must outlive the state: memory that is free again may be given to another tensor. A change through `.data`
    outside of an optimizer is not seen, as autograd does not see it either. Inference tensors have no versions.
    """
    versions = (
        (parameter.data_ptr(), -1 if parameter.is_inference() else version_of(parameter)) for parameter in parameters
    )
    return (_STEPS.taken, *versions, *scales)

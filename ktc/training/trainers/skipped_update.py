"""An optimizer's update that a GPU leaves out itself where a gradient is not finite, so that the host need not wait.

In: PyTorch's own fused Adam or AdamW, and the gradients of a step on their GPU. Out: an update that is taken where all
of them are finite. Otherwise parameters and moments stay as they are, and so does the count of updates. The host may
issue clipping and update behind the backward, and read the norm later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ktc.training.trainers.private_api import steps_as_its_class

_DEVICES: Final = {"cuda"}  # that compute while the host does not wait
_KINDS: Final = (torch.optim.Adam, torch.optim.AdamW)


def skips_alone(optimizer: Any, parameters: Sequence[Tensor]) -> bool:
    """Return whether an optimizer has such updates, of parameters with gradients on one device."""
    stock = getattr(optimizer, "optimizer", optimizer)  # inside of accelerate's
    devices = {parameter.device for parameter in parameters if parameter.grad is not None}
    if type(stock) not in _KINDS or len(devices) != 1 or next(iter(devices)).type not in _DEVICES:
        return False
    groups = cast("Sequence[Mapping[str, Any]]", stock.param_groups)
    return all(group.get("fused") for group in groups) and steps_as_its_class(stock)


def skip_unless_finite(optimizer: Any, parameters: Sequence[Tensor], norm: Tensor) -> Tensor:
    """Let the next update be left out on the device where a gradient is not finite; return whether one is.

    Their 2-norm alone does not say that: squares of finite values may be too large for a sum.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    spoilt = get_total_norm(gradients, torch.inf).isfinite().logical_not() | norm.isnan()
    stock = getattr(optimizer, "optimizer", optimizer)
    stock.found_inf = spoilt.to(torch.float32)  # the name that PyTorch's own scaler uses
    return spoilt


def skip_nothing(optimizer: Any) -> None:
    """Let the next update be taken."""
    stock = getattr(optimizer, "optimizer", optimizer)
    if hasattr(stock, "found_inf"):
        del stock.found_inf

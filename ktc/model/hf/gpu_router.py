"""`GpuRouting`: the routing of calls without gradients on a GPU, by a kernel of ktc.

In: logits, a bias of the choice, and the `RouterForm`. Out: weights and expert numbers, without waiting on the host, so
that a captured step has it. Other calls on a GPU are computed by PyTorch. Without Triton and on old GPUs all are, and
the log says so once.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ktc.model.kernels.triton_support import lacking

if TYPE_CHECKING:
    from ktc.model.kernels.router_spec import RouterForm

log = logging.getLogger(__name__)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class GpuRouting:
    """The kernel of `route_kernels.py`, for logits on devices of type `device`."""

    device: str = "cuda"

    def serves(self, logits: Tensor) -> bool:
        """Return whether the kernel takes these logits (T, E): plain ones on a GPU, without gradients."""
        trains = torch.is_grad_enabled() and logits.requires_grad
        plain = type(logits) is Tensor and logits.device.type == self.device and logits.dtype in _DTYPES
        return plain and not trains and has_kernel(logits.device)

    def __call__(
        self, form: RouterForm, logits: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return weights (T, k) of `dtype` and expert numbers (T, k), the best first."""
        from ktc.model.hf.route_kernels import route_on_gpu

        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        return route_on_gpu(form, logits.detach(), bias, dtype)


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Return whether the kernel runs on a device. A log says once that Triton is missing, or the GPU too old."""
    if why := lacking(device):
        log.warning("%s: routers on a GPU are computed by PyTorch, which is slower", why)
    return not why

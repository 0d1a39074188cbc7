"""The loss of a frozen head with its gradient: forward computes both from the same logits, and backward only scales.

In: hidden states (T, H), an `nn.Linear` that is not trained, labels (T,). Out: the cross entropy of each token, in
fp32. The logits of `rows` tokens at a time are in memory, which become their own gradient. A checkpoint would
compute them twice, and keep fp32 copies of them. On a GPU with Triton a kernel does that (`loss_kernels.py`); where it
fails or computes otherwise, a warning says so, and PyTorch computes it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktc.model.experts.gpu.compiled_functions import compiled_on, has_compiler
from ktc.model.hf.foreign_errors import first_line
from ktc.model.kernels.triton_support import lacking
from ktc.model.linears.plain import SameProduct, has_linear_code
from ktc.model.packed_store.placement import hooks_move_alone

log = logging.getLogger(__name__)

MOST_LOGITS = 1 << 26  # of a chunk; some 400 MB, and a third of that where they are one kernel
BYTES_PER_LOGIT = 6  # itself in bf16, then its gradient there, and an fp32 copy
_SUMMED_IN_FP32: Final = (torch.bfloat16, torch.float16, torch.float32)
_CHECKED: Final = 8, 10_007  # rows and columns of the logits that the kernel is compared on: the last tile is not full
_TOLERANCE: Final = 5e-3  # of the relative error of gradients that are rounded to bf16


def is_frozen_linear(head: nn.Module) -> bool:
    """Return whether calling `head` is its product alone: a linear layer, not trained, wrapped or observed.

    Hooks that move its inputs to its device change nothing.
    """
    changed = "forward" in vars(head) or not hooks_move_alone(head)
    is_linear = type(head) is nn.Linear or (isinstance(head, SameProduct) and has_linear_code(type(head)))
    return is_linear and not changed and not any(weight.requires_grad for weight in head.parameters())


def cast_item(weight: torch.dtype, args: Any) -> int:
    """Return the bytes per value of the head's copy in the dtype that training casts to, 0 where it needs none."""
    wanted = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else weight
    return 0 if wanted == weight else wanted.itemsize


def token_losses(head: nn.Linear, hidden_TH: Tensor, labels_T: Tensor, rows: int, ignore_index: int) -> Tensor:
    """Return the cross entropies (T,) of `head(hidden)` in fp32; autocasting gives the dtype of the product."""
    place = head.weight.device
    hidden_TH, labels_T, device = hidden_TH.to(place), labels_T.to(place), place.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TH.dtype
    bias_V = cast("Tensor | None", head.bias)
    weight_VH, bias_V = head.weight.to(dtype), None if bias_V is None else bias_V.to(dtype)
    with torch.autocast(device, enabled=False):
        return cast("Tensor", _TokenLosses.apply(hidden_TH, weight_VH, bias_V, labels_T, rows, ignore_index))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_T: Tensor, rows: int, ignore_index: int
    ) -> Tensor:
        losses_T = torch.empty(x_TH.shape[0], dtype=torch.float32, device=x_TH.device)
        d_x_TH = torch.empty_like(x_TH, dtype=weight_VH.dtype) if ctx.needs_input_grad[0] else None
        for first in range(0, x_TH.shape[0], rows):
            part = slice(first, first + rows)
            logits_RV = functional.linear(x_TH[part].to(weight_VH.dtype), weight_VH, bias_V)
            losses_with_gradient(logits_RV, labels_T[part], losses_T[part], ignore_index)
            if d_x_TH is not None:
                torch.mm(logits_RV, weight_VH, out=d_x_TH[part])
        if d_x_TH is not None:
            ctx.save_for_backward(d_x_TH, labels_T.eq(ignore_index)[:, None])
        ctx.dtype = x_TH.dtype
        return losses_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x_TH, ignored_T1 = ctx.saved_tensors
        # also where the sum is divided by no labels: the mean is NaN there, and no gradient
        scaled_TH = (d_x_TH * grad_T[:, None]).masked_fill_(ignored_T1, 0.0)
        return scaled_TH.to(ctx.dtype), None, None, None, None, None


def losses_with_gradient(logits_RV: Tensor, labels_R: Tensor, losses_R: Tensor, ignore_index: int) -> None:
    """Write the cross entropies to `losses_R` (R,), fp32. The logits become their gradient."""
    if logits_RV.dtype in _SUMMED_IN_FP32 and logits_RV.is_contiguous() and _has_kernel(logits_RV.device):
        _kernels().losses_with_gradient(logits_RV, labels_R, losses_R, ignore_index)
    else:
        _by_pytorch(logits_RV, labels_R, losses_R, ignore_index)


def _by_pytorch(logits_RV: Tensor, labels_R: Tensor, losses_R: Tensor, ignore_index: int) -> None:
    """Do the same by PyTorch, compiled on a GPU: the definition of the kernel."""
    to_gradient = compiled_on(logits_RV.device, _loss_and_gradient)
    losses, label_R1, at_label_R1 = to_gradient(logits_RV, labels_R, ignore_index)
    losses_R.copy_(losses)
    logits_RV.scatter_(1, label_R1, at_label_R1)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    """Return whether the kernel runs on a device, where it is compared with PyTorch once."""
    if device.type != "cuda" or not has_compiler() or lacking(device):
        return False
    why = _kernel_fault(device)
    if why:
        log.warning("the loss on %s is computed by PyTorch, step by step: %s", device, why)
    return not why


def _kernel_fault(device: torch.device) -> str:
    """Return why the kernel is not used, "" if it computes what PyTorch does on the CPU."""
    rows, columns = _CHECKED
    logits = 4 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(rows) * (columns // rows)
    labels[-1] = -100
    wanted, computed = (torch.zeros(rows), logits.float()), (torch.zeros(rows, device=device), logits.to(device))
    _by_pytorch(wanted[1], labels, wanted[0], -100)
    try:
        _kernels().losses_with_gradient(computed[1], labels.to(device), computed[0], -100)
    except Exception as error:  # noqa: BLE001 - Triton's compiler raises anything
        return first_line(error)
    pairs = ((values.float().cpu(), exact) for values, exact in zip(computed, wanted, strict=True))
    error = max(float(((values - exact).square().sum() / exact.square().sum()).sqrt()) for values, exact in pairs)
    return "" if error <= _TOLERANCE else f"its kernel has a relative error of {error:.2g}"


def _kernels() -> Any:
    """Return what needs Triton."""
    from ktc.training.trainers import loss_kernels

    return loss_kernels


def _loss_and_gradient(logits_RV: Tensor, labels_R: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses (R,) in fp32, and the logits' gradient at the labels with its places, (R, 1).

    The logits become their softmax, which is the gradient elsewhere. That at the label is the softmax less one: close
    to zero for a token that is known, and rounded only then.
    """
    counted_R1 = labels_R.ne(ignore_index)[:, None]
    label_R1 = torch.where(counted_R1, labels_R[:, None], 0)
    wide_RV = logits_RV.float()
    highest_R1 = wide_RV.amax(-1, keepdim=True)
    at_label_R1 = wide_RV.gather(-1, label_R1) - highest_R1
    wide_RV = wide_RV.sub_(highest_R1).exp_()
    sum_R1 = wide_RV.sum(-1, keepdim=True)
    losses_R1 = torch.where(counted_R1, sum_R1.log() - at_label_R1, 0.0)
    logits_RV.copy_(wide_RV.mul_(torch.where(counted_R1, 1 / sum_R1, 0.0)))
    d_label_R1 = torch.where(counted_R1, at_label_R1.exp() / sum_R1 - 1, 0.0)
    return losses_R1[:, 0], label_R1, d_label_R1.to(logits_RV.dtype)

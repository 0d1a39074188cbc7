"""The loss of a frozen head with its gradient: forward computes both from the same logits, and backward only scales.

In: hidden states (T, H), an `nn.Linear` that is not trained, labels (T,). Out: the cross entropy of each token, in
fp32. The logits of `rows` tokens at a time are in memory, which become their own gradient. A checkpoint would
compute them twice, and keep fp32 copies of them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktc.model.experts.compiled_functions import compiled_on
from ktc.model.packed_store.placement import hooks_move_alone

MOST_LOGITS = 1 << 26  # of a chunk; some 400 MB, and a third of that where they are one kernel
BYTES_PER_LOGIT = 6  # itself in bf16, then its gradient there, and an fp32 copy


def is_frozen_linear(head: nn.Module) -> bool:
    """Return whether calling `head` is its product alone: a linear layer, not trained, wrapped or observed.

    Hooks that move its inputs to its device change nothing.
    """
    changed = "forward" in vars(head) or not hooks_move_alone(head)
    return type(head) is nn.Linear and not changed and not any(weight.requires_grad for weight in head.parameters())


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
        to_gradient = compiled_on(x_TH.device, _loss_and_gradient)
        losses_T = torch.empty(x_TH.shape[0], dtype=torch.float32, device=x_TH.device)
        d_x_TH = torch.empty_like(x_TH, dtype=weight_VH.dtype) if ctx.needs_input_grad[0] else None
        for first in range(0, x_TH.shape[0], rows):
            part = slice(first, first + rows)
            logits_RV = functional.linear(x_TH[part].to(weight_VH.dtype), weight_VH, bias_V)
            losses_T[part], label_R1, at_label_R1 = to_gradient(logits_RV, labels_T[part], ignore_index)
            if d_x_TH is not None:
                torch.mm(logits_RV.scatter_(1, label_R1, at_label_R1), weight_VH, out=d_x_TH[part])
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

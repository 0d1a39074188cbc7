"""Experts modules of a model's own: where they keep the matrices of each expert, and how their layer calls them.

In: a module whose class is not one of transformers' decorated experts, and the facts that capture read from its code.
Out: its tensors in the stock layout of a form (`StockExperts`), and its calls as calls of routed experts. Refused: a
module without these tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ktc.model.experts.backends.any_top_k import RoutedCall
from ktc.model.experts.layouts.own_layout import Called, Role, TensorLayout
from ktc.model.experts.layouts.stock_layout import StockTensor, stock_tensors
from ktc.model.kernels.form import ExpertsForm


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """An experts module of the model's own at `fqn` (relative to its block).

    `parts` says where `gate_up`, or `gate` and `up` (`up` alone without a gate), `down` and their biases are. `inputs`
    names the parameters of its `forward` in their order, with the role of each.
    """

    fqn: str
    sizes: tuple[int, int, int]  # experts, hidden, intermediate
    form: ExpertsForm
    parts: Mapping[str, TensorLayout]
    inputs: Mapping[str, Role]
    called: Called = "routed"

    def without_sizes(self) -> OwnExperts:
        """Return the same for experts of any number and width."""
        return replace(self, sizes=(0, 0, 0))


class ExpertStack(nn.Module):
    """The tensors of experts in the stock layout of their form; it computes nothing."""

    def __init__(self, stacked: Mapping[StockTensor, Tensor]) -> None:
        super().__init__()
        for name, tensor in stacked.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class StockExperts(ExpertStack):
    """The tensors of an experts module. `inputs` and `called` describe the calls of the module that replaces it."""

    def __init__(self, stacked: Mapping[StockTensor, Tensor], inputs: Mapping[str, Role], called: Called) -> None:
        super().__init__(stacked)
        self.inputs = dict(inputs)
        self.called: Called = called


def stock_experts(
    module: nn.Module, form: ExpertsForm, parts: Mapping[str, TensorLayout], sizes: tuple[int, int, int]
) -> dict[StockTensor, Tensor]:
    """Return the stock tensors of `form`, views where possible. `sizes` are the experts, H and I.

    Raises `ValueError` where the module has other tensors.
    """
    count = sizes[0]

    def matrices(part: str) -> Tensor:
        layout = parts.get(part)
        parameter = None if layout is None else dict(module.named_parameters()).get(layout.name)
        if layout is None or parameter is None:
            raise ValueError(f"a `{type(module).__name__}` has no `{layout or part}`")
        whole = parameter.detach()
        whole = whole.reshape(count, -1, *whole.shape[1:]) if layout.flat else whole[:count]
        return whole.transpose(1, 2) if layout.turned else whole

    return stock_tensors(form, sizes, parts.keys(), matrices)


def call_routed(
    called: Called, num_experts: int, compute: RoutedCall, hidden: Tensor, index: Tensor | None, weights: Tensor | None
) -> Tensor:
    """Call `compute` with the inputs of a module of this kind, and return the module's output.

    `hidden` is (T, H) or has more leading dimensions, which the result keeps; `index` and `weights` are (T, K).
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    if called == "by_expert" or index is None or weights is None:
        of_row = torch.arange(num_experts, device=rows.device).repeat_interleave(rows.shape[0] // num_experts)
        return compute(rows, of_row[:, None], rows.new_ones(rows.shape[0], 1)).reshape(hidden.shape)
    if called == "routed":
        return compute(rows, index, weights).reshape(hidden.shape)
    passed = index >= num_experts
    count = passed.sum(-1, keepdim=True)
    least, slot = index.min(-1, keepdim=True)
    # A slot without a matrix needs some expert: one that the token has chosen anyway. They share its weight by halves,
    # which rounds nothing: a weight of 0 would turn an overflow into NaN. Without such an expert the result is dropped.
    halves = torch.where(passed, passed.cumsum(-1), count)
    shared = passed.scatter(-1, slot, value=True)
    shares = torch.where(shared, weights.gather(-1, slot) * torch.exp2(-halves.to(weights.dtype)), weights)
    routed = compute(rows, torch.where(passed, least.clamp(max=num_experts - 1), index), shares)
    routed = routed.masked_fill(least >= num_experts, 0)
    kept = (rows * weights.masked_fill(~passed, 0).sum(-1, keepdim=True)).masked_fill(count == 0, 0)
    return (routed + kept.to(routed.dtype)).reshape(hidden.shape)

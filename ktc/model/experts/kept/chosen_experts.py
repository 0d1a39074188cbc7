"""The experts that few tokens choose, multiplied where a GPU keeps them: no rows are sorted, and no weights are copied.

In: the choices of at most `MOST_ROWS` tokens, and what says where experts are: their numbers in plain matrices, or
their addresses. Out: the layer's results. `by_number` takes two kernels, `by_address` three or four.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Final, cast

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.experts.kept.kept_experts import MOST_ROWS, can_keep
from ktc.model.experts.layouts.coded_matrices import CodedMatrices
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.products.coded_check import check_addressed
from ktc.model.experts.products.grouped_products import multiplies_codes
from ktc.model.experts.products.packed_layout import Matrices, PackedLayout
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.kernels.form import ExpertsForm

_DTYPES: Final = (torch.bfloat16, torch.float32)
_EXPERTS, _HIDDEN, _INNER, _TOKENS, _CHOICES = 5, 520, 70, 2, 3  # of the layer that is compared
_BOUNDS: Final = {torch.bfloat16: 0.01, torch.float32: 1e-5}  # of the relative error


def reads_chosen(packed: PackedExperts, device: torch.device) -> bool:
    """Return whether a device can multiply chosen experts where it keeps them."""
    fits = packed.dtype in _DTYPES if packed.is_plain else can_keep(packed, device)
    return fits and multiplies_codes(device)


def are_few(tokens: int, top_k: int, num_experts: int) -> bool:
    """Return whether tokens have so few choices that each is multiplied by itself: no more than there are experts."""
    return 0 < tokens <= MOST_ROWS and tokens * top_k <= num_experts


def by_number(
    form: ExpertsForm, matrices: Matrices, x: Tensor, experts: Tensor, weights_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute choices of experts in plain matrices: `(T, H), (T * K,) int64, (T, K) -> (T, H)` of `dtype`."""
    kernels, gate_up, down = _plain_kernels(), cast("Tensor", matrices.gate_up), cast("Tensor", matrices.down)
    h = kernels.activations(x, experts, gate_up, matrices.gate_up_bias, form)
    return kernels.outputs(h, experts, weights_TK, down, matrices.down_bias, dtype)


def by_address(
    layout: PackedLayout, x: Tensor, experts: Tensor, weights_TK: Tensor, *, table: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Compute the choices that have an address: `(T, H) bf16, (T * K,) int64, (T, K) -> (T, H)` of `dtype`.

    `experts` are addresses, also of parts (`kept_split.py`), or numbers with a `table` (E,) of addresses.
    """
    kernels, (gate_up, down), form = _address_kernels(), _addressed(layout), layout.form
    first_bias, down_bias = layout.bias_places if form.biased else (-1, -1)
    step = layout.cuts.step if table is None and layout.cuts.parts > 1 else 0
    places = kernels.Places(experts, table, step)
    h = kernels.activations(x, places, gate_up, form, per_row=weights_TK.shape[1], bias_at=first_bias)
    rows = kernels.products(h, places, down, bias_at=down_bias)
    return kernels.sum_of_choices(rows, places, weights_TK, dtype)


def check_chosen(packed: PackedExperts, form: ExpertsForm, device: torch.device) -> None:
    """Compare what reads chosen experts, where a device does, once for each form or format. Raises HostLacks (H247)."""
    if reads_chosen(packed, device):
        if packed.is_plain:
            _check_plain(form, packed.dtype, device)
        else:
            for panels in packed.panels:
                check_addressed(panels, device)


@functools.cache
def _check_plain(form: ExpertsForm, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    width = (2 if form.gated else 1) * _INNER
    shapes = [(_TOKENS, _HIDDEN), (_EXPERTS, width, _HIDDEN), (_EXPERTS, _HIDDEN, _INNER)]
    shapes += [(_EXPERTS, width), (_EXPERTS, _HIDDEN)] if form.biased else []
    x, *stock = (torch.randn(shape, generator=generator) for shape in shapes)
    stock = [weight / weight.shape[-1] ** 0.5 for weight in stock]
    x, stock[:2] = x.to(dtype), [weight.to(dtype) for weight in stock[:2]]
    weights = torch.rand(_TOKENS, _CHOICES, generator=generator)
    index = torch.tensor([[4, 0, 2], [1, 4, 3]])
    wanted = fused_moe_reference(x.float(), index, weights, [weight.float() for weight in stock], form)
    first, down, *biases = (weight.to(device) for weight in stock)
    matrices = Matrices(first, down, *(biases or (None, None)))
    given = x.to(device), index.flatten().to(device), weights.to(device)
    computed = by_number(form, matrices, *given, torch.float32).cpu()
    error = float((computed - wanted).square().sum().sqrt() / wanted.square().sum().sqrt())
    if not error <= _BOUNDS[dtype]:
        message = f"products of chosen experts of the form `{form}` are wrong on {device}: a relative error of "
        hint = "use the tested versions of torch and Triton (constraints.txt), or keep experts on the CPU"
        raise HostLacks(Diagnostic("H247", f"{message}{error:.2g}", hint=hint))


@functools.cache
def _addressed(layout: PackedLayout) -> tuple[CodedMatrices, CodedMatrices]:
    """Return where the matrices are within an expert."""
    nothing = torch.empty(0, layout.nbytes, dtype=torch.uint8)
    return cast("tuple[CodedMatrices, CodedMatrices]", layout.coded(nothing)[:2])


def _address_kernels() -> ModuleType:
    """Return what needs Triton."""
    from ktc.model.experts.gpu import kept_kernels

    return kept_kernels


def _plain_kernels() -> ModuleType:
    """Return what needs Triton."""
    from ktc.model.experts.gpu import chosen_kernels

    return chosen_kernels

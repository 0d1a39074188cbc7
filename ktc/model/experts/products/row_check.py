"""The kernels beside grouped products, compared with PyTorch before their first use, once for each form and device.

In: the form of experts, and a device. Out: nothing. Refused (H247): results that are not those of `row_steps.py`, or
pairs that are not sorted as PyTorch sorts them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Final, NoReturn

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.experts.gpu.row_factors import GivenGradients, Inner, RunFactors
from ktc.model.experts.gpu.slots import Slots, sum_rows, sums_by_kernel
from ktc.model.experts.products import row_steps
from ktc.model.experts.products.grouped_products import multiplies_codes
from ktc.model.kernels.form import ExpertsForm

_BACKWARD: Final = ("h", "d_inner", "d_low", "d_weights", "weighted", "d_weighted")  # of `ActivationGradients`
_TOKENS, _CHOICES, _EXPERTS, _HIDDEN, _INNER, _RANK = 40, 2, 3, 72, 136, 8
_SORTED: Final = 200, 2, 6  # tokens, choices and experts of the check of the sort: several blocks of pairs
_CPU: Final = torch.device("cpu")
_BOUND: Final = 0.02  # of the relative error of results that are rounded to bf16


def check_rows(form: ExpertsForm, device: torch.device) -> None:
    """Compare the kernels of calls without adapters, where a device has them. Raises HostLacks."""
    _check_all(form, device, trained=False)


def check_trained_rows(form: ExpertsForm, device: torch.device) -> None:
    """Compare those of adapters and of backward too. Raises HostLacks."""
    _check_all(form, device, trained=True)


def _check_all(form: ExpertsForm, device: torch.device, *, trained: bool) -> None:
    if sums_by_kernel(device):
        _check_slots(device)
    if multiplies_codes(device):
        _check(replace(form, transposed=False), device, trained)


@functools.cache
def _check_slots(device: torch.device) -> None:
    """Compare the sort of pairs, to the bit, and the sums of their rows."""
    from ktc.model.experts.gpu.slot_kernels import sorted_pairs
    from ktc.model.experts.gpu.sum_kernels import summed

    tokens, choices, experts = _SORTED
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, experts - 1, (tokens, choices), generator=generator)  # none for the last expert
    wanted, computed = Slots.of(index, experts), sorted_pairs(index.to(device), experts)
    for name in ("tokens", "pairs", "experts", "places", "ends"):
        if not torch.equal(getattr(computed, name).cpu(), getattr(wanted, name)):
            _refuse(f"{name} of sorted pairs are wrong on {device}")
    if not torch.equal(computed.edges.cpu(), torch.tensor(wanted.bounds, dtype=torch.int32)):
        _refuse(f"edges of sorted pairs are wrong on {device}")
    y = torch.randn(index.numel(), _HIDDEN, generator=generator).bfloat16()
    sums = summed(y.to(device), computed.places, None, 0, torch.float32)
    _compare("sums of rows", device, sums.cpu(), sum_rows(y, wanted.places, None, torch.float32))


@functools.cache
def _check(form: ExpertsForm, device: torch.device, trained: bool) -> None:
    from ktc.model.experts.gpu import row_kernels

    wanted, computed = (
        _results(form, steps, where, trained) for steps, where in ((row_steps, _CPU), (row_kernels, device))
    )
    for name, right in wanted.items():
        _compare(f"{name} of experts of the form `{form}`", device, computed[name], right)


def _compare(name: str, device: torch.device, computed: Tensor, right: Tensor) -> None:
    error = float(((computed - right).square().sum() / right.square().sum()).sqrt())
    if not error <= _BOUND:
        _refuse(f"{name} are wrong on {device}: a relative error of {error:.2g}")


def _refuse(message: str) -> NoReturn:
    hint = "use the tested versions of torch and Triton (constraints.txt), or keep experts on the CPU"
    raise HostLacks(Diagnostic("H247", message, hint=hint))


def _results(form: ExpertsForm, steps: ModuleType, device: torch.device, trained: bool) -> dict[str, Tensor]:
    """Return what an implementation computes from the same numbers, on a CPU in fp32."""
    generator = torch.Generator().manual_seed(0)
    width = _INNER * (2 if form.gated else 1)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator).bfloat16().to(device)
        return values.float() if device.type == "cpu" else values

    index = torch.randint(0, _EXPERTS, (_TOKENS, _CHOICES), generator=generator).to(device)
    slots = Slots.of(index, _EXPERTS)
    rows, size = slots.of_experts(range(_EXPERTS)), index.numel()
    bias = drawn(_EXPERTS, width) if form.biased else None
    results = dict[str, Tensor | None]()
    results["activations"], _ = steps.activated(form, Inner(drawn(size, width), None, bias), (None, None), rows)
    if trained:
        first = RunFactors(drawn(_EXPERTS, _RANK, _HIDDEN), drawn(_EXPERTS, width, _RANK) / 8, None)
        down = RunFactors(drawn(_EXPERTS, _RANK, _INNER), drawn(_EXPERTS, _HIDDEN, _RANK) / 8, None)
        _, results["narrow values"] = steps.gathered(drawn(_TOKENS, _HIDDEN), rows, first)
        results["gradients of factors"] = torch.empty(_EXPERTS, _RANK, _HIDDEN, device=device)
        steps.put_outer(results["gradients of factors"], drawn(size, _RANK), drawn(size, _HIDDEN), rows, 0.5)
        inner = Inner(drawn(size, width), drawn(size, _RANK), bias)
        h, low = steps.activated(form, inner, (first, down), rows)
        results |= {"adapted activations": h, "narrow activations": low}
        given = GivenGradients(drawn(size, _INNER), drawn(size, _RANK), drawn(size).float())
        for number, factors in enumerate(((first, down), (None, None))):
            of_factors = Inner(inner.product, inner.low if factors[0] is not None else None, bias)
            made = steps.activated_backward(form, of_factors, factors, rows, given)
            results |= {f"backward: {name} ({number})": value for name, value in zip(_BACKWARD, made, strict=True)}
    return {name: value.float().cpu() for name, value in results.items() if value is not None}

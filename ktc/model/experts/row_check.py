"""The kernels beside grouped products, compared with PyTorch before their first use, once for each form and device.

In: the form of experts, and a device. Out: nothing. Refused (H247): results that are not those of `row_steps.py`.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.experts import row_steps
from ktc.model.experts.grouped_products import multiplies_codes
from ktc.model.experts.row_factors import GivenGradients, Inner, RunFactors
from ktc.model.experts.slots import Slots, sums_of_rows
from ktc.model.kernels.form import ExpertsForm

_BACKWARD: Final = ("h", "d_inner", "d_low", "d_weights", "weighted", "d_weighted")  # of `ActivationGradients`
_TOKENS, _CHOICES, _EXPERTS, _HIDDEN, _INNER, _RANK = 40, 2, 3, 72, 136, 8
_CPU: Final = torch.device("cpu")
_BOUND: Final = 0.02  # of the relative error of results that are rounded to bf16


def check_rows(form: ExpertsForm, device: torch.device) -> None:
    """Compare the kernels of calls without adapters, where a device has them. Raises HostLacks."""
    if multiplies_codes(device):
        _check(replace(form, transposed=False), device, False)


def check_trained_rows(form: ExpertsForm, device: torch.device) -> None:
    """Compare those of adapters and of backward too. Raises HostLacks."""
    if multiplies_codes(device):
        _check(replace(form, transposed=False), device, True)


@functools.cache
def _check(form: ExpertsForm, device: torch.device, trained: bool) -> None:
    from ktc.model.experts import row_kernels

    wanted, computed = (
        _results(form, steps, where, trained) for steps, where in ((row_steps, _CPU), (row_kernels, device))
    )
    for name, right in wanted.items():
        error = float(((computed[name] - right).square().sum() / right.square().sum()).sqrt())
        if not error <= _BOUND:
            message = f"{name} of experts of the form `{form}` are wrong on {device}: a relative error of {error:.2g}"
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
    y = drawn(size, _HIDDEN)
    results: dict[str, Tensor | None] = {"places of pairs": slots.places, "pairs of slots": slots.pairs}
    results["ends of experts"] = slots.ends
    results["sums of rows"] = sums_of_rows(y, slots.places, None, 0, torch.float32)
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

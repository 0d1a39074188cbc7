"""The form of an experts module, read from its own gate code: layout flags, activation, and its constants.

The gate code is traced for the numbers in it (a limit, an alpha, an offset). Every activation with these numbers is
evaluated; the one with equal values is the form. The activation is recognised by value and not by its source code, so
an unsupported one is reliably reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import cast, get_args

import torch
from torch import Tensor, nn

from ktc.experts.form import Activation, ExpertsForm, Function
from ktc.experts.reference import activated
from ktc.graph.typed import nodes_of

UNSUPPORTED = "unsupported: "  # begins the form of experts that no kernel computes; the reason follows
_SAMPLES = 64
_LARGEST = 1e4  # larger numbers are sizes and slice ends, not limits
_SPREAD = 12.0  # range in which the functions differ


def form_of(module: nn.Module) -> str:
    """Return the text of the module's form, or `unsupported: ` and the reason."""
    gated = bool(getattr(module, "has_gate", True))
    if getattr(module, "has_post_expert_norm", False):
        return f"{UNSUPPORTED}a norm after each expert"
    if not isinstance(getattr(module, "down_proj", None), Tensor):
        return f"{UNSUPPORTED}`{type(module).__name__}` holds no `down_proj`"
    code = getattr(module, "_apply_gate" if gated else "act_fn", None)
    if not callable(code):
        return f"{UNSUPPORTED}`{type(module).__name__}` does not name its activation"
    try:
        found = form_of_code(cast("Callable[[Tensor], Tensor]", code), gated)
    except Exception as error:  # noqa: BLE001 - foreign code on a sample raises anything; the reason quotes it
        return f"{UNSUPPORTED}the activation of `{type(module).__name__}` does not run alone ({type(error).__name__})"
    if found is None:
        return f"{UNSUPPORTED}`{type(module).__name__}` has an activation that no kernel computes"
    biased, transposed = bool(getattr(module, "has_bias", False)), bool(getattr(module, "is_transposed", False))
    return str(replace(found, biased=biased, transposed=transposed))


def form_of_code(code: Callable[[Tensor], Tensor], gated: bool, width: int = 2 * _SAMPLES) -> ExpertsForm | None:
    """Return the form whose activation equals `code` on `width` columns; None if there is no such form."""
    constants = _constants(code, width)
    generator = torch.Generator().manual_seed(0)
    spread = max([_SPREAD, *(1.5 * abs(number) for number in constants)])  # exceeds every limit
    sample = spread * (2 * torch.rand(_SAMPLES, width, generator=generator, dtype=torch.float64) - 1)
    expected = code(sample)
    for form in _candidates(constants, gated):
        actual = activated(form, sample)
        # Some gates compute in fp32 for every input dtype.
        if actual.shape == expected.shape and torch.allclose(actual, expected.double(), rtol=1e-5, atol=1e-5):
            return form
    return None


def _candidates(constants: frozenset[float], gated: bool) -> Iterator[ExpertsForm]:
    """Yield the plain activations first, then all activations with the numbers of the code."""
    for function, interleaved in product(get_args(Function), (False, True) if gated else (False,)):
        yield ExpertsForm(Activation(function), gated, interleaved=interleaved)
    if not gated:
        return
    positive = sorted(number for number in constants if number > 0)
    limits, alphas, offsets = (None, *positive), (1.0, *positive), (0.0, *sorted(constants))
    for limit, alpha, offset, interleaved in product(limits, alphas, offsets, (False, True)):
        yield ExpertsForm(Activation("silu", alpha, limit, offset), interleaved=interleaved)
    for function, limit, interleaved in product(get_args(Function), positive, (False, True)):
        yield ExpertsForm(Activation(function, limit=limit), interleaved=interleaved)


def _constants(code: Callable[[Tensor], Tensor], width: int) -> frozenset[float]:
    """Return the numeric constants of the traced code."""

    class Gate(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return code(hidden)

    program = torch.export.export(Gate(), (torch.empty(2, width, device="meta"),), strict=False)
    numbers = (a for node in nodes_of(program.graph_module) for a in (*node.args, *node.kwargs.values()))
    return frozenset(float(n) for n in numbers if isinstance(n, int | float) and abs(n) < _LARGEST)

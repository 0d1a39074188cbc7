"""The form of an experts module, read from its own gate code: layout flags, activation, and the activation's constants.

The gate code is traced for the numbers in it (a limit, an alpha, an offset), and every activation that those numbers
can make is computed beside it; the one that gives the same values is the form. So no spelling of an activation is
known here, and one that no kernel computes is told from all that are.
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
_LARGEST = 1e4  # larger numbers are sizes and ends of slices, no limits
_SPREAD = 12.0  # where the functions differ


def form_of(module: nn.Module) -> str:
    """The spelling of the module's form, or `unsupported: ` and the reason."""
    gated = bool(getattr(module, "has_gate", True))
    if getattr(module, "has_post_expert_norm", False):
        return f"{UNSUPPORTED}a norm after each expert"
    if not isinstance(getattr(module, "down_proj", None), Tensor):
        return f"{UNSUPPORTED}`{type(module).__name__}` holds no `down_proj`"
    code = getattr(module, "_apply_gate" if gated else "act_fn", None)
    if not callable(code):
        return f"{UNSUPPORTED}`{type(module).__name__}` does not tell its activation"
    try:
        found = form_of_code(cast("Callable[[Tensor], Tensor]", code), gated)
    except Exception as error:  # noqa: BLE001 - foreign code on a sample raises anything; its words are the reason
        return f"{UNSUPPORTED}the activation of `{type(module).__name__}` does not run alone ({type(error).__name__})"
    if found is None:
        return f"{UNSUPPORTED}`{type(module).__name__}` has an activation that no kernel computes"
    biased, transposed = bool(getattr(module, "has_bias", False)), bool(getattr(module, "is_transposed", False))
    return str(replace(found, biased=biased, transposed=transposed))


def form_of_code(code: Callable[[Tensor], Tensor], gated: bool, width: int = 2 * _SAMPLES) -> ExpertsForm | None:
    """The form whose activation computes what `code` does on `width` columns; None if there is none."""
    constants = _constants(code, width)
    generator = torch.Generator().manual_seed(0)
    spread = max([_SPREAD, *(1.5 * abs(number) for number in constants)])  # beyond every limit
    sample = spread * (2 * torch.rand(_SAMPLES, width, generator=generator, dtype=torch.float64) - 1)
    expected = code(sample)
    for form in _candidates(constants, gated):
        actual = activated(form, sample)
        # Some gates compute in fp32 whatever they are given.
        if actual.shape == expected.shape and torch.allclose(actual, expected.double(), rtol=1e-5, atol=1e-5):
            return form
    return None


def _candidates(constants: frozenset[float], gated: bool) -> Iterator[ExpertsForm]:
    """The plain activations first, then everything that the numbers of the code can make."""
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
    """The numbers that the traced code computes with."""

    class Gate(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return code(hidden)

    program = torch.export.export(Gate(), (torch.empty(2, width, device="meta"),), strict=False)
    numbers = (a for node in nodes_of(program.graph_module) for a in (*node.args, *node.kwargs.values()))
    return frozenset(float(n) for n in numbers if isinstance(n, int | float) and abs(n) < _LARGEST)

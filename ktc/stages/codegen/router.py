"""The variables of the template of a router's kernel, and its self-test before its first use.

Refused (H225): a kernel that chooses other experts than the reference, whose weights or gradient differ by more than
the rounding of their dtype, or that gives other bits with three threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from ktc.foundation.isa import INSTRUCTION_SETS
from ktc.model.hf.router import DTYPES, compare, group_ranks, kernel_backward, kernel_forward, weigh
from ktc.model.kernels.kernel_library import Kernel
from ktc.model.kernels.router_spec import RouterForm, RouterSpec
from ktc.stages.codegen.linear import ELEMENTS
from ktc.stages.codegen.wrong_kernel import norm, relative_error, wrong

_SCORINGS: Final = {"softmax": "kSoftmax", "sigmoid": "kSigmoid", "sqrt_softplus": "kSqrtSoftplus"}
_GROUP_SCORES: Final = {"greatest": "kGreatest", "two_greatest": "kTwoGreatest"}
_TOTALS: Final = {"none": "kNone", "plus": "kPlus", "at_least": "kAtLeast"}
_COUNTS: Final = ("Experts", "TopK", "Groups", "TopGroups")
_TRUTHS: Final = ("Late", "Corrected", "TakesLimited", "RoundsScores", "RoundsCompared")
_NUMBERS: Final = ("Limited", "PickedScale", "TotalConstant", "Scale")
# Relative Frobenius error of weights, a few roundings of the dtype; gradients are differences, which have more.
_TOLERANCE: Final = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-5}
_ROWS: Final = 37
_TRIED: Final = 2048  # rows, of which the ones with the clearest choice are computed
_NOTHING: Final = 1e-6  # a gradient of this size is one of rounding, as of one weight that is divided by itself


def choices(spec: RouterSpec) -> dict[str, object]:
    """Return the template's variables: the instruction set, the types of elements, and the form as constants."""
    dtypes = spec.form.dtypes(spec.hidden)
    return {
        "isa": INSTRUCTION_SETS[spec.isa].cxx_type(ELEMENTS["fp32"]),
        "elements": {name: ELEMENTS[dtypes[name]] for name in ("logits", "weights")},
        "constants": list(_constants(spec.form, spec)),
    }


def _constants(form: RouterForm, spec: RouterSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the type, the name and the value of each."""
    dtypes = form.dtypes(spec.hidden)
    counts = (form.num_experts, form.top_k, form.groups, form.top_groups)
    yield from (("int", f"k{name}", str(n)) for name, n in zip(_COUNTS, counts, strict=True))
    yield "ktc::Scoring", "kScoring", f"ktc::Scoring::{_SCORINGS[form.scoring]}"
    yield "ktc::GroupScore", "kGroupScore", f"ktc::GroupScore::{_GROUP_SCORES[form.group_score]}"
    yield "ktc::Total", "kTotal", f"ktc::Total::{_TOTALS[form.total]}"
    rounds = dtypes["scores"] != "fp32", dtypes["compared"] != "fp32"
    truths = (form.late, form.corrected, form.takes_limited, *rounds)
    yield from (("bool", f"k{name}", str(value).lower()) for name, value in zip(_TRUTHS, truths, strict=True))
    limited = -math.inf if form.limited is None else form.limited
    numbers = (limited, form.picked_scale, form.total_constant, form.scale)
    yield from (("float", f"k{name}", _constant(value)) for name, value in zip(_NUMBERS, numbers, strict=True))


def _constant(value: float) -> str:
    """Write a number in C++, rounded to fp32 once."""
    if math.isinf(value):
        return "-" * (value < 0) + "std::numeric_limits<float>::infinity()"
    return f"static_cast<float>({float(value)!r})"


def self_test_router(kernel: Kernel, spec: RouterSpec) -> None:
    """Raise `KtcError` (H225) if the kernel does not choose, weight and differentiate as the reference does."""
    generator = torch.Generator().manual_seed(23)
    form, dtypes = spec.form, {name: DTYPES[dtype] for name, dtype in spec.form.dtypes(spec.hidden).items()}
    tolerance = max(_TOLERANCE[dtype] for dtype in form.dtypes(spec.hidden).values())
    bias = torch.randn(form.num_experts, generator=generator) / 8 if form.corrected else None
    tried = torch.randn(_TRIED, form.num_experts, generator=generator).to(dtypes["logits"])
    margin = _margin(form, tried, bias)
    clear = tried[margin.argsort(descending=True)[:_ROWS]]
    for logits in (clear[:1], clear):
        given = torch.randn(logits.shape[0], form.top_k, generator=generator).to(dtypes["weights"])
        results = [_computed(kernel, form, (logits, bias, given), threads) for threads in (1, 3)]
        if not all(torch.equal(one, other) for one, other in zip(*results, strict=True)):
            raise wrong(spec, "it has other bits with three threads")
        weights, chosen, gradient = results[0]
        leaf = logits.clone().requires_grad_()
        scores, compared = compare(form, leaf, bias)
        certain = margin.sort(descending=True).values[: logits.shape[0]] > 2 * tolerance
        best = compared.topk(form.top_k).indices
        if not torch.equal(chosen.sort(-1).values[certain], best.sort(-1).values[certain]):
            raise wrong(spec, "it chooses other experts than the reference")
        expected = weigh(form, scores, compared, chosen, given.dtype)
        [stock] = torch.autograd.grad(expected, leaf, given)
        for what, computed, wanted, allowed in (
            ("weights", weights, expected.detach(), tolerance), ("gradient", gradient, stock, 4 * tolerance),
        ):  # fmt: skip
            pair = computed[certain], wanted[certain]
            nothing = norm(torch.cat([values.double() for values in pair])) < _NOTHING
            error = 0.0 if nothing else relative_error(*pair)
            if not error <= allowed:
                raise wrong(spec, f"its {what} differs from the reference by {error:.1e}, allowed are {allowed:.0e}")


def _margin(form: RouterForm, logits: Tensor, bias: Tensor | None) -> Tensor:
    """Return for each row how far the last chosen expert and group are, relatively, from the next ones."""
    whole = replace(form, groups=1, top_groups=1)
    choices = [(compare(form, logits, bias)[1], form.top_k)]
    if form.top_groups < form.groups:
        choices.append((group_ranks(form, compare(whole, logits, bias)[1]), form.top_groups))
    margin = torch.full((logits.shape[0],), math.inf)
    for values, count in choices:
        if count < values.shape[-1]:
            last, following = values.float().topk(count + 1, dim=-1).values[:, -2:].unbind(-1)
            margin = margin.minimum((last - following) / last.abs().clamp_min(1e-30))
    return margin


def _computed(
    kernel: Kernel, form: RouterForm, tensors: tuple[Tensor, Tensor | None, Tensor], threads: int
) -> tuple[Tensor, Tensor, Tensor]:
    logits, bias, given = tensors
    native = kernel.native(), kernel.engine(threads)
    weights, indices = kernel_forward(native, form, logits, bias, given.dtype)
    return weights, indices, kernel_backward(native, logits, bias, indices, given)

"""Random layers with what the reference says about them, and the kernel specs that the kernel tests build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.formats import WeightFormat
from ktc.foundation.isa import Isa
from ktc.model.experts.layouts.packed import Numa, PackedExperts
from ktc.model.experts.layouts.stock_layout import StockTensor, stock_names, stock_shape
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.experts.trained.weight_training import FROZEN, WeightTraining
from ktc.model.experts.weights import ExpertsWeights
from ktc.model.kernels.form import ExpertsForm, ExpertsSizes, parse_form
from ktc.model.kernels.fused_moe_spec import KERNELS, FusedMoeSpec
from ktc.model.kernels.kernel_library import Kernel, KernelLibrary
from ktc.model.kernels.linear_spec import ISAS as LINEAR_ISAS
from ktc.model.kernels.linear_spec import LinearSpec
from ktc.stages.codegen.build import build
from ktc.stages.codegen.render import render

ISAS: tuple[Isa, ...] = tuple(isa for isa in host.detect().isas if isa in KERNELS)
# Hidden, intermediate, experts, experts per token of the one kernel whose sizes are constants: no multiples of a panel.
CONSTANT = (70, 37, 5, 2)
# The spelling of every form that kernels are tested in. How a form is stored is no kernel's business, but the loader's.
FORMS = (
    "silu",
    "silu(alpha=1.702, limit=1.25, up_offset=1.0) biased transposed interleaved",
    "gelu_tanh(limit=1.5, up_offset=-0.5) interleaved",
    "gelu biased",
    "relu transposed",
    "relu2 ungated",
    "silu ungated biased transposed",
    "silu(up_offset=0.5, gate_cap=1.5, up_cap=2.5)",
)
# What the quick tests build: every form with the host's best instruction set, two forms with every other, and four of
# the scalar kernels in float64. The slow tests build each form with each instruction set.
EVERYWHERE = (FORMS[0], FORMS[1])
EXACT = (FORMS[0], FORMS[1], FORMS[5], FORMS[6], FORMS[7])
Dtype = Literal["bf16", "fp32", "fp64"]
# So few rows of an expert are multiplied with the codes themselves. Products of more rows, and those of all gradients,
# are of code x scale rounded to bf16; but blocks of integers are multiplied as such by any number of rows (`words` in
# ktc/foundation/isa.py).
CODE_ROWS: dict[Isa, int] = {"avx2": 16, "avx512": 16, "avx512_bf16": 6, "amx": 4}


def spec_of(
    isa: Isa,
    dtype: Dtype = "bf16",
    form: str = "silu",
    sizes: tuple[int | None, int | None, int | None, int | None] = (None, None, None, None),
    codes: tuple[WeightFormat, int] | None = None,
) -> FusedMoeSpec:
    asked = parse_form(form)
    stored, group = codes or (dtype, 0)
    settings = {"gated": asked.gated, "biased": asked.biased, "group_size": group}
    return FusedMoeSpec("fused_moe", *sizes, dtype, stored, stored, isa, asked.activation, **settings)


def experts_of(  # with `sizes` experts, hidden, intermediate and experts per token, and the form behind them
    *sizes: Any,
    kernel: Kernel | None = None,
    threads: int = 1,
    numa: Numa = "shard",
    dtype: torch.dtype = torch.bfloat16,
    training: WeightTraining = FROZEN,
    **settings: Any,
) -> FusedMoe:
    *numbers, form = sizes if len(sizes) > 4 else (*sizes, "silu")
    of_layer = ExpertsSizes(*numbers)
    packed = None if kernel is None else PackedExperts(kernel, threads, of_layer, numa)
    asked = parse_form(form) if isinstance(form, str) else form
    return FusedMoe(ExpertsWeights(asked, of_layer, dtype, packed, training), **settings)


def is_quick(isa: Isa, form: str) -> bool:
    return isa == ISAS[0] or form in EVERYWHERE


SPECS = (
    *(spec_of(isa, form=form) for isa in ISAS for form in FORMS if is_quick(isa, form)),
    *(spec_of("scalar", "fp64", form) for form in EXACT),
    spec_of("scalar", "fp32", "gelu"),
    spec_of(ISAS[0], sizes=CONSTANT),
)
SLOW_SPECS = (
    *(spec_of(isa, form=form) for isa in ISAS for form in FORMS if not is_quick(isa, form)),
    *(spec_of("scalar", "fp64", form) for form in FORMS if form not in EXACT),
)
# Values of `parametrize`: those that need one of `SLOW_SPECS` are marked so.
EXACT_FORMS = [form if form in EXACT else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]


def isas_with(*forms: str) -> list[ParameterSet]:
    """Every instruction set with each of these forms."""
    pairs = ((isa, form) for isa in ISAS for form in forms)
    return [pytest.param(*pair, marks=() if is_quick(*pair) else pytest.mark.slow) for pair in pairs]


# The kernels of linear layers. The quick tests build every dtype with the best instruction set, and with every other
# one dtype; with the second best bf16 too.
LINEARS = tuple(
    LinearSpec("linear", dtype, isa) for isa in LINEAR_ISAS if isa in ISAS for dtype in ("bf16", "fp16", "fp32")
)
QUICK_LINEARS = (*LINEARS[:4], *LINEARS[4::4])


@cache
def built(specs: tuple[FusedMoeSpec | LinearSpec, ...]) -> KernelLibrary:
    """Their library, built once per run: later builds, also of other processes, find it in the run's cache."""
    return build(render(specs, dict.fromkeys(specs, "test")), host.detect())


def quick_or_slow(value: object, quick: bool, **options: Any) -> ParameterSet:
    """A value of `parametrize`, marked slow unless it is one of the sample that the quick tests take."""
    return pytest.param(value, marks=() if quick else pytest.mark.slow, **options)


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes and random values of one layer and one batch, in float64 but exact in bf16."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    stock: dict[StockTensor, Tensor]
    x: Tensor
    index: Tensor
    weights: Tensor
    grad: Tensor
    form: ExpertsForm

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, d hidden states, d routing weights of the reference in float64."""
        x, weights = self.x.clone().requires_grad_(), self.weights.clone().requires_grad_()
        out = fused_moe_reference(x, self.index, weights, [*self.stock.values()], self.form)
        return (out.detach(), *torch.autograd.grad(out, (x, weights), self.grad))


def random_layer(
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    tokens: int,
    seed: int = 1,
    experts_used: int | None = None,
    form: str = "silu",
) -> Layer:
    """Distinct experts per token, drawn from the first `experts_used`."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator).mul(scale).bfloat16().double()

    scores = torch.rand(tokens, num_experts, generator=generator)
    scores[:, experts_used or num_experts :] -= 1
    asked = parse_form(form)
    shapes = {name: stock_shape(asked, name, num_experts, hidden, intermediate) for name in stock_names(asked)}
    contraction = {name: intermediate if name.startswith("down") else hidden for name in shapes}
    stock = {
        name: values(*shape, scale=0.5 if name.endswith("_bias") else contraction[name] ** -0.5)
        for name, shape in shapes.items()
    }
    return Layer(
        hidden,
        intermediate,
        num_experts,
        top_k,
        stock=stock,
        x=values(tokens, hidden),
        index=scores.topk(top_k, dim=-1).indices,
        weights=torch.rand(tokens, top_k, generator=generator).double(),
        grad=values(tokens, hidden),
        form=asked,
    )


Load = Callable[..., FusedMoe]


def run(module: FusedMoe, layer: Layer, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both gradients of one forward and backward."""
    x = layer.x.to(dtype).requires_grad_()
    weights = layer.weights.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    out = module(x, layer.index, weights)
    return (out.detach(), *torch.autograd.grad(out, (x, weights), layer.grad.to(dtype)))


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((found.double() - expected).norm() / expected.norm())

"""Forms of routing that kernel tests build, with logits for them."""

from __future__ import annotations

from functools import cache
from itertools import cycle, islice

import torch
from kernel_layers import ISAS
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.isa import Isa
from ktc.model.hf.router import DTYPES
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.kernels.router_spec import ISAS as ROUTER_ISAS
from ktc.model.kernels.router_spec import Dtype, RouterForm, RouterSpec
from ktc.stages.codegen.build import build
from ktc.stages.codegen.render import render

# By the model whose routing it is, with other sizes: experts that are no whole lanes, one expert, all experts.
FORMS: dict[str, RouterForm] = {
    "deepseek_v3": RouterForm(
        256, 8, "sigmoid", corrected=True, groups=8, top_groups=4, group_score="two_greatest", total="plus",
        total_constant=1e-20, scale=2.5, in_order=False, logits="fp32",
    ),
    "deepseek_v2": RouterForm(
        60, 6, "softmax", groups=5, top_groups=2, limited=0.0, takes_limited=True, scale=16.0, logits="fp32"
    ),
    "mixtral": RouterForm(8, 2, "softmax", total="plus", scores="fp32"),
    "qwen3_moe": RouterForm(512, 10, "softmax", total="plus", scores="fp32", weights="hidden"),
    "gpt_oss": RouterForm(37, 4, "softmax", late=True),
    "granitemoe": RouterForm(62, 8, "softmax", late=True, scores="fp32", weights="hidden"),
    "kolibri1": RouterForm(19, 3, "sigmoid", late=True, corrected=True, logits="fp32"),
    "ernie4_5_moe": RouterForm(
        64, 6, "softmax", corrected=True, total="at_least", total_constant=1e-12, logits="fp32", weights="hidden"
    ),
    "deepseek_v4": RouterForm(
        33, 5, "sqrt_softplus", corrected=True, total="plus", total_constant=1e-20, scale=1.5
    ),
    "lfm2_moe": RouterForm(
        32, 4, "sigmoid", corrected=True, total="plus", total_constant=1e-6, compared="fp32"
    ),
    "of one": RouterForm(5, 1, "sigmoid", picked_scale=0.5, total="plus", total_constant=0.25),
    "of all": RouterForm(16, 16, "softmax", total="plus"),
    "of the best group": RouterForm(24, 3, "sigmoid", groups=4, top_groups=1, takes_limited=True),
    "corrected and limited": RouterForm(
        24, 9, "sigmoid", corrected=True, groups=4, top_groups=1, limited=-9.0, takes_limited=True, scale=3.0
    ),
}  # fmt: skip


def spec_of(form: RouterForm, hidden: Dtype, isa: Isa) -> RouterSpec:
    return RouterSpec("router", form, form.dtypes(hidden)["logits"], hidden, isa)


_ISAS = tuple(isa for isa in ROUTER_ISAS if isa in ISAS)
# One kernel for each instruction set, each of another kind.
_SAMPLE = (("deepseek_v3", "bf16"), ("deepseek_v2", "fp32"), ("gpt_oss", "fp16"), ("deepseek_v4", "bf16"))
_QUICK = [(name, hidden, isa) for (name, hidden), isa in zip(_SAMPLE, _ISAS, strict=False)]
# Every form with every instruction set, each time in another dtype.
_ALL = [
    (name, hidden, isa) for place, name in enumerate(FORMS)
    for isa, hidden in zip(_ISAS, islice(cycle(DTYPES), place, None), strict=False)
]  # fmt: skip
SPECS: dict[str, RouterSpec] = {
    f"{name}-{hidden}-{isa}": spec_of(FORMS[name], hidden, isa) for name, hidden, isa in (*_QUICK, *_ALL)
}
QUICK = tuple(SPECS)[: len(_QUICK)]


@cache
def routers(names: tuple[str, ...]) -> KernelLibrary:
    """The library of these kernels, built once per run."""
    specs = [SPECS[name] for name in names]
    return build(render(specs, dict.fromkeys(specs, "test")), host.detect())


def logits_of(spec: RouterSpec, rows: int, seed: int = 3) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits (T, E), a bias (E,) where the form has one, and gradients of weights (T, k), in the kernel's dtypes."""
    generator, form = torch.Generator().manual_seed(seed), spec.form
    logits = torch.randn(rows, form.num_experts, generator=generator).to(DTYPES[spec.dtype])
    bias = torch.randn(form.num_experts, generator=generator) / 4 if form.corrected else None
    given = torch.randn(rows, form.top_k, generator=generator)
    return logits, bias, given.to(DTYPES[form.dtypes(spec.hidden)["weights"]])

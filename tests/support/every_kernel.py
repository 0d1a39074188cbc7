"""The specs of every kernel that the product generates for an instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import get_args

from kernel_layers import EVERYWHERE, FORMS, ISAS, spec_of
from routers import FORMS as ROUTERS
from routers import spec_of as router_spec_of

from ktc.foundation.formats import BLOCKS, CODES, FORMATS, Dense
from ktc.foundation.isa import Isa
from ktc.model.kernels.attention_spec import ISAS as ATTENTION_ISAS
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.model.kernels.fused_moe_spec import KERNELS, FusedMoeSpec
from ktc.model.kernels.linear_spec import ISAS as LINEAR_ISAS
from ktc.model.kernels.linear_spec import Dtype, LinearSpec, PackedLinearSpec
from ktc.model.kernels.router_spec import ISAS as ROUTER_ISAS
from ktc.model.kernels.spec import Spec
from ktc.model.kernels.step_spec import StepSpec


def every_spec(isa: Isa) -> tuple[Spec, ...]:
    """Every kernel that the product generates for an instruction set, up to forms of experts that differ in nothing
    but the activation: all of those are with the best one."""
    forms = FORMS if isa == ISAS[0] else EVERYWHERE
    dtypes: tuple[Dtype, ...] = get_args(Dtype)
    specs: list[Spec] = [*_moe_specs(isa), *(spec_of(isa, form=form) for form in forms)]
    if isa in LINEAR_ISAS:
        specs += [LinearSpec("linear", dtype, isa) for dtype in dtypes]
        specs += [AttentionSpec("int8_attention", dtype, isa) for dtype in dtypes]
        specs += [StepSpec("step", "fp32", isa)]
    cached: list[Dtype] = [dtype for dtype in dtypes if isa in ATTENTION_ISAS[dtype]]
    specs += [AttentionSpec("attention", dtype, isa) for dtype in cached]
    specs += [AttentionSpec("sparse_attention", dtype, isa) for dtype in cached]
    specs += [PackedLinearSpec("packed_linear", "bf16", name, isa) for name in BLOCKS if name in KERNELS[isa]]
    if isa in ROUTER_ISAS:
        specs += [
            router_spec_of(form, dtype, isa) for form, dtype in zip(ROUTERS.values(), cycle(dtypes), strict=False)
        ]
    return tuple(dict.fromkeys(specs))


def _moe_specs(isa: Isa) -> Iterator[FusedMoeSpec]:
    """Experts in every weight format, with every size of groups, and with two formats in one layer."""
    for name in KERNELS[isa]:
        row = FORMATS[name]
        for group in CODES[name].group_sizes if name in CODES else (0,):
            dtype = row.computes if isinstance(row, Dense) else "bf16"
            yield spec_of(isa, dtype, codes=(name, group))
    yield replace(spec_of(isa, codes=("q4_k", 0)), format_down="q6_k")

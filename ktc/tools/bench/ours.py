"""ktc's own kernels as candidates: one for each weight format and instruction set, built as a compilation builds them.

In: the requested names `ktc_FORMAT`, for every format that an instruction set multiplies. Refused: the errors of
render and build.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.formats import BLOCKS, CODES, FORMATS, WeightFormat
from ktc.foundation.isa import Isa
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.block_reference import random_blocks
from ktc.model.experts.weights import ExpertsWeights
from ktc.model.kernels.form import ExpertPart, ExpertsSizes, parse_form
from ktc.model.kernels.fused_moe_spec import KERNELS, FusedMoeSpec
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.stages.codegen import build, render
from ktc.tools.bench.candidate import Layer, LocalCandidate
from ktc.tools.bench.inputs import Weights, lora_factors
from ktc.tools.bench.layer_requests import KTC, Moe, Shape, even_rows

_BLOCK_SCALE = 0.02  # about as large as the other weights


def candidates(request: Moe, weights: Weights) -> Iterator[LocalCandidate]:
    """Yield one per format and instruction set, in the requested order. The kernels are built here, all together."""
    specs = [spec for _, spec in kernels_of(request)]
    if not specs:
        return
    library = build.build(render.render(specs, dict.fromkeys(specs, "ktc bench moe")), host.detect())
    for impl, spec in kernels_of(request):
        module = _packed(request, spec, library, weights)
        expert_bytes = module.packed_bytes / request.shape.num_experts
        yield LocalCandidate(impl, lambda rank, module=module: _layer(module, request, rank), expert_bytes, spec.isa)


def kernels_of(request: Moe) -> tuple[tuple[str, FusedMoeSpec], ...]:
    """Return names and kernels, the first instruction set's first: of formats that can hold such matrices."""
    return tuple(
        (impl, spec_of(request.shape, isa, name))
        for isa in request.isas
        for impl in request.impls
        for name in KERNELS[isa]
        if impl == f"{KTC}{name}" and even_rows(request.shape, name)
    )


def spec_of(shape: Shape, isa: Isa, weight_format: WeightFormat) -> FusedMoeSpec:
    """Return the kernel that a compilation would choose for these experts."""
    dtype = FORMATS[weight_format].dtype
    group = CODES[weight_format].group_sizes[0] if weight_format in CODES else 0
    sizes = (shape.hidden, shape.intermediate, shape.num_experts, shape.top_k)
    return FusedMoeSpec("fused_moe", *sizes, dtype, weight_format, weight_format, isa, group_size=group)


def _packed(request: Moe, spec: FusedMoeSpec, library: KernelLibrary, weights: Weights) -> FusedMoe:
    shape = request.shape
    sizes = ExpertsSizes(shape.num_experts, shape.hidden, shape.intermediate, shape.top_k)
    packed = PackedExperts(library.kernel(spec.entry), request.threads, sizes)
    module = FusedMoe(ExpertsWeights(parse_form("silu"), sizes, torch.bfloat16, packed))
    if spec.format_down in BLOCKS:
        _load_blocks(module, shape, spec.format_down)
        return module
    for expert in range(shape.num_experts):
        gate_up, down = weights.expert(expert)
        gate, up = gate_up.chunk(2)
        module.load_expert(expert, "gate", gate)
        module.load_expert(expert, "up", up)
        module.load_expert(expert, "down", down)
    return module


def _load_blocks(module: FusedMoe, shape: Shape, weight_format: WeightFormat) -> None:
    """Random blocks, rotated by rows from expert to expert: not every such format can be made of other weights."""
    generator = torch.Generator().manual_seed(0)
    sizes: dict[ExpertPart, tuple[int, int]] = {
        "gate": (shape.intermediate, shape.hidden),
        "up": (shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    for part, (rows, columns) in sizes.items():
        blocks = random_blocks(rows, columns, weight_format, _BLOCK_SCALE, generator)
        for expert in range(shape.num_experts):
            module.weights.load_blocks(expert, part, blocks.roll(expert, 0))


def _layer(module: FusedMoe, request: Moe, rank: int) -> Layer:
    if rank == 0:
        return Layer(module)
    lora = lora_factors(request.shape, rank, request.lora_dropout)
    trained = tuple(factor for factor in lora.factors if factor is not None)

    def experts(x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return module(x_TH, index_TK, weights_TK, lora=lora)

    return Layer(experts, trained)

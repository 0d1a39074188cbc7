"""Experts in any pair of weight formats, from blocks and codes of random weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from kernel_layers import ISAS, Layer, built, experts_of, random_layer, spec_of

from ktc.foundation.formats import BLOCKS, FORMATS, Codes
from ktc.model.experts.layouts.stock_layout import canonical_parts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.block_reference import random_blocks
from ktc.model.kernels.form import ExpertsForm
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec


def in_blocks(gate_up: str, down: str) -> FusedMoeSpec:
    return replace(spec_of(ISAS[0]), format_gate_up=gate_up, format_down=down)


def stored_experts(
    spec: FusedMoeSpec, num_experts: int, tokens: int = 1, least: int = 300, intermediate: int = 45
) -> tuple[FusedMoe, Layer]:
    """Return experts in the formats of `spec`, with sizes that are no multiples of those where the formats allow it.

    Codes have rows and columns of `least` numbers or more, by default more than one tile of a kernel has.
    """
    sizes = {"hidden": 70, "intermediate": intermediate}
    for name, stored in zip(sizes, spec.formats * 2, strict=False):
        row = FORMATS[stored]
        whole = spec.group_size if isinstance(row, Codes) and row.even else row.whole
        sizes[name] = -(-max(sizes[name], least if isinstance(row, Codes) else 160) // whole) * whole
    form = ExpertsForm(spec.activation, gated=spec.gated, biased=spec.biased)
    layer = random_layer(**sizes, num_experts=num_experts, top_k=2, tokens=tokens, form=str(form))
    kernel = built((spec,)).kernel(spec.entry)
    module = experts_of(num_experts, layer.hidden, layer.intermediate, 2, layer.form, kernel=kernel)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in layer.stock.items():
        for expert in range(num_experts):
            for part, values in canonical_parts(layer.form, name, tensor[expert]):
                stored = spec.format_of(part)
                if stored in BLOCKS:
                    module.weights.load_blocks(expert, part, random_blocks(*values.shape, stored, 0.1, generator))
                else:
                    module.load_expert(expert, part, values)
    return module, layer

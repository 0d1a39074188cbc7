"""Layers of the kernels that most tests share (`tests/conftest.py`)."""

from __future__ import annotations

import pytest
from kernel_layers import SLOW_SPECS, SPECS, Layer, Load, built, experts_of

from ktc.model.experts.layouts.stock_layout import canonical_parts
from ktc.model.experts.module import FusedMoe
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.kernel_library import Kernel, KernelLibrary


@pytest.fixture(scope="session")
def load(kernels: KernelLibrary) -> Load:
    """`load(layer, spec, **options)` is a `FusedMoe` holding the layer's weights; `spec=None` is the reference."""

    def kernel_of(spec: FusedMoeSpec) -> Kernel:
        library = kernels if spec in SPECS else built(SLOW_SPECS if spec in SLOW_SPECS else (spec,))
        return library.kernel(spec.entry)

    def make(layer: Layer, spec: FusedMoeSpec | None, **options: object) -> FusedMoe:
        module = experts_of(
            layer.num_experts,
            layer.hidden,
            layer.intermediate,
            layer.top_k,
            layer.form,
            kernel=kernel_of(spec) if spec else None,
            **options,  # type: ignore[arg-type]
        )
        for name, tensor in layer.stock.items():
            for expert in range(layer.num_experts):
                for part, values in canonical_parts(layer.form, name, tensor[expert]):
                    module.load_expert(expert, part, values)
        return module

    return make

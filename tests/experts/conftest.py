"""One kernel library for the whole folder, built once in a temporary cache, and a way to make layers of it."""

from __future__ import annotations

import pytest
from kernel_layers import SPECS, Layer, Load

from ktc import host
from ktc.codegen.build import build
from ktc.codegen.render import KernelSource, render
from ktc.experts.kernel_library import KernelLibrary
from ktc.experts.module import FusedMoe
from ktc.experts.stock_layout import canonical_parts
from ktc.plan.kernel_spec import KernelSpec


@pytest.fixture(scope="session")
def kernel_source() -> KernelSource:
    return render(SPECS, dict.fromkeys(SPECS, "tests/experts/conftest.py:1:1"))


@pytest.fixture(scope="session")
def kernels(kernel_source: KernelSource, tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    return build(kernel_source, host.detect(), tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def load(kernels: KernelLibrary) -> Load:
    """`load(layer, spec, **options)` is a `FusedMoe` holding the layer's weights; `spec=None` is the reference."""

    def make(layer: Layer, spec: KernelSpec | None, **options: object) -> FusedMoe:
        module = FusedMoe(
            layer.num_experts,
            layer.hidden,
            layer.intermediate,
            layer.top_k,
            layer.form,
            kernel=kernels.kernel(spec.entry) if spec else None,
            **options,  # type: ignore[arg-type]
        )
        for name, tensor in layer.stock.items():
            for expert in range(layer.num_experts):
                for part, values in canonical_parts(layer.form, name, tensor[expert]):
                    module.load_expert(expert, part, values)
        return module

    return make

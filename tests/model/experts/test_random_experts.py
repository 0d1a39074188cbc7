"""Random experts in packed form: finite in every format, the same for the same seed, no two neighbours equal."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from kernel_layers import FORMS, ISAS, built, experts_of, quick_or_slow, spec_of

from ktc.model.experts.layouts.stock_layout import parts_of
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.random_experts import RandomExperts
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.kernel_library import Kernel, KernelLibrary

BLOCKS = [replace(spec_of(ISAS[0]), format_gate_up=one, format_down=other) for one, other in (
    ("q4_k", "q6_k"), ("q8_0", "q4_0"), ("q4_1", "q5_k"), ("mxfp4", "fp16"),
)]  # fmt: skip
CODES = [spec_of(ISAS[0], codes=codes) for codes in (("int4", 32), ("int8", 0), ("int4", 128), ("fp8", 128))]
# Those that other quick tests build too.
QUICK = (BLOCKS[0], *CODES[:2])
FORMATS = [quick_or_slow(spec, spec in QUICK, id=spec.entry) for spec in (*CODES, *BLOCKS)]
EXPERTS = 11


def made(spec: FusedMoeSpec, seed: int = 3) -> FusedMoe:
    return filled(built((spec,)).kernel(spec.entry), seed=seed)


def filled(kernel: Kernel | None, form: str = "silu", seed: int = 3) -> FusedMoe:
    module = experts_of(EXPERTS, 256, 512, 2, form, kernel=kernel)
    RandomExperts(seed).fill(module, 0, lambda size: None)
    return module


def assert_random(module: FusedMoe) -> None:
    assert not module.missing()
    for part in parts_of(module.form):
        experts = [module.expert(number, part) for number in range(EXPERTS)]
        for one, following in pairwise(experts):
            assert bool(one.isfinite().all())
            assert part.endswith("_bias") or (
                0.005 < float(one.float().std()) < 0.08 and not torch.equal(one, following)
            )


@pytest.mark.parametrize("spec", FORMATS)
def test_experts_of_every_format_are_finite_and_the_same_for_a_seed(spec: FusedMoeSpec) -> None:
    module = made(spec)
    assert_random(module)
    assert bytes(made(spec).weights.packed_storage) == bytes(module.weights.packed_storage)
    assert bytes(made(spec, seed=4).weights.packed_storage) != bytes(module.weights.packed_storage)


@pytest.mark.parametrize("form", FORMS[:2])
def test_experts_of_other_forms_and_without_a_kernel_too(kernels: KernelLibrary, form: str) -> None:
    for kernel in (kernels.kernel(spec_of(ISAS[0], form=form).entry), None):
        assert_random(filled(kernel, form))


def test_consecutive_layers_differ_and_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QUICK[1]
    layers = [experts_of(EXPERTS, 256, 512, 2, kernel=built((spec,)).kernel(spec.entry)) for _ in range(2)]
    sizes: list[int] = []
    random = RandomExperts(0)
    random.fill(layers[0], 0, sizes.append)
    packed = type(layers[0].weights.packed)
    monkeypatch.setattr(packed, "load", lambda *_: pytest.fail("packed again"))
    random.fill(layers[1], 1, sizes.append)
    assert sum(sizes) == 2 * layers[0].packed_bytes
    one, other = (
        torch.frombuffer(layer.weights.packed_storage, dtype=torch.uint8).view(EXPERTS, -1) for layer in layers
    )
    assert not any(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert torch.equal(one[1], other[0])

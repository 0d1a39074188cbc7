"""What making twins and testing kernels does to torch's generators: nothing, on any device."""

from __future__ import annotations

import pytest
import torch
from kernel_layers import SPECS
from transformers import AutoConfig

from ktc.model import twin
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.stages.codegen.self_test import self_test


@pytest.fixture
def seeded_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that GPUs are given, now or at their first use; a machine without any remembers them too."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    return seeds


def test_a_twin_seeds_no_generator_but_its_own(seeded_gpus: list[int]) -> None:
    state = torch.get_rng_state()
    config = twin.shrink(AutoConfig.for_model("qwen3_moe"))
    twin.build(config, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert seeded_gpus == []


def test_a_self_test_seeds_no_generator_but_its_own(kernels: KernelLibrary, seeded_gpus: list[int]) -> None:
    state = torch.get_rng_state()
    self_test(kernels.kernel(SPECS[0].entry), SPECS[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert seeded_gpus == []

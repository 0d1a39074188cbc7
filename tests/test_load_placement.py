"""Placement: the nearest ancestor's entry counts, and activations go where the next module stands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ktc.diagnostics import HostLacks
from ktc.runtime.placement import check_devices, device_map, device_of, follow

SPLIT = {"model": "cuda:0", "model.layers.1": "cuda:1", "model.layers.1.mlp.experts": "cpu", "lm_head": "cuda:1"}


@pytest.mark.parametrize(
    ("fqn", "device"),
    [
        ("model.embed_tokens.weight", "cuda:0"),
        ("model.layers.1.mlp.gate.weight", "cuda:1"),
        ("model.layers.1.mlp.experts.down_proj", "cpu"),
        ("model.layers.10.mlp.gate.weight", "cuda:0"),
        ("lm_head.weight", "cuda:1"),
        ("other", "cpu"),
    ],
)
def test_the_nearest_ancestor_decides(fqn: str, device: str) -> None:
    assert device_of(fqn, SPLIT) == torch.device(device)
    assert device_of("other", {"": "cuda:0"}) == torch.device("cuda:0")


def test_the_map_for_hugging_face_is_there_only_if_devices_differ() -> None:
    assert device_map({"model": "cpu", "lm_head": "cpu"}) is None
    assert device_map({"model": "cuda:0", "lm_head": "cpu"}) == {"model": 0, "lm_head": "cpu"}


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(HostLacks, match="`cuda:77`"):
        check_devices({"model": "cpu", "lm_head": "cuda:77"})


def test_activations_follow_the_modules() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2, device="meta")

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) * scale)

    block = Block()
    follow(block, {"": "cpu", "first": "cpu", "second": "meta"})
    out = block(torch.ones(4, 3), scale=torch.ones(()))
    assert (out.device.type, out.shape) == ("meta", (4, 2))

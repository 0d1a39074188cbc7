"""Calls of layers are recorded also where a release of transformers checkpoints a layer outside of its `forward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ktc.training.trainers.layer_calls import finished, record
from ktc.training.trainers.split_layer import SplitLayer


class Checkpointed(nn.Module):
    """As in transformers 5.6."""

    gradient_checkpointing = True

    def __call__(self, x: Tensor) -> Any:
        if self.gradient_checkpointing:
            return checkpoint(super().__call__, x, use_reentrant=True)
        return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_checkpoints_around_layers_are_left_out_and_stay() -> None:
    layers = [SplitLayer(Checkpointed(), None, None) for _ in range(2)]
    layers[1].layer.gradient_checkpointing = True
    x = torch.ones(1, 3, 2, requires_grad=True)

    def model() -> Tensor:
        return layers[1].layer(layers[0].layer(x))

    call = record(layers, model)
    assert call.hidden is x
    final = torch.full_like(x, 5.0, requires_grad=True)
    with finished(layers, final, lambda _: None):
        model().sum().backward()
    assert final.grad is not None
    assert torch.equal(model(), 4 * x)
    assert [vars(split.layer).get("gradient_checkpointing") for split in layers] == [None, True]

"""Calls of layers are recorded also where a release of transformers checkpoints a layer outside of its `forward`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from ktc.training.trainers.layer_calls import caller_of, finished, record
from ktc.training.trainers.split_layer import CannotStack, SplitLayer


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


class ReturnsPairs(nn.Module):
    """A model whose layers return hidden states and more, as those that share what an index has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_layers_that_return_more_than_hidden_states_are_refused(rows: int) -> None:
    model = ReturnsPairs()
    layers = [SplitLayer(layer, None, None) for layer in model.layers]
    with pytest.raises(CannotStack, match=r"between its layers|more from its layers"):
        record(layers, lambda: model(torch.ones(rows, 3, 2)))


def test_an_error_before_the_layers_is_the_users() -> None:
    def run() -> None:
        raise ValueError("no labels")

    with pytest.raises(ValueError, match="no labels"):
        record([SplitLayer(nn.Identity(), None, None)], run)


def test_masks_are_left_out_in_the_module_that_calls_the_layers() -> None:
    model, x = Calling(), torch.ones(1, 3, 2)
    layers = [SplitLayer(layer, None, None) for layer in model.inner.layers]
    assert caller_of(model, layers) is model.inner
    stock = masking_utils._preprocess_mask_arguments
    with finished(layers, x, lambda _: None, caller_of(model, layers)):
        assert model(x) is x
    assert model.seen == [stock, stock] and model.inner.seen != [stock]
    assert "forward" not in vars(model.inner)


class Calling(nn.Module):
    """A model and the module inside of it that calls its layers. Both note how masks are made."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.seen: list[Any] = []
        if inner is None:
            self.inner = Calling(nn.ModuleList(nn.Identity() for _ in range(2)))
        else:
            self.layers = inner

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(masking_utils._preprocess_mask_arguments)
        if not hasattr(self, "inner"):
            return self.layers[1](self.layers[0](x))
        x = self.inner(x)
        self.seen.append(masking_utils._preprocess_mask_arguments)
        return x

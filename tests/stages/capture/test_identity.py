"""Sites share a graph only if they compute the same: settings found by a layer's own number tell them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ktc.stages.capture.identity import identity_of
from ktc.stages.capture.trace import recording_reads

HIDDEN = torch.empty(3, 7, 8, device="meta")


class Config(PreTrainedConfig):
    model_type = "layered"
    scales: tuple[float, ...] = (1.0, 2.0)
    equal: tuple[float, ...] = (1.0, 1.0)


class Block(nn.Module):
    def __init__(self, layer: int, compute: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.config, self.layer_idx, self.compute = Config(), layer, compute

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.compute(self, hidden_states)


def by_list(block: Block, x: Tensor) -> Tensor:
    return x * block.config.scales[block.layer_idx]


def by_branch(block: Block, x: Tensor) -> Tensor:
    return x.clamp(max=7.0) if block.layer_idx % 2 else x


def in_training(block: Block, x: Tensor) -> Tensor:
    return x * 2 if block.training and block.layer_idx else x


def on_many_tokens(block: Block, x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 256 and block.layer_idx else x


def equal_values(block: Block, x: Tensor) -> Tensor:
    return x * block.config.equal[block.layer_idx]


def number_alone(block: Block, x: Tensor) -> Tensor:
    assert block.layer_idx < 10
    return x + 1


def identities(compute: Callable[[Block, Tensor], Tensor]) -> list[object]:
    return [identity_of(Block(layer, compute).eval(), ((HIDDEN,), {}), None, layer) for layer in (0, 1)]


@pytest.mark.parametrize("compute", [by_list, by_branch, in_training, on_many_tokens], ids=lambda c: c.__name__)
def test_layers_that_differ_by_their_number_are_different_blocks(compute: Callable[[Block, Tensor], Tensor]) -> None:
    first, second = identities(compute)
    assert first != second


@pytest.mark.parametrize("compute", [equal_values, number_alone], ids=lambda c: c.__name__)
def test_a_number_that_changes_nothing_keeps_layers_equal(compute: Callable[[Block, Tensor], Tensor]) -> None:
    first, second = identities(compute)
    assert first == second


def test_a_loop_over_experts_that_reads_its_number_is_shared_with_no_other_layer() -> None:
    def far_branch(block: Block, x: Tensor) -> Tensor:
        x = sum((expert(x) for expert in block.experts), torch.zeros_like(x))
        return x * 0.5 if block.layer_idx > 0 and x.shape[1] > 4096 else x

    blocks = [Block(layer, far_branch).eval() for layer in (0, 1)]
    for block in blocks:
        with torch.device("meta"):
            block.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    first, second = (identity_of(block, ((HIDDEN,), {}), None, layer) for layer, block in enumerate(blocks))
    assert first != second


def test_the_settings_that_code_reads_are_recorded_while_it_runs() -> None:
    block = Block(1, by_list)
    with recording_reads() as reads:
        block(HIDDEN)
    assert reads == {"Config.scales": {"(1.0, 2.0)"}}
    assert block.config.equal == (1.0, 1.0)
    assert "Config.equal" not in reads

"""A branch on the size of a call is found in the guards of an exported program, at sizes of any magnitude."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ktc.stages.capture import markers
from ktc.stages.capture.export import SizeBranch, export_block

markers._library()

BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "more than 300 tokens": lambda x: x * 2 if x.shape[0] * x.shape[1] > 300 else x,
    "a batch of 5": lambda x: x * 2 if x.shape[0] == 5 else x,
    "55 tokens": lambda x: x * 2 if x.shape[0] * x.shape[1] == 55 else x,
    "53 tokens, each for two experts": lambda x: x * 2 if 2 * x.shape[0] * x.shape[1] == 106 else x,
    "multiples of 4": lambda x: x * 2 if x.shape[1] % 4 == 0 else x,
    "a capacity": lambda x: x * int(1.25 * x.shape[1] / 4),
}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "rows and back": lambda x: x.reshape(-1, 8).reshape(x.shape),
    "divided by its length": lambda x: x / x.shape[1],
    "halves": lambda x: torch.cat(x.chunk(2, -1), -1),
}


class Block(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.compute(hidden_states)


@pytest.mark.parametrize("what", BRANCHES)
def test_a_branch_on_the_size_is_refused(what: str) -> None:
    with pytest.raises(SizeBranch, match="calls of another length"):
        export_block(Block(BRANCHES[what]), (torch.empty(3, 7, 8, device="meta"),), {}, whole=True)


@pytest.mark.parametrize("what", PLAIN)
def test_code_that_holds_for_every_size_is_exported(what: str) -> None:
    export_block(Block(PLAIN[what]), (torch.empty(3, 7, 8, device="meta"),), {}, whole=True)

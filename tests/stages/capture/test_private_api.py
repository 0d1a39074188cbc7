"""The private names of torch that `ktc/stages/capture/private_api.py` holds are there, and as ktc takes them."""

from __future__ import annotations

import torch

from ktc.stages.capture.forms import reads_rows
from ktc.stages.capture.private_api import as_if_compiling, base_of


def test_a_tensor_of_any_number_of_rows_leaves_a_guard_where_code_asks_for_it() -> None:
    sample = torch.zeros(2, 8)
    assert not reads_rows(lambda x: x * 2, sample)
    assert reads_rows(lambda x: x * (2 if x.shape[0] == 55 else 1), sample)


def test_torch_says_that_it_compiles_by_flags() -> None:
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()
    with as_if_compiling():
        assert torch.compiler.is_compiling()
        assert torch.compiler.is_exporting()
        assert torch.compiler.is_dynamo_compiling()
    assert not torch.compiler.is_compiling()


def test_a_view_has_a_base() -> None:
    whole = torch.zeros(2, 3)
    assert base_of(whole[0]) is whole and base_of(whole) is None

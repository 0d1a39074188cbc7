"""Kernels of few rows: one order of sums in every call, and other kernels where Triton has no Gluon."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from ktc.model.linears import byte_row_kernels, coded_row_kernels
from ktc.model.linears.coded_weight import CodedWeight

WITHOUT_GLUON = """
import logging, sys
sys.modules["triton.experimental.gluon"] = None
from ktc.model.experts.gpu import kept_kernels
from ktc.model.decode_steps import gpu_linears
from ktc.model.linears import coded_row_kernels
from ktc.model.kernels.triton_support import has_gluon
logging.basicConfig()
assert not has_gluon() and not has_gluon()
assert gpu_linears._most_joined() == 3
"""


class _Launched:
    """Stands for a kernel, and notes warps, blocks and matrices of its launches."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int, int]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **of: self.noted.append((of["WARPS"], of["BLOCKS"], of["MATRICES"]))


def _weight(panels: int) -> CodedWeight:
    return CodedWeight.of(torch.zeros(panels * 68 * 16, dtype=torch.uint8), "q8_0", panels * 32, 32)


def _serves(*_: object) -> bool:
    return True


@pytest.mark.parametrize("panels", [(100, 90, 20), (400, 300, 300), (100, 200, 600), (129, 128, 512)])
def test_sums_of_a_layer_have_one_order_alone_and_joined(
    panels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = _Launched()
    monkeypatch.setattr(byte_row_kernels, "serves", _serves)
    monkeypatch.setattr(byte_row_kernels, "_rows_times", launched)
    matrices = [_weight(count).matrix for count in panels]
    x, biases = torch.zeros(1, 32, dtype=torch.bfloat16), list[Tensor | None]([None] * 3)
    coded_row_kernels.rows_times_each(x, matrices, biases)
    joined = [(warps, blocks) for warps, blocks, count in launched.noted for _ in range(count)]
    launched.noted.clear()
    for matrix in matrices:
        coded_row_kernels.rows_times(x, matrix, None)
    assert joined == [(warps, blocks) for warps, blocks, _ in launched.noted]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter has no Gluon")
@pytest.mark.parametrize("panels", [(100, 90, 20), (400, 300, 300), (100, 200, 600)])
def test_joined_products_in_q8_0_are_those_of_layers_alone(panels: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2880, generator=generator).bfloat16().cuda()
    matrices = [
        CodedWeight.of(
            torch.randint(0, 60, (count * 90 * 1088,), generator=generator).to(torch.uint8).cuda(), "q8_0",
            count * 32, 2880,
        ).matrix
        for count in panels
    ]  # fmt: skip
    alone = [coded_row_kernels.rows_times(x, matrix, None) for matrix in matrices]
    assert torch.equal(coded_row_kernels.rows_times_each(x, matrices, [None] * 3), torch.cat(alone, 1))


def test_other_kernels_serve_where_triton_has_no_gluon() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_GLUON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no Gluon") == 1

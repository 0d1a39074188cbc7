"""Grouped products: rows sorted by expert, each times the matrix of its expert, in one call for all experts.

In: rows (S, K), matrices (G, N, K), and `ends` (G,) int32, where the rows of each group end. Out: rows (S, N).
`torch.nn.functional.grouped_mm` computes them where it serves the device, the dtype and the sizes; a loop over the
groups computes the others. `serves` returns which. Matrices of codes are multiplied by Triton kernels of ktc, up to
`MOST_ROWS` of an expert without a decoded copy (`coded_kernels.py`).
"""

from __future__ import annotations

import functools
import itertools
from types import ModuleType
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ktc.model.experts.gpu.compiled_functions import has_compiler
from ktc.model.experts.layouts.coded_matrices import CodedMatrices
from ktc.model.experts.layouts.panel_codes import MOST_ROWS
from ktc.model.kernels.triton_support import OLDEST

_ALIGNMENT: Final = 16  # bytes of every row that `grouped_mm` reads or writes


def serves(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Return whether `grouped_mm` multiplies matrices of these sizes on a device."""
    return _has_kernel(device, dtype) and all(size * dtype.itemsize % _ALIGNMENT == 0 for size in sizes)


def described(device: torch.device) -> str:
    """Return the names of the products of experts in bf16 and in codes on a device."""
    plain = "grouped_mm" if _has_kernel(device, torch.bfloat16) else "a loop over the experts"
    return f"products by {plain}, {'with codes as they are' if multiplies_codes(device) else 'codes are decoded first'}"


@functools.cache
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    if not hasattr(F, "grouped_mm") or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if device.type != "cuda":
        return device.type == "cpu"
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= OLDEST


def multiplies_codes(device: torch.device) -> bool:
    """Return whether a device multiplies `CodedMatrices`."""
    return device.type == "cuda" and _has_kernel(device, torch.bfloat16) and has_compiler()


def decoded(matrices: Tensor | CodedMatrices, ends: Tensor) -> Tensor:
    """Return matrices as a tensor (G, N, K). The codes of experts without rows are left undefined."""
    return _kernels().decoded(matrices, ends) if isinstance(matrices, CodedMatrices) else matrices


def is_decoded(matrices: Tensor | CodedMatrices, rows: Tensor, ends: Tensor) -> bool:
    """Return whether `times_rows` decodes these matrices for this many rows."""
    return isinstance(matrices, CodedMatrices) and len(rows) > MOST_ROWS * len(ends)


def decoded_beside(matrices: Tensor | CodedMatrices, more: Tensor, ends: Tensor, padding: int) -> Tensor:
    """Return decoded matrices with further columns: `(G, N, K), (G, N, r) -> (G, N, K + r)`.

    Rows are `padding` values longer than K in memory. Experts without rows are as in `decoded`.
    """
    assert isinstance(matrices, CodedMatrices), "plain matrices are not copied"
    (count, rows, columns), rank = matrices.shape, more.shape[2]
    assert rank <= padding, "the columns have their place in each row"
    whole = more.new_empty(count, rows, columns + padding)
    _kernels().decoded(matrices, ends, whole[..., :columns])
    whole[..., columns : columns + rank] = more
    return whole[..., : columns + rank]


def decoded_below(
    matrices: Tensor | CodedMatrices, more: Tensor | None, ends: Tensor
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return decoded matrices, and the same with further rows below: `(G, N, K), (G, r, K) -> (G, N + r, K)`.

    Plain matrices are not copied, and None is returned instead. Experts without rows are as in `decoded`.
    """
    if more is None or not isinstance(matrices, CodedMatrices):
        return decoded(matrices, ends), None
    count, rows, columns = matrices.shape
    whole = more.new_empty(count, rows + more.shape[1], columns)
    _kernels().decoded(matrices, ends, whole[:, :rows])
    whole[:, rows:] = more
    return whole[:, :rows], whole


def times_rows(rows: Tensor, matrices: Tensor | CodedMatrices, ends: Tensor) -> Tensor:
    """Multiply rows with the transpose of their matrix: `(S, K), (G, N, K), (G,) -> (S, N)`."""
    if isinstance(matrices, CodedMatrices):
        if not is_decoded(matrices, rows, ends):
            return _kernels().times_rows(rows, matrices, ends)
        matrices = decoded(matrices, ends)
    return _product(rows, matrices.transpose(1, 2), ends)


def times_columns(rows: Tensor, matrices: Tensor | CodedMatrices, ends: Tensor) -> Tensor:
    """Multiply rows with their matrix: `(S, N), (G, N, K), (G,) -> (S, K)`."""
    return _product(rows, decoded(matrices, ends), ends)


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Sum the outer products of the rows of each group: `(S, M), (S, N), (G,) -> (G, M, N)`, zero for no rows."""
    if serves(left.device, left.dtype, left.shape[1], right.shape[1]):
        return F.grouped_mm(left.t(), right, offs=ends)
    spans = _spans(ends)
    return torch.stack([left[span].T @ right[span] for span in spans])


def _kernels() -> ModuleType:
    """Return what needs Triton."""
    from ktc.model.experts.gpu import coded_kernels

    return coded_kernels


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if serves(rows.device, rows.dtype, *matrices.shape[1:]):
        return F.grouped_mm(rows, matrices, offs=ends)
    return torch.cat([rows[span] @ matrix for span, matrix in zip(_spans(ends), matrices, strict=True)])


def _spans(ends: Tensor) -> list[slice]:
    bounds = [0, *cast("list[int]", ends.tolist())]
    return [slice(first, end) for first, end in itertools.pairwise(bounds)]

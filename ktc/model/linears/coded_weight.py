"""A linear layer's weight on a GPU as it is stored: panels of codes, multiplied without a decoded copy of them.

In: bytes of panels as the CPU's kernels pack them, and rows in bf16. Out: F.linear's result. Few rows are multiplied
one by one, some by tensor cores from decoded tiles, and for many the weight is decoded for the product alone. Where
Triton is missing, PyTorch's code decodes it for each call, with a warning (L469).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ktc.diagnostics import Diagnostic, render
from ktc.foundation.formats import FORMATS, WeightFormat
from ktc.model.experts.layouts.coded_matrices import CodedMatrices
from ktc.model.experts.layouts.panel_codes import MOST_ROWS, codes_of
from ktc.model.experts.layouts.panels import WIDTH, by_output, panels_of
from ktc.model.experts.products import grouped_products
from ktc.model.experts.products.coded_check import check_codes, random_matrices, require_equal

log = logging.getLogger(__name__)

FEW_ROWS: Final = 4  # that a program reads the panel again for; tensor cores read it once for 16
# Of the weight. A smaller one is decoded for more than `FEW_ROWS`: the kernel with tensor cores has too few programs
# there, and takes 41 to 62 us for 4,096 outputs of 2,880 columns on an H200, where decoding and product take 22.
_LARGE: Final = 1 << 28


def serves(weight_format: WeightFormat) -> bool:
    """Return whether a GPU multiplies a linear layer's weight in this format."""
    return codes_of(FORMATS[weight_format]) is not None


def decodes(rows: int, packed_bytes: int) -> bool:
    """Return whether the product of this many rows decodes a weight of that size, with Triton."""
    return rows > (MOST_ROWS if packed_bytes > _LARGE else FEW_ROWS)


@dataclass(frozen=True, slots=True)
class DecodedCopy:
    """The workspace of a layer's products: its weight in bf16, of `nbytes`, for rows that decode the packed one."""

    nbytes: int
    packed_bytes: int

    def workspace(self, rows: int) -> int:
        """Return the bytes of a product of this many rows."""
        return self.nbytes if decodes(rows, self.packed_bytes) else 0


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """The weight (N, K) in `matrix`, which is one expert's."""

    matrix: CodedMatrices

    @classmethod
    def of(cls, packed: Tensor, weight_format: WeightFormat, outputs: int, inputs: int) -> CodedWeight:
        """Return the weight in packed bytes, on any device."""
        panels = -(-outputs // WIDTH)
        return cls(CodedMatrices(packed.view(1, -1), panels_of(weight_format), 0, panels, outputs, inputs))

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply `(..., K) -> (..., N)`, without gradients."""
        rows = x.reshape(-1, self.matrix.columns).contiguous()
        if decodes(len(rows), self.matrix.packed.nbytes) or not grouped_products.multiplies_codes(x.device):
            out = F.linear(rows, self.decoded(), bias)
        elif len(rows) <= FEW_ROWS:
            from ktc.model.linears.coded_row_kernels import rows_times

            out = rows_times(rows, self.matrix, bias)
        else:
            out = grouped_products.times_rows(rows, self.matrix, _end(rows.device, len(rows)))
            out = out if bias is None else out + bias
        return out.view(*x.shape[:-1], self.matrix.rows)

    def decoded(self) -> Tensor:
        """Return the weight in bf16."""
        packed, matrix = self.matrix.packed, self.matrix
        if grouped_products.multiplies_codes(packed.device):
            return grouped_products.decoded(matrix, _end(packed.device, 1))[0]
        columns = -(-matrix.columns // WIDTH) * WIDTH
        steps = matrix.panels.steps(packed.view(matrix.num_panels, -1), columns)
        return by_output(steps, matrix.columns).flatten(0, 1)[: matrix.rows].to(torch.bfloat16)


@functools.cache
def check_linear(weight_format: WeightFormat, device: torch.device) -> None:
    """Compare products with a layer's codes with PyTorch's, once for each format and device. Raises HostLacks (H247).

    Without Triton PyTorch computes them, with a warning (L469).
    """
    if not grouped_products.multiplies_codes(device):
        _tell_of_decoding(device)
        return
    from ktc.model.linears.coded_row_kernels import rows_times

    panels = panels_of(weight_format)
    check_codes(panels, device)
    matrices, decoded = random_matrices(panels, device)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(FEW_ROWS, matrices.columns, generator=generator).bfloat16().to(device)
    bias = torch.randn(matrices.rows, generator=generator).bfloat16().to(device)
    wanted = rows.float() @ decoded[0].float().T + bias.float()
    require_equal("products of a linear layer", panels, rows_times(rows, matrices[:1], bias), wanted)


@functools.cache
def _tell_of_decoding(device: torch.device) -> None:
    """Warn (L469) that each product decodes its weight. Once per process and device."""
    message = f"`{device}` has no kernels of Triton: each product of a linear layer decodes its weight to bf16 first"
    hint = "install Triton and a C compiler; see `ktc explain L469`"
    log.warning("%s", render([Diagnostic("L469", message, hint=hint, severity="warning")]))


@functools.cache
def _end(device: torch.device, rows: int) -> Tensor:
    """Return where the rows of the only expert end. Captured steps read it too, so it stays."""
    with torch.inference_mode(mode=False):
        return torch.full((1,), rows, dtype=torch.int32, device=device)

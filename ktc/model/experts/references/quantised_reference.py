"""The kernels' quantised formats in plain PyTorch: codes and scales for given weights, and the weights of codes.

In: one matrix (rows, columns). Out: codes (rows, columns) of one byte and fp32 scales (rows, groups), or bf16 weights.
`int8` quantises rows of activations too: `int8_product` is the product of such a kernel, forward and backward.
The C++ of `runtime/include/ktc/weight_format` must agree to the last bit. Refused: weights that are not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ktc.foundation.formats import CODES, Codes


def quantise(weights: Tensor, method: str, group: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales for `weights`, which are rounded to bf16 first; `group` 0 is a whole row."""
    rounded = weights.bfloat16().float()
    if not bool(rounded.isfinite().all()):
        raise ValueError("weights that are not finite cannot be quantised")
    blocks = _blocks(rounded, group)
    codes, scales = _coded(blocks, CODES[method])
    return codes.flatten(1)[:, : weights.shape[1]], scales


def dequantise(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the bf16 weights of codes and scales: their product in fp32, rounded once."""
    numbers = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
    product = _blocks(numbers.float(), group) * scales[..., None]
    return product.flatten(1)[:, : codes.shape[1]].bfloat16()


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (..., K) and one scale (..., 1) per row of activations, which are rounded to bf16 first.

    A row below 2^-100 counts as zero. A row that is not finite has the scale NaN, so its products are NaN too.
    """
    rounded = rows.bfloat16().float()
    largest = rounded.abs().amax(-1, keepdim=True)
    zero = largest < 2.0**-100
    scales = torch.where(largest.isfinite(), largest / 127, torch.nan).masked_fill(zero, 0.0)
    codes = (rounded * largest.new_full((), 127).div(largest)).round()  # `127 / largest` is rounded twice
    return torch.where(largest.isfinite() & ~zero, codes, 0.0).to(torch.int8), scales


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x @ weight.T` in integers, both quantised; its gradient is that of `dequantised_product`."""
    codes, scales = quantise(weight, "int8", 0)
    row_codes, row_scales = quantise_rows(x.detach())
    sums = row_codes.double() @ codes.double().T  # exact
    values = sums * scales.double().T * row_scales.double()
    dense = dequantised_product(x, weight)
    return dense + (values - dense).detach().to(x.dtype)


def dequantised_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x @ weight.T` with the weights of the int8 codes, as backward multiplies them."""
    return x @ dequantise(*quantise(weight, "int8", 0), 0).to(x.dtype).T


# For `fused_moe_reference`: the products of an int8 kernel, and those whose gradients it computes. Backward has gate
# and up as forward had them, but the inputs of down only before their quantisation.
INT8_FORWARD = (int8_product, int8_product)
INT8_BACKWARD = (int8_product, dequantised_product)


def _blocks(matrix: Tensor, group: int) -> Tensor:
    """(rows, groups, size), the last group filled up with zeros."""
    size = group or matrix.shape[1]
    padded = F.pad(matrix, (0, -matrix.shape[1] % size))
    return padded.reshape(matrix.shape[0], -1, size)


def _coded(blocks: Tensor, row: Codes) -> tuple[Tensor, Tensor]:
    """Codes and scales of each group. Rounding the scales to bf16 before the codes are chosen makes it idempotent."""
    scales = (blocks.abs().amax(-1) / row.largest).clamp_min(row.least_scale)
    if row.bf16_scales:
        scales = scales.bfloat16().float()
    quotients = blocks / scales[..., None]
    if row.float8:
        return quotients.clamp(-row.largest, row.largest).to(torch.float8_e4m3fn).view(torch.uint8), scales
    return quotients.round().clamp(-row.largest, row.largest).to(torch.int8), scales

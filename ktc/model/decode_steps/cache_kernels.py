"""The keys and values of a new token written to a cache, by one Triton kernel instead of two copies.

In: memories of keys and values (rows, heads, capacity, d), a position on the device, and the new ones (rows, heads, 1,
d). Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def write(keys: Tensor, values: Tensor, position: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """Write new keys and values at `position` (1,) int64. The last dimension of all tensors is in one piece.

    A position outside is an error of the GPU, as PyTorch's copies make it.
    """
    rows, heads, capacity, width = keys.shape
    value_width = values.shape[-1]
    with torch.cuda.device_of(keys):  # Triton launches on the current device
        _write[(heads, rows)](
            keys, values, position, new_keys, new_values, capacity, *keys.stride()[:3], *values.stride()[:3],
            *new_keys.stride()[:2], *new_values.stride()[:2], WIDTH=width, VALUE_WIDTH=value_width,
            BLOCK=triton.next_power_of_2(max(width, value_width)), num_warps=1,
            debug=True, sanitize_overflow=False,
        )  # fmt: skip


@triton.jit
def _write(
    keys, values, position, new_keys, new_values, capacity,
    key_row, key_head, key_position, value_row, value_head, value_position,
    new_key_row, new_key_head, new_value_row, new_value_head,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, row, d = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    at = tl.load(position)
    inside = (at >= 0) & (at < capacity)
    tl.device_assert(inside, "a position is outside of the cache")
    key = tl.load(new_keys + row * new_key_row + head * new_key_head + d, mask=d < WIDTH)
    tl.store(keys + row * key_row + head * key_head + at * key_position + d, key, mask=inside & (d < WIDTH))
    value = tl.load(new_values + row * new_value_row + head * new_value_head + d, mask=d < VALUE_WIDTH)
    place = values + row * value_row + head * value_head + at * value_position + d
    tl.store(place, value, mask=inside & (d < VALUE_WIDTH))

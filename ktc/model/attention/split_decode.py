"""`SplitDecode`: attention of few new tokens over a cache in the memory of a GPU, by kernels of ktc.

In: queries and what the cache holds, on one GPU. Out: attention's output, rounded once. It waits for nothing on the
host, so that a captured step has it. It is not differentiable, and takes the calls that `serves` accepts: all that
`DecodeAttention` takes on the CPU, and masks that are added to scores. Without Triton it takes none, and the log says
so once.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.attention.decode import MOST_TOKENS, DecodeAttention, KVCacheView
from ktc.model.kernels.step_context import StepContext
from ktc.model.kernels.triton_support import lacking
from ktc.model.linears.gemv import is_plain, is_traced

log = logging.getLogger(__name__)
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_BOUND: Final = 0.01  # of the relative error of bf16 numbers
# Sequences, query heads, key heads, tokens, positions, widths of keys, of rotary keys and of values; 0: latents
_SHAPES: Final = ((2, 8, 2, 1, 300, 128, 0, 128), (1, 16, 1, 1, 300, 512, 64, 0))


@dataclass(frozen=True, slots=True)
class SplitDecode:
    """The kernels of `split_kernels.py`, for tensors on devices of type `device`."""

    device: str = "cuda"

    def serves(self, query: Tensor, kv: KVCacheView, mask: Tensor | None) -> bool:
        """Return whether the kernels take this call: few tokens, under `no_grad`, plain tensors of one dtype."""
        if query.device.type != self.device or query.shape[2] > MOST_TOKENS or query.dtype not in _DTYPES:
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.device) or is_traced():
            return False
        tensors = query, *kv.tensors
        if any(one.dtype != query.dtype or one.device != query.device or not is_plain(one) for one in tensors):
            return False
        rows = all(tensor.stride(-1) == 1 for tensor in kv.tensors)
        return rows and _is_mask(mask, query, kv.keys.shape[2]) and has_kernels(query.device)

    def __call__(
        self, query: Tensor, kv: KVCacheView, *, scale: float, mask: Tensor | None = None,
        sinks: Tensor | None = None, context: StepContext | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute query (B, H, T, k + r) -> (B, T, H, v). Without a `mask` new tokens are the last positions.

        `mask` (B or 1, 1, T, L) is bool, or added to the scores; `sinks` (H,) are further scores without a value.
        """
        return _kernels().attend(query.detach(), kv, scale=scale, mask=mask, sinks=sinks)


Decode = DecodeAttention | SplitDecode
"""The kernels of few new tokens: those of the CPU, or of a GPU."""


def _is_mask(mask: Tensor | None, query: Tensor, positions: int) -> bool:
    """Return whether the kernels take a mask: none, or (B or 1, 1, T, at least L)."""
    if mask is None:
        return True
    known = mask.dtype == torch.bool or mask.is_floating_point()
    if not known or mask.dim() != 4 or mask.device != query.device:
        return False
    batch, heads, tokens, columns = mask.shape
    return batch in (1, len(query)) and heads == 1 and tokens == query.shape[2] and columns >= positions


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels run on a device. A log says once that Triton is missing, or the GPU too old."""
    if why := lacking(device):
        log.warning("%s: attention of new tokens on a GPU is computed by PyTorch, which is slower", why)
    return not why


@functools.cache
def check_split_decode(device: torch.device) -> None:
    """Compare the kernels with attention in fp64, once for each device. Raises HostLacks (H248)."""
    if not has_kernels(device):
        return
    generator = torch.Generator().manual_seed(0)
    for B, H, K, T, L, width, rope, value in _SHAPES:

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(device)

        keys = random(B, K, L, width)
        kv = KVCacheView(keys, random(B, K, L, value) if value else keys, random(B, K, L, rope) if rope else None)
        query, sinks = random(B, H, T, width + rope), random(H)
        mask = (torch.arange(L) >= torch.arange(B)[:, None] * 70).view(B, 1, 1, L).to(device)
        with torch.no_grad():
            computed = _kernels().attend(query, kv, scale=0.1, mask=mask, sinks=sinks).double()
            expected = reference(query, kv, scale=0.1, mask=mask, sinks=sinks)
        error = relative_error(computed, expected)
        if not error <= _BOUND:
            message = f"attention of new tokens is wrong on {device}: a relative error of {error:.2g}"
            hint = "use the tested versions of torch and Triton (constraints.txt), or `kernel = sdpa`"
            raise HostLacks(Diagnostic("H248", message, hint=hint))


def relative_error(computed: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of the expected numbers."""
    return float((computed - expected).square().sum() / expected.square().sum()) ** 0.5


def reference(
    query: Tensor, kv: KVCacheView, *, scale: float, mask: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return what `SplitDecode` computes, in fp64."""
    (B, H, T, _), (K, L) = query.shape, kv.keys.shape[1:3]
    keys = kv.keys if kv.rope_keys is None else torch.cat([kv.keys, kv.rope_keys], -1)
    wide, values = (part.double().repeat_interleave(H // K, 1) for part in (keys, kv.values))
    scores = query.double() @ wide.transpose(2, 3) * scale
    if mask is None:
        mask = torch.ones(T, L, dtype=torch.bool, device=query.device).tril(L - T)
    mask = mask[..., :L]
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    scores = (scores if mask.dtype == torch.bool else scores + mask).masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, H, 1, 1).expand(B, H, T, 1)], -1)
    weights = scores.softmax(-1)[..., :L].nan_to_num(0)
    return (weights @ values).transpose(1, 2)


def _kernels() -> ModuleType:
    """Return what needs Triton."""
    from ktc.model.attention import split_kernels

    return split_kernels

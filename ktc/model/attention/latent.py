"""Multi-head latent attention on the compressed cache: keys and values are not expanded.

In: queries, the latents and rotary keys of all positions, the up-projection of keys and values. Out: the attention
output before the output projection. With W_UK (H, n, c) and W_UV (H, v, c) the two halves of the up-projection,

    q_n . (W_UK l) = (q_n W_UK) . l          sum_l p_l (W_UV l) = W_UV (sum_l p_l l)

so scores and sums are taken over latents, which all heads share (DeepSeek-V2, arXiv 2405.04434, section 2.1). Symbols:
B sequences, T new tokens, L positions, and those of `LatentSizes`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ktc.model.attention.up_projection import UpProjection


def latent_scores(
    query: Tensor, latent: Tensor, k_rope: Tensor, up: UpProjection, *, scale: float, elide: bool = True
) -> Tensor:
    """Return absorbed scores: query (B, H, T, n + r), latent (B, L, c), k_rope (B, L, r) -> (B, H, T, L).

    They are summed in fp32 (fp64 for fp64). With `elide` the two terms of a score are two products; without it, the
    latent and the rotary key of each position are concatenated first.
    """
    B, H, T, _ = query.shape
    if elide:
        q_latent, q_rope = (part.reshape(B, H * T, -1) for part in up.parts(query))
        scores = _elided(q_latent, latent, q_rope, k_rope, scale)
    else:
        joined = up.absorbed(query).reshape(B, H * T, -1)
        scores = _wide(_products(joined, torch.cat([latent, k_rope], dim=-1))) * scale
    return scores.view(B, H, T, -1)


def attend(
    scores: Tensor, latent: Tensor, up: UpProjection, *, mask: Tensor | None = None, sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention over latents: scores (B, H, T, L), latent (B, L, c) -> (B, T, H, v).

    The second result has the probabilities, (B, H, T, L). Without a `mask` new tokens are the last positions, and
    attend to earlier ones and themselves. `mask` is a bool (B or 1, 1 or H, T, L), added to the scores where it is
    floating point, or the valid positions (B, L). `sinks` (H,) are further scores without a value. The scores may be
    overwritten.
    """
    B, H, T, _ = scores.shape
    weights = F.dropout(probabilities(scores, mask, sinks), dropout)
    summed = torch.bmm(weights.to(latent.dtype).reshape(B, H * T, -1), latent)
    return up.out_of_latent(summed.view(B, H, T, -1)).transpose(1, 2), weights


def probabilities(scores: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores (B, H, T, L) over the visible positions; 0 for a token that sees none.

    The scores may be overwritten.
    """
    T, L = scores.shape[-2:]
    visible: Tensor | None = None
    if mask is None or mask.dim() == 2:
        if T > 1:
            visible = torch.ones(T, L, dtype=torch.bool, device=scores.device).tril(L - T)
        if mask is not None:
            valid = mask[:, None, None, -L:].bool()
            visible = valid if visible is None else visible & valid
    elif mask.dtype == torch.bool:
        visible = mask[..., :L]
    else:
        scores = scores + mask[..., :L]
    if visible is not None:
        scores = scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)  # in place, or it is copied first
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :L]
    return weights if visible is None else weights * visible


def _wide(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _elided(q_latent: Tensor, latent: Tensor, q_rope: Tensor, k_rope: Tensor, scale: float) -> Tensor:
    """Return the scaled sum of two products, (B, M, c) with (B, L, c) and (B, M, r) with (B, L, r) -> (B, M, L)."""
    tensors = q_latent, latent, q_rope, k_rope
    alike = q_latent.is_cuda and {tensor.dtype for tensor in tensors} in ({torch.bfloat16}, {torch.float16})
    if alike and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cuda"):
        return cast("Tensor", _WideScores.apply(*tensors, scale))
    return (_wide(_products(q_latent, latent)) + _products(q_rope, k_rope)) * scale


class _WideScores(torch.autograd.Function):
    """The same of 16-bit tensors on a GPU in two kernels, with fp32 results: no product is rounded before the sum."""

    @staticmethod
    def forward(ctx: Any, q_latent: Tensor, latent: Tensor, q_rope: Tensor, k_rope: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q_latent, latent, q_rope, k_rope)
        ctx.scale, wide = scale, torch.float32
        of_rope = torch.bmm(q_rope, k_rope.transpose(1, 2), out_dtype=wide)
        return torch.baddbmm(of_rope, q_latent, latent.transpose(1, 2), out_dtype=wide, beta=scale, alpha=scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_latent, latent, q_rope, k_rope = ctx.saved_tensors
        grad = (grad * ctx.scale).to(q_latent.dtype)
        columns = grad.transpose(1, 2)
        return grad @ latent, columns @ q_latent, grad @ k_rope, columns @ q_rope, None


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """`rows @ keys^T`: (B, M, K), (B, L, K) -> (B, M, L). On the CPU a batched product in bf16 is slow."""
    if rows.is_cuda or rows.shape[0] > 8:
        return torch.bmm(rows, keys.transpose(1, 2))
    return torch.stack([F.linear(row, key) for row, key in zip(rows, keys, strict=True)])

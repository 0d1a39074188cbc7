"""The positions that sparse attention reads, and attention over them alone: the reference of the kernel.

In: estimated scores (B, H, T, L) and the visible positions. Out: `Chosen`, and softmax(scale q K^T) V over the chosen
positions. Symbols are those of `key_codes`; S is H where each query head chooses, and K where they share a choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktc.model.attention.decode import Chosen, KVCacheView
from ktc.model.attention.shared_scores import shared
from ktc.model.attention.sparsity import Sparsity


def visible_positions(mask: Tensor | None, batch: int, tokens: int, positions: int, device: torch.device) -> Tensor:
    """Return the visible positions (B, T, L) as bool; without a `mask` (B or 1, 1, T, L), new tokens are the last."""
    if mask is not None:
        return mask[:, 0, :, :positions].expand(batch, tokens, positions)
    seen = torch.ones(tokens, positions, dtype=torch.bool, device=device).tril(positions - tokens)
    return seen.expand(batch, tokens, positions)


def choose(scores: Tensor, key_heads: int, visible: Tensor, sparsity: Sparsity) -> Chosen:
    """Return the positions of the greatest scores (B, H, T, L), the first and the last; of equal scores the first."""
    B, H, T, L = scores.shape
    if sparsity.shared:
        scores = shared(scores.view(B, key_heads, H // key_heads, T, L), visible)
    places = torch.arange(L, device=scores.device)
    first = visible & (visible.cumsum(-1) <= sparsity.sink)
    last = torch.where(visible, places, -1).amax(-1, keepdim=True)
    forced = first | (visible & (places > last - sparsity.local))
    others = (visible & ~forced)[:, None].expand_as(scores)
    best = scores.masked_fill(~others, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., : sparsity.k]
    taken = torch.zeros_like(others).scatter(-1, best, True) & others
    return chosen_of((taken | forced[:, None]).transpose(1, 2), sparsity.budget)


def chosen_of(taken: Tensor, most: int) -> Chosen:
    """Return the positions (B, T, S, M), at most `most`, where `taken` (B, T, S, L) is true."""
    L = taken.shape[-1]
    places = torch.arange(L, device=taken.device).expand(taken.shape)
    positions = torch.where(taken, places, L).sort(-1).values[..., : min(most, L)]
    return Chosen(positions.masked_fill(positions == L, 0).int().contiguous(), taken.sum(-1).int())


def attend_chosen(
    query: Tensor, kv: KVCacheView, chosen: Chosen, *, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention of query (B, H, T, k) over the chosen positions -> (B, T, H, v), in fp32 or wider."""
    B, H, T, _ = query.shape
    S, M = chosen.positions.shape[2:]
    at = chosen.positions.long().transpose(1, 2)  # (B, S, T, M)
    batch = torch.arange(B, device=at.device).view(B, 1, 1, 1)
    head = (torch.arange(S, device=at.device) // (S // kv.keys.shape[1])).view(1, S, 1, 1)
    rows = [tensor[batch, head, at] for tensor in kv if tensor is not None]
    keys, values = rows[0] if kv.rope_keys is None else torch.cat([rows[0], rows[2]], -1), rows[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.einsum("bsgtk,bstmk->bsgtm", query.view(B, S, H // S, T, -1).to(wide), keys.to(wide)) * scale
    hidden = torch.arange(M, device=at.device) >= chosen.counts.transpose(1, 2)[..., None]
    scores = scores.masked_fill(hidden[:, :, None], -torch.inf)
    if sinks is not None:
        sink = sinks.to(wide).view(1, S, H // S, 1, 1).expand(B, -1, -1, T, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.masked_fill(hidden[:, :, None], 0)
    out = torch.einsum("bsgtm,bstmv->btsgv", weights, values.to(wide))
    return out.reshape(B, T, H, -1).to(query.dtype)

"""A stock latent attention module that runs absorbed where that is cheaper: what `mla_absorbed` puts in the model.

In: the stock module and the arguments of the recipe. Out: the same module, of a class made for it. The stock code
projects, rotates and updates the cache, which holds latents and rotary keys, and masks as before: every cache of
transformers serves. Two of its calls are answered here. `expand_kv` hands the latents on, and the attention function,
chosen by name in the module's own config, computes on them, or expands them and calls the stock function.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from ktc.model.attention.decode import DecodeAttention, Heads
from ktc.model.attention.int8_tensor import plain
from ktc.model.attention.interface import AnsweredAttention, answer, chosen, implementation_of, stock_function
from ktc.model.attention.latent import attend
from ktc.model.attention.latent_sizes import LatentSizes
from ktc.model.attention.sparse import Sparse, follows_cache
from ktc.model.attention.sparsity import Traffic
from ktc.model.attention.up_projection import up_projection
from ktc.model.hf.latent_cache import EXPAND, caches_latents

log = logging.getLogger(__name__)

Absorb = Literal["never", "decode", "prefill", "always"]
NAME: Final = "ktc_latent"  # of the attention function in transformers' register


@dataclass(frozen=True, slots=True)
class Absorption:
    """When a module absorbs, and how. `kv_b` is the name of its up-projection."""

    sizes: LatentSizes
    kv_b: str
    absorb: Absorb
    elide: bool

    def serves(self, new: int, positions: int) -> bool:
        """Return whether `new` tokens over `positions` are computed absorbed."""
        if self.absorb in ("never", "always"):
            return self.absorb == "always"
        few = new < self.sizes.break_even(positions)
        return few if self.absorb == "decode" else not few


class AbsorbedAttention(AnsweredAttention):
    """Mixin before the stock class of a latent attention module."""

    absorption: Absorption
    decode: DecodeAttention | None
    sparse: Sparse | None = None
    traffic: Traffic = Traffic(0, 0, 0)
    told: str = ""
    told_of: str = ""

    def expand_kv(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Hand on what the cache holds, (B, 1, L, c) and (B, 1, L, r), as keys and values."""
        return latent, k_rope


def absorb(
    module: nn.Module, absorption: Absorption, decode: DecodeAttention | None = None, sparse: Sparse | None = None
) -> nn.Module:
    """Give `module` the class that absorbs. `decode` computes the calls that it serves, `sparse` those of long caches.

    Raises ValueError for a module that caches no latents, or of other sizes.
    """
    stock = type(module)
    if not caches_latents(stock):
        raise ValueError(f"`{stock.__name__}` caches keys and values, and no latents")
    sizes, kv_b = absorption.sizes, module.get_submodule(absorption.kv_b)
    wanted = sizes.heads * (sizes.nope + sizes.value), sizes.latent
    found = tuple(cast("Tensor", kv_b.weight).shape)
    if found != wanted:
        raise ValueError(f"its `{absorption.kv_b}` is {list(found)} instead of {list(wanted)}")
    answer(module, NAME, latent_attention, AbsorbedAttention, **({} if sparse is None else follows_cache(stock)))
    made = cast("Any", module)
    made.absorption, made.decode, made.sparse = absorption, decode, sparse
    return module


def latent_attention(
    module: nn.Module, query: Tensor, latent: Tensor, k_rope: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, indices: Tensor | None = None, s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention as transformers' attention functions do: query (B, H, T, n + r) -> (B, T, H, v), and weights.

    `latent` (B, 1, L, c) and `k_rope` (B, 1, L, r) are all positions so far; `indices` (B, T, K) are those that an
    indexer of the model chose. Weights are returned where the model's own implementation is `eager`.
    """
    own = cast("Any", module)
    absorption: Absorption = own.absorption
    new, positions = query.shape[2], latent.shape[2]
    implementation = implementation_of(own)
    mask = attention_mask if indices is None else chosen(attention_mask, indices, positions, query.dtype)
    if absorption.serves(new, positions):
        sizes = absorption.sizes
        up = up_projection(module.get_submodule(absorption.kv_b), sizes.heads, sizes.nope)
        if not isinstance(up, str):
            heads = Heads(latent, latent, k_rope)
            without_weights = implementation != "eager" and not dropout
            sparse: Sparse | None = own.sparse
            if sparse is not None and without_weights:
                q_latent = torch.cat([up.into_latent(query[..., : sizes.nope]), query[..., sizes.nope :]], dim=-1)
                scale = cast("float", scaling)
                summed = sparse.attend(
                    own, q_latent, heads, scale=scale, mask=attention_mask, sinks=s_aux, indices=indices
                )
                if summed is not None:
                    return up.out_of_latent(summed.transpose(1, 2)).transpose(1, 2), None
            if own.decode is not None and without_weights and own.decode.serves(query, heads, mask):
                q_latent = torch.cat([up.into_latent(query[..., : sizes.nope]), query[..., sizes.nope :]], dim=-1)
                summed = own.decode(q_latent, heads, scale=cast("float", scaling), mask=mask, sinks=s_aux)
                return up.out_of_latent(summed.transpose(1, 2)).transpose(1, 2), None
            latent, k_rope = plain(latent), plain(k_rope)  # codes of a cache, where the kernel does not take the call
            out, weights = attend(
                query, latent[:, 0], k_rope[:, 0], up, scale=cast("float", scaling), mask=mask, sinks=s_aux,
                dropout=dropout, elide=absorption.elide,
            )  # fmt: skip
            return out, weights.to(query.dtype) if implementation == "eager" else None
        _tell(own, up)
    stock = own.stock_class
    key, value = cast("tuple[Tensor, Tensor]", getattr(stock, EXPAND)(module, plain(latent), plain(k_rope)))
    options = more if s_aux is None else {**more, "s_aux": s_aux}
    return stock_function(own)(module, query, key, value, mask, scaling=scaling, dropout=dropout, **options)


def _tell(module: Any, reason: str) -> None:
    """Log once per module and reason that it expands keys although the rule absorbs them."""
    if module.told != reason:
        module.told = reason
        name = module.absorption.kv_b
        log.warning("layer %s: `%s` is not absorbed, its keys are expanded: %s", module.layer_idx, name, reason)

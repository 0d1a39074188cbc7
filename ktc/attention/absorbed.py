"""A stock latent attention module that runs absorbed where that is cheaper: what `mla_absorbed` puts in the model.

In: the stock module and the arguments of the recipe. Out: the same module, of a class made for it. The stock code
projects, rotates and updates the cache, which holds latents and rotary keys, and masks as before: every cache of
transformers serves. Two of its calls are answered here. `expand_kv` hands the latents on, and the attention function,
chosen by name in the module's own config, computes on them, or expands them and calls the stock function.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ktc.attention.latent import attend
from ktc.attention.latent_sizes import LatentSizes
from ktc.attention.up_projection import up_projection
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.hf.latent_cache import EXPAND, caches_latents

log = logging.getLogger(__name__)

Absorb = Literal["never", "decode", "prefill", "always"]
NAME: Final = "ktc_latent"  # of the attention function in transformers' register
_INNER: Final = ("sdpa", "eager")  # attention functions that take expanded keys and a mask


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


class AbsorbedAttention:
    """Mixin before the stock class of a latent attention module."""

    absorption: Absorption
    stock_config: Any
    stock_class: type[nn.Module]
    told: str = ""

    def expand_kv(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Hand on what the cache holds, (B, 1, L, c) and (B, 1, L, r), as keys and values."""
        return latent, k_rope


def absorb(module: nn.Module, absorption: Absorption) -> nn.Module:
    """Give `module` the class that absorbs. Raises ValueError for a module without the seam, or of other sizes."""
    stock = type(module)
    if not caches_latents(stock):
        raise ValueError(f"`{stock.__name__}` caches keys and values, and no latents")
    sizes, kv_b = absorption.sizes, module.get_submodule(absorption.kv_b)
    wanted = sizes.heads * (sizes.nope + sizes.value), sizes.latent
    found = tuple(cast("Tensor", kv_b.weight).shape)
    if found != wanted:
        raise ValueError(f"its `{absorption.kv_b}` is {list(found)} instead of {list(wanted)}")
    AttentionInterface.register(NAME, latent_attention)
    made = cast("Any", module)
    made.stock_config = made.config
    made.config = copy.copy(made.config)
    made.config._attn_implementation_internal = NAME
    made.absorption = absorption
    module.__class__ = type(f"Absorbed{stock.__name__}", (AbsorbedAttention, stock), {"stock_class": stock})
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
    implementation = str(own.stock_config._attn_implementation)
    mask = attention_mask if indices is None else _chosen(attention_mask, indices, positions, query.dtype)
    if absorption.serves(new, positions):
        sizes = absorption.sizes
        up = up_projection(module.get_submodule(absorption.kv_b), sizes.heads, sizes.nope)
        if not isinstance(up, str):
            out, weights = attend(
                query, latent[:, 0], k_rope[:, 0], up, scale=cast("float", scaling), mask=mask, sinks=s_aux,
                dropout=dropout, elide=absorption.elide,
            )  # fmt: skip
            return out, weights.to(query.dtype) if implementation == "eager" else None
        _tell(own, up)
    stock = own.stock_class
    key, value = cast("tuple[Tensor, Tensor]", getattr(stock, EXPAND)(module, latent, k_rope))
    options = more if s_aux is None else {**more, "s_aux": s_aux}
    inner = _inner(stock, implementation)
    return inner(module, query, key, value, mask, scaling=scaling, dropout=dropout, **options)


def _chosen(mask: Tensor | None, indices: Tensor, positions: int, dtype: torch.dtype) -> Tensor:
    """Return `mask` without the positions that the indexer left out."""
    B, T, _ = indices.shape
    kept = indices.new_zeros((B, T, positions), dtype=torch.bool).scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return kept if T == 1 else kept & kept.new_ones(T, positions).tril(positions - T)
    return mask & kept if mask.dtype == torch.bool else mask.masked_fill(~kept, torch.finfo(dtype).min)


def _inner(stock: type[nn.Module], implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the stock attention function, which computes on expanded keys and values."""
    if implementation not in _INNER:
        message = f"attention absorbed by ktc runs beside `sdpa` or `eager`, and not `{implementation}`"
        raise InputRefused(Diagnostic("L450", message, hint='load it with `attn_implementation="sdpa"`'))
    if implementation == "eager":
        return cast("Any", sys.modules[stock.__module__]).eager_attention_forward
    return cast("Any", AttentionInterface())[implementation]


def _tell(module: Any, reason: str) -> None:
    """Log once per module and reason that it expands keys although the rule absorbs them."""
    if module.told != reason:
        module.told = reason
        name = module.absorption.kv_b
        log.warning("layer %s: `%s` is not absorbed, its keys are expanded: %s", module.layer_idx, name, reason)

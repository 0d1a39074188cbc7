"""A stock latent attention module that runs absorbed where that is cheaper, as `mla_absorbed` puts it in the model.

In: the stock module and the arguments of the recipe. Out: the same module, patched. The stock code projects, rotates,
masks and updates the cache, which holds latents and rotary keys, as before: every cache of transformers serves. Two of
its calls are replaced. `expand_kv` returns the latents unchanged, and the attention function, chosen by name in the
module's own config, computes on them, or expands them and calls the stock function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from torch import Tensor, nn

from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.decoding import DecodingAttention, answer_by
from ktc.model.attention.int8_tensor import plain
from ktc.model.attention.interface import chosen, implementation_of, stock_function
from ktc.model.attention.joined_keys import expanded
from ktc.model.attention.latent import attend, latent_scores
from ktc.model.attention.latent_sizes import LatentSizes
from ktc.model.attention.sparse import Sparse, log_once
from ktc.model.attention.split_decode import Decode
from ktc.model.attention.up_projection import up_projection
from ktc.model.hf.latent_cache import caches_latents

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


class AbsorbedAttention(DecodingAttention):
    """The code of a latent attention module that absorbs."""

    absorption: Absorption

    def expand_kv(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the content of the cache, (B, 1, L, c) and (B, 1, L, r), as keys and values."""
        return latent, k_rope


def absorb(
    module: nn.Module,
    absorption: Absorption,
    decode: Decode | None = None,
    sparse: Sparse | None = None,
) -> nn.Module:
    """Patch `module` so that it absorbs. `decode` computes the calls that it serves, `sparse` those of long caches.

    Raises ValueError for a module that caches no latents, or of other sizes.
    """
    stock = type(module)
    if not caches_latents(stock):
        raise ValueError(f"`{stock.__name__}` caches keys and values, and no latents")
    sizes, kv_b = absorption.sizes, module.get_submodule(absorption.kv_b)
    wanted = sizes.heads * (sizes.nope + sizes.value), sizes.latent
    shape = tuple(cast("Tensor", kv_b.weight).shape)
    if shape != wanted:
        raise ValueError(f"its `{absorption.kv_b}` is {list(shape)} instead of {list(wanted)}")
    cast("Any", answer_by(decode, sparse, module, NAME, latent_attention, AbsorbedAttention)).absorption = absorption
    return module


def latent_attention(
    module: nn.Module, query: Tensor, latent: Tensor, k_rope: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention as transformers' attention functions do: query (B, H, T, n + r) -> (B, T, H, v), and weights.

    `latent` (B, 1, L, c) and `k_rope` (B, 1, L, r) are all positions so far; the model's indexer chose `indices`
    (B, T, K). Weights are returned where the model's own implementation is `eager`.
    """
    answered = cast("Any", module)
    indices: Tensor | None = more.pop("indices", None)
    absorption: Absorption = answered.absorption
    new, positions = query.shape[2], latent.shape[2]
    mask = attention_mask if indices is None else chosen(attention_mask, indices, positions, query.dtype)
    if absorption.serves(new, positions):
        sizes = absorption.sizes
        up = up_projection(module.get_submodule(absorption.kv_b), sizes.heads, sizes.nope)
        if not isinstance(up, str):
            scale, sinks, dropout = cast("float", scaling), more.get("s_aux"), more.get("dropout", 0.0)
            eager, kv = implementation_of(answered) == "eager", KVCacheView(latent, latent, k_rope)
            summed: Tensor | None = None
            plain_call = not eager and not dropout
            if answered.sparse is not None and plain_call:
                summed = answered.sparse.attend(
                    answered, up.absorbed(query), kv, scale=scale, mask=attention_mask, sinks=sinks, indices=indices
                )
            if summed is None and plain_call and answered.decode and answered.decode.serves(query, kv, mask):
                summed = answered.decode(
                    up.absorbed(query), kv, scale=scale, mask=mask, sinks=sinks, context=answered.step_context
                )
            if summed is not None:
                return up.out_of_latent(summed.transpose(1, 2)).transpose(1, 2), None
            latent, k_rope = plain(latent), plain(k_rope)  # codes of a cache, where the kernel does not take the call
            scores = latent_scores(query, latent[:, 0], k_rope[:, 0], up, scale=scale, elide=absorption.elide)
            out, weights = attend(scores, latent[:, 0], up, mask=mask, sinks=sinks, dropout=dropout)
            return out, weights.to(query.dtype) if eager else None
        log_once(answered, f"`{absorption.kv_b}` is not absorbed, its keys are expanded: {up}")
    key, value = expanded(answered, plain(latent), plain(k_rope))
    options = {name: value for name, value in more.items() if name != "s_aux" or value is not None}
    return stock_function(answered)(module, query, key, value, mask, scaling=scaling, **{"dropout": 0.0, **options})

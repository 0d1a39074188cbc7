"""The place in transformers' latent attention between the cache, which holds latents, and the attention function."""

from __future__ import annotations

from typing import Final

from torch import nn

EXPAND: Final = "expand_kv"  # (latents, rotary keys) -> (keys, values); older releases cache keys and values


def caches_latents(attention: type[nn.Module]) -> bool:
    """Return whether modules of this class cache latents and expand them by `EXPAND`."""
    return callable(getattr(attention, EXPAND, None))

"""The attention functions of transformers, which a module calls by the name in its config.

In: a stock attention module. Out: the same module, of a class made for it, calling a function of ktc. The module's own
config is a copy with that function's name, so masks and other layers follow the model's config. The stock function of
the model's implementation stays at hand for the calls that ktc does not compute.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ktc.diagnostics import Diagnostic, InputRefused

Attention = Callable[..., tuple[Tensor, Tensor | None]]
_INNER: Final = ("sdpa", "eager")  # implementations that take keys, values and a mask


class AnsweredAttention:
    """Mixin before the stock class of an attention module whose core is computed by ktc."""

    stock_config: Any
    stock_class: type[nn.Module]


def answer(module: nn.Module, name: str, function: Attention, mixin: type[AnsweredAttention], **members: Any) -> None:
    """Make `module` call `function`, as a class made of `mixin` and its own, with further `members`.

    Raises ValueError without a config.
    """
    made, stock = cast("Any", module), type(module)
    if getattr(getattr(made, "config", None), "_attn_implementation", None) is None:
        raise ValueError(f"`{stock.__name__}` has no config that names its attention function")
    AttentionInterface.register(name, function)
    made.stock_config = made.config
    made.config = copy.copy(made.config)
    made.config._attn_implementation_internal = name
    module.__class__ = type(f"{mixin.__name__.removesuffix('Attention')}{stock.__name__}", (mixin, stock), {
        "stock_class": stock, **members
    })  # fmt: skip


def implementation_of(module: Any) -> str:
    """Return the implementation that the model's config names now."""
    return str(module.stock_config._attn_implementation)


def stock_function(module: Any) -> Attention:
    """Return the model's own attention function. Raises InputRefused (L450) for one that takes no mask."""
    implementation = implementation_of(module)
    if implementation not in _INNER:
        message = f"attention that ktc computes runs beside `sdpa` or `eager`, and not `{implementation}`"
        raise InputRefused(Diagnostic("L450", message, hint='load it with `attn_implementation="sdpa"`'))
    if implementation == "eager":
        return cast("Any", sys.modules[module.stock_class.__module__]).eager_attention_forward
    return cast("Any", AttentionInterface())[implementation]


def chosen(mask: Tensor | None, indices: Tensor, positions: int, dtype: torch.dtype) -> Tensor:
    """Return `mask` without the positions that an indexer left out: indices (B, T, K) -> (B, 1, T, L)."""
    B, T, _ = indices.shape
    kept = indices.new_zeros((B, T, positions), dtype=torch.bool).scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return kept if T == 1 else kept & kept.new_ones(T, positions).tril(positions - T)
    return mask & kept if mask.dtype == torch.bool else mask.masked_fill(~kept, torch.finfo(dtype).min)

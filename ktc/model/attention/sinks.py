"""Attention with sinks, by PyTorch's fused attention: its scores are never in memory as a whole.

A sink is a score without a value, one for each head, in the softmax of every row. Transformers computes it by eager
code alone, whose scores of 64 heads and 4,096 tokens take 2 GB, and their backward several times as much. Here the sink
is the score of a further key, whose value is zero: queries get two more entries with the sink over the scale, as a
number and its rounding error, and that key has ones there. Queries and keys stay multiplied by one product.

In: a model whose attention is eager and has sinks. Out: a context in which its modules call `attend`. A module for
which a small example does not agree with the model's own function keeps that.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from ktc.foundation.temporary_values import attributes
from ktc.model.attention.interface import Attention, eager_function
from ktc.model.hf.patching import stock_class
from ktc.model.hf.private_api import ATTENTION, attention_of

NAME: Final = "ktc_sinks"
_WIDTHS, _KEYS = 8, 16  # fused attention needs head widths, and numbers of keys with a mask, divisible by these
AGREES: Final = 1e-3  # of the largest value; PyTorch's own kernels of one device differ by less
READ: Final = ("num_key_value_groups", "head_dim", "scaling")  # attributes of a module of which an example is made
ROUNDINGS: Final = 8  # of the model's dtype: the stock function rounds scores, their maximum and their softmax


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Return the output (B, T, h, D) of attention as a function of transformers does.

    `query` is (B, h, T, D), `key` and `value` (B, g, S, D); the mask (B or 1, 1, T, S) is added to the scores, or bool.
    The sinks `s_aux` are (h,).
    """
    scaling, s_aux = float(settings["scaling"]), cast("Tensor | None", settings.get("s_aux"))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if s_aux is not None:
        query, key, value, attention_mask = _with_sink(query, key, value, attention_mask, s_aux.float() / scaling)
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, settings.get("dropout", 0.0), scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, score: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the operands with `score` (h,) times one more key, and keys that nothing sees behind it."""
    rows, heads, tokens, width = query.shape
    length = key.shape[2]
    more = _KEYS - length % _KEYS
    high = score.to(query.dtype)
    low = (score - high.float()).to(query.dtype)
    sinks = F.pad(torch.stack((high, low), -1), (0, -(width + 2) % _WIDTHS))
    query = torch.cat((query, sinks.view(1, heads, 1, -1).expand(rows, -1, tokens, -1)), -1)
    of_sink = key.new_zeros(more, width + sinks.shape[-1])
    of_sink[0, width : width + 2] = 1
    behind = of_sink.expand(rows, heads, -1, -1)
    if mask is None:
        mask = query.new_zeros(1, 1, 1, length)
    elif mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    seen = F.pad(mask.to(query.dtype), (0, 1))
    seen = F.pad(seen, (0, more - 1), value=torch.finfo(query.dtype).min)
    key = torch.cat((F.pad(key, (0, sinks.shape[-1])), behind), 2)
    return query, key, F.pad(value, (0, 0, 0, more)), seen.expand(rows, 1, tokens, -1)


@contextmanager
def fused_sinks(model: nn.Module, device_type: str = "cuda") -> Generator[bool]:
    """Let the eager attention with sinks of a model on such a device be computed by `attend`. Yields whether it is."""
    modules = [module for module in model.modules() if hasattr(module, "num_key_value_groups")]
    configs = {id(made.config): made.config for made in cast("list[Any]", modules) if hasattr(made, "config")}
    fused = bool(modules) and all(_is_known(module, device_type) for module in modules)
    if fused:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, cast("Any", AttentionMaskInterface())["eager"])
    with ExitStack() as stack:
        for config in configs.values() if fused else ():
            stack.enter_context(attributes(config, **{ATTENTION: NAME}))
        yield fused


def _is_known(module: Any, device_type: str) -> bool:
    sinks, config = getattr(module, "sinks", None), getattr(module, "config", None)
    if not isinstance(sinks, Tensor) or sinks.device.type != device_type or attention_of(config) != "eager":
        return False
    return _agrees(module, sinks)


@torch.enable_grad()
def _agrees(module: Any, sinks: Tensor) -> bool:
    """Return whether the model's own function computes the same of a small example, in fp32 and in the model's dtype.

    Outputs and gradients of queries and keys are compared. A module without the attributes that the example needs has
    attention of another kind, as latent attention.
    """
    if not all(hasattr(module, name) for name in READ):
        return False
    stock, heads = eager_function(stock_class(module)), sinks.numel()
    generator, tokens = torch.Generator().manual_seed(0), 40
    groups, width = int(module.num_key_value_groups), int(module.head_dim)
    drawn = [torch.randn(2, n, tokens, width, generator=generator) for n in (heads, heads // groups, heads // groups)]
    direction = torch.randn(2, tokens, heads, width, generator=generator)
    given: dict[str, Any] = {"scaling": float(module.scaling), "dropout": 0.0, "s_aux": sinks}

    def computed(function: Attention, dtype: torch.dtype) -> tuple[Tensor, ...]:
        query, key, value = (x.to(sinks.device, dtype).requires_grad_() for x in drawn)
        mask = torch.full((1, 1, tokens, tokens), torch.finfo(dtype).min, dtype=dtype, device=sinks.device).triu(1)
        out = function(module, query, key, value, mask, **given)[0]
        return out, *torch.autograd.grad(out, (query, key), direction.to(out))

    try:
        return stock is not None and all(
            bool((ours - wanted).float().abs().max() <= bound * wanted.float().abs().max())
            for dtype, bound in {torch.float32: AGREES, sinks.dtype: max(AGREES, ROUNDINGS * _eps(sinks))}.items()
            for ours, wanted in zip(computed(attend, dtype), computed(stock, dtype), strict=True)
        )
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes other arguments, or a device refuses ours
        return False


def _eps(sinks: Tensor) -> float:
    return torch.finfo(sinks.dtype).eps

"""A stock attention module whose few new tokens a kernel computes: what `fused_attention` puts in the model.

In: the stock module and a kernel. Out: the same module. Its attention function takes the calls that the kernel serves,
and gives all others to the model's own.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from ktc.model.attention.decode import DecodeAttention, Heads
from ktc.model.attention.int8_tensor import plain
from ktc.model.attention.interface import AnsweredAttention, answer, chosen, stock_function
from ktc.model.attention.sparse import Sparse, follows_cache
from ktc.model.attention.sparsity import Traffic
from ktc.model.kernels.kernel_calls import recording

NAME: Final = "ktc_decode"  # of the attention function in transformers' register
_BEYOND: Final = ("softcap", "position_bias")  # arguments of calls that the kernel does not compute


class DecodingAttention(AnsweredAttention):
    """Mixin before the stock class of an attention module; without a kernel the stock function computes all calls.

    With `sparse`, calls over long caches read the positions that it chooses; `traffic` counts their bytes.
    """

    decode: DecodeAttention | None
    sparse: Sparse | None = None
    traffic: Traffic = Traffic(0, 0, 0)
    told_of: str = ""


def decoding(module: nn.Module, decode: DecodeAttention | None, sparse: Sparse | None = None) -> nn.Module:
    """Give `module` the kernel. Raises ValueError for a module without a config."""
    members = {} if sparse is None else follows_cache(type(module))
    answer(module, NAME, decoding_attention, DecodingAttention, **members)
    made = cast("Any", module)
    made.decode, made.sparse = decode, sparse
    return module


def decoding_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, indices: Tensor | None = None, **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention as transformers' attention functions do: query (B, H, T, k) -> (B, T, H, v), and weights."""
    own = cast("Any", module)
    decode: DecodeAttention | None = own.decode
    sparse: Sparse | None = own.sparse
    heads = Heads(key, value)
    if sparse is not None:
        seen = _seen(attention_mask)
        if _is_plain(own, query, key, seen, dropout, more):
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            sinks = more.get("s_aux") if more.get("sinks") is None else more["sinks"]
            found = sparse.attend(own, query, heads, scale=scale, mask=seen, sinks=sinks, indices=indices)
            if found is not None:
                return found, None
    mask = attention_mask if indices is None else chosen(attention_mask, indices, key.shape[2], query.dtype)
    seen = _seen(mask)
    if decode is not None and decode.serves(query, heads, seen) and _is_plain(own, query, key, seen, dropout, more):
        sinks = more.get("s_aux") if more.get("sinks") is None else more["sinks"]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return decode(query, heads, scale=scale, mask=seen, sinks=sinks), None
    key, value = plain(key), plain(value)  # codes of a cache, for a call that the kernel does not take
    return stock_function(own)(module, query, key, value, mask, scaling=scaling, dropout=dropout, **more)


def _is_plain(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, more: dict[str, Any]
) -> bool:
    """Return whether the call is softmax(scale q K^T + mask) V, and its weights are not required."""
    if dropout or any(more.get(name) is not None for name in _BEYOND):
        return False
    if more.get("output_attentions") or module.stock_config.output_attentions:
        return False
    if mask is not None:
        return True
    window = more.get("sliding_window")
    causal = getattr(module, "is_causal", True) if more.get("is_causal") is None else more["is_causal"]
    return (query.shape[2] == 1 or bool(causal)) and (window is None or key.shape[2] <= window)


def _seen(mask: Tensor | None) -> Tensor | None:
    """Return a mask as bool where it is 0 or the dtype's smallest number, as eager attention takes it."""
    if mask is None or not mask.is_floating_point() or mask.device.type != "cpu":
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if recording():  # masks of a recorded step are made by transformers, and a program reads no value into Python
        return ~hidden
    return ~hidden if bool(((mask == 0) | hidden).all()) else mask

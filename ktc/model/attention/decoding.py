"""A stock attention module whose few new tokens a kernel computes, as `fused_attention` puts it in the model.

In: the stock module and a kernel. Out: the same module. Its attention function takes the calls that the kernel serves,
and gives all others to the model's own.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, render
from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.int8_tensor import plain
from ktc.model.attention.interface import (
    AnsweredAttention,
    Attention,
    answer,
    chosen,
    implementation_of,
    stock_function,
)
from ktc.model.attention.sink_prompts import attend_in_blocks, computes_prompts, serves
from ktc.model.attention.sparse import Sparse, follows_cache
from ktc.model.attention.sparsity import Traffic
from ktc.model.attention.split_decode import Decode
from ktc.model.kernels.step_context import StepContext

log = logging.getLogger(__name__)

NAME: Final = "ktc_decode"  # of the attention function in transformers' register
_BEYOND: Final = ("softcap", "position_bias")  # arguments of calls that the kernel does not compute


class DecodingAttention(AnsweredAttention):
    """The code of an attention module with a kernel; without one the stock function computes all calls.

    With `sparse`, calls over long caches read the positions that it chooses; `traffic` counts their bytes.
    With `sink_blocks`, prompts with sinks keep no scores of all their tokens.
    """

    decode: Decode | None
    sink_blocks: bool = False
    sparse: Sparse | None = None
    traffic: Traffic = Traffic(0, 0, 0)
    logged: tuple[str, ...] = ()


def decoding(module: nn.Module, decode: Decode | None, sparse: Sparse | None = None) -> nn.Module:
    """Give `module` the kernel. Raises ValueError for a module without a config."""
    return answer_by(decode, sparse, module, NAME, decoding_attention, DecodingAttention)


def answer_by(
    decode: Decode | None, sparse: Sparse | None, module: nn.Module, name: str, function: Attention,
    patch: type[DecodingAttention],
) -> nn.Module:  # fmt: skip
    """Make `module` call `function`, as `answer`, with these two. With `sparse`, its calls follow their cache."""
    stock = type(module)
    answer(module, name, function, patch)
    if sparse is not None:
        follows_cache(stock).put_on(module)
    made = cast("Any", module)
    made.decode, made.sparse = decode, sparse
    return module


def decoding_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention as transformers' attention functions do: query (B, H, T, k) -> (B, T, H, v), and weights."""
    answered = cast("Any", module)
    indices: Tensor | None = more.pop("indices", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = more.get("s_aux") if more.get("sinks") is None else more["sinks"]
    decode: Decode | None = answered.decode
    sparse: Sparse | None = answered.sparse
    kv = KVCacheView(key, value)
    if sparse is not None:
        seen = _seen(attention_mask, answered.step_context)
        if _is_plain(answered, query, key, seen, more):
            summed = sparse.attend(answered, query, kv, scale=scale, mask=seen, sinks=sinks, indices=indices)
            if summed is not None:
                return summed, None
    mask = attention_mask if indices is None else chosen(attention_mask, indices, key.shape[2], query.dtype)
    seen = _seen(mask, answered.step_context)
    if decode is not None and decode.serves(query, kv, seen) and _is_plain(answered, query, key, seen, more):
        return decode(query, kv, scale=scale, mask=seen, sinks=sinks, context=answered.step_context), None
    key, value = plain(key), plain(value)  # codes of a cache, for a call that the kernel does not take
    if sinks is not None and _in_blocks(answered, query, key, value, mask, more):
        window = more.get("sliding_window")
        return attend_in_blocks(query, key, value, mask, scaling=scale, s_aux=sinks, window=window), None
    return stock_function(answered)(module, query, key, value, mask, scaling=scaling, **{"dropout": 0.0, **more})


def _in_blocks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, more: dict[str, Any]
) -> bool:  # fmt: skip
    """Return whether a call with sinks is computed in blocks of rows."""
    if not module.sink_blocks or implementation_of(module) != "eager" or not serves(query, key, value, mask):
        return False
    causal = getattr(module, "is_causal", True) if more.get("is_causal") is None else more["is_causal"]
    return _is_plain(module, query, key, mask, more) or (mask is None and bool(causal) and not _is_beyond(module, more))


def fuse_sink_prompts(model: nn.Module, dtype: torch.dtype) -> None:
    """Let prompts of attention with sinks be computed in blocks, by modules whose own function computes the same.

    Warn (L468) where it does on the CPU, as the plan asked, and not on the module's device.
    """
    for module in model.modules():
        sinks = getattr(module, "sinks", None)
        if isinstance(module, DecodingAttention) and isinstance(sinks, Tensor):
            stock = cast("nn.Module", module)
            module.sink_blocks = computes_prompts(stock, dtype, sinks.device)
            if not module.sink_blocks and computes_prompts(stock, dtype):
                _tell_of_scores(sinks.device)


@functools.cache
def _tell_of_scores(device: torch.device) -> None:
    """Warn (L468) that prompts keep all scores on a device. Once per process and device."""
    message = f"on `{device}` blocks of rows do not give the result of the model's own attention with sinks: "
    message += "prompts keep the scores of all tokens, which the plan does not count"
    hint = "send shorter prompts, or compile with room for the scores; see `ktc explain L468`"
    log.warning("%s", render([Diagnostic("L468", message, hint=hint, severity="warning")]))


def _is_plain(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, more: dict[str, Any]) -> bool:
    """Return whether the call is softmax(scale q K^T + mask) V, and its weights are not required."""
    if _is_beyond(module, more):
        return False
    if mask is not None:
        return True
    window = more.get("sliding_window")
    causal = getattr(module, "is_causal", True) if more.get("is_causal") is None else more["is_causal"]
    return (query.shape[2] == 1 or bool(causal)) and (window is None or key.shape[2] <= window)


def _is_beyond(module: Any, more: dict[str, Any]) -> bool:
    """Return whether a call requires weights, or something that no kernel computes."""
    if more.get("dropout") or any(more.get(name) is not None for name in _BEYOND):
        return True
    return bool(more.get("output_attentions") or module.stock_config.output_attentions)


def _seen(mask: Tensor | None, context: StepContext) -> Tensor | None:
    """Return a mask as bool where it is 0 or the dtype's smallest number, as eager attention takes it."""
    if mask is None or not mask.is_floating_point() or mask.device.type != "cpu":
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    # Masks of a recorded step are made by transformers, and a program reads no value into Python.
    if context.recorder is not None:
        return ~hidden
    return ~hidden if bool(((mask == 0) | hidden).all()) else mask

"""The attention functions of transformers, which a module calls by the name in its config.

In: a stock attention module. Out: the same module, patched, calling a function of ktc. The module's own
config is a copy with that function's name, so masks and other layers follow the model's config. `stock_function` is
the model's own function, for the calls that ktc does not compute.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.hf.patching import Patch, stock_class
from ktc.model.hf.private_api import ATTENTION, attention_of
from ktc.model.kernels.step_context import StepContext

Attention = Callable[..., tuple[Tensor, Tensor | None]]
_INNER: Final = ("sdpa", "eager")  # implementations that take keys, values and a mask
_EAGER: Final = "eager_attention_forward"  # its usual name, beside the class
_OPERANDS: Final = ("module", "query", "key", "value")  # first parameters of an attention function


class AnsweredAttention(Patch):
    """The code of an attention module whose core is computed by ktc."""

    stock_config: Any
    step_context: StepContext  # of the model


def answer(module: nn.Module, name: str, function: Attention, patch: type[AnsweredAttention]) -> None:
    """Put `patch` on `module` and make it call `function`. Raises ValueError for a module without a config."""
    made = cast("Any", module)
    if attention_of(getattr(made, "config", None)) is None:
        raise ValueError(f"`{type(module).__name__}` has no config that names its attention function")
    AttentionInterface.register(name, function)
    made.stock_config, made.step_context = made.config, StepContext()
    made.config = copy.copy(made.config)
    setattr(made.config, ATTENTION, name)
    patch.put_on(module)


def implementation_of(module: Any) -> str:
    """Return the implementation that the model's config names now."""
    return str(attention_of(module.stock_config))


def stock_function(module: Any) -> Attention:
    """Return the model's own attention function. Raises InputRefused (L450) for one that takes no mask."""
    implementation = implementation_of(module)
    message = f"attention that ktc computes needs `sdpa` or `eager` beside it, and not `{implementation}`"
    if implementation in _INNER:
        function = _function_of(stock_class(module), implementation)
        if function is not None:
            return function
        message = f"`{type(module).__name__}` names no function for `eager` attention"
    raise InputRefused(Diagnostic("L450", message, hint='load it with `attn_implementation="sdpa"`'))


def unknown_function(module: nn.Module) -> str:
    """Return why only the model's own code can compute the attention of a stock module; "" if ktc can too.

    ktc knows transformers' functions for `sdpa` and `eager`. The model may choose another, or register one of its own
    under their names.
    """
    implementation = attention_of(getattr(module, "config", None))
    if implementation is None:
        return ""  # a class that looks up no function: `answer` decides
    if implementation not in _INNER:
        return f"the model chooses the attention function `{implementation}`"
    function = _function_of(type(module), implementation)
    if function is None or function.__module__.startswith("transformers."):
        return ""
    return f"`{implementation}` attention is the model's own function `{function.__qualname__}`"


def _function_of(stock: type[nn.Module], implementation: str) -> Attention | None:
    """Return the function that a class calls for `sdpa` or `eager`, None without one for `eager`."""
    registered = _register_of(stock)
    if implementation not in registered:
        return eager_function(stock)
    return cast("Attention", cast("Any", registered)[implementation])


@functools.cache
def _register_of(stock: type[nn.Module]) -> AttentionInterface:
    """Return the register of functions in the file of the class' code, which may override those of all files."""
    names = _code_of(stock).__globals__.values()
    return next((value for value in names if isinstance(value, AttentionInterface)), ALL_ATTENTION_FUNCTIONS)


@functools.cache
def eager_function(stock: type[nn.Module]) -> Attention | None:
    """Return the attention function that the class' code names, or its file has by the usual name."""
    code = _code_of(stock)
    named = [code.__globals__.get(name) for name in (*code.__code__.co_names, _EAGER)]
    functions = (value for value in named if isinstance(value, FunctionType) and _takes_operands(value))
    return next(functions, None)


def _code_of(stock: type[nn.Module]) -> FunctionType:
    """Return the `forward` that the class has or inherits, without its decorators."""
    return cast("FunctionType", inspect.unwrap(stock.forward))


def _takes_operands(function: FunctionType) -> bool:
    return tuple(inspect.signature(function).parameters)[: len(_OPERANDS)] == _OPERANDS


def chosen(mask: Tensor | None, indices: Tensor, positions: int, dtype: torch.dtype) -> Tensor:
    """Return `mask` without the positions that an indexer left out: indices (B, T, K) -> (B, 1, T, L)."""
    B, T, _ = indices.shape
    kept = indices.new_zeros((B, T, positions), dtype=torch.bool).scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return kept if T == 1 else kept & kept.new_ones(T, positions).tril(positions - T)
    return mask & kept if mask.dtype == torch.bool else mask.masked_fill(~kept, torch.finfo(dtype).min)

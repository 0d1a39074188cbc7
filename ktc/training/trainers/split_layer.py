"""A model's layers, each with the places where it is cut: its attention and its experts.

In: a compiled model. Out: a `SplitLayer` per layer, found by the experts in them, and `LayerCall`, the arguments of a
call. Refused, as `CannotStack`: models whose experts are not in a list of layers, layers that call their experts more
than once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ktc.model.experts.called_module import CalledExperts
from ktc.model.experts.module import FusedMoe


class CannotStack(Exception):
    """The reason why micro-batches of this model or trainer cannot share a pass."""


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """A layer and the ends of its parts. `experts` is the module that the layer calls: PEFT's wrapper or the experts.

    A layer without one `attention`, a child that takes an attention mask, computes it in `route`; a dense layer has no
    `experts`.
    """

    layer: nn.Module
    attention: nn.Module | None
    experts: nn.Module | None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A call of a layer: all arguments except the hidden states, and the autocasting (device, on, dtype) around it."""

    named: str | None  # the hidden states' name, if they are a keyword argument
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    def with_hidden(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call, positional and named, with hidden states `x`."""
        if self.named is None:
            return (x, *self.args), dict(self.kwargs)
        return self.args, {**self.kwargs, self.named: x}

    @contextmanager
    def autocasting(self) -> Generator[None]:
        """Enter the autocasting that was active around the call, where it is not the present one.

        It keeps no casts: a part that is computed without gradients would give its own to one with them.
        """
        with ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                present = torch.is_autocast_enabled(device)
                if enabled != present or (enabled and torch.get_autocast_dtype(device) != dtype):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


def split_layers(model: nn.Module) -> tuple[SplitLayer, ...]:
    """Return the layers of `model` in their order.

    Raises:
        CannotStack: the experts are not in one list of layers.
    """
    modules = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
    experts = [name for name, module in modules.items() if isinstance(module, FusedMoe)]
    lists = {_outermost_list(name, modules) for name in experts}
    if len(lists) != 1:
        raise CannotStack("it has no experts that ktc computes" if not lists else "its experts are in several lists")
    (name,) = lists
    if name is None:
        raise CannotStack("its experts are not in a list of layers")
    return tuple(_split(layer) for layer in cast("nn.ModuleList", modules[name]))


def fused_in(experts: nn.Module) -> FusedMoe:
    """Return the experts inside the wrappers of PEFT, which steps need several times per layer."""
    inner: Any = experts
    while inner is not None and not isinstance(inner, FusedMoe):
        inner = getattr(inner, "base_layer", None)
    return inner if inner is not None else next(module for module in experts.modules() if isinstance(module, FusedMoe))


def _outermost_list(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    parts = name.split(".")
    around = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((path for path in around if isinstance(modules[path], nn.ModuleList)), None)


def _split(layer: nn.Module) -> SplitLayer:
    modules = dict(cast("Iterator[tuple[str, nn.Module]]", layer.named_modules()))
    fused = [name for name, module in modules.items() if isinstance(module, FusedMoe)]
    if len(fused) > 1:
        raise CannotStack(f"a `{type(layer).__name__}` has several modules of experts")
    if any(isinstance(module, CalledExperts) for module in modules.values()):
        raise CannotStack(f"a `{type(layer).__name__}` does not call its experts with indices and weights of tokens")
    experts = modules[re.sub(r"(\.base_layer)+$", "", fused[0])] if fused else None  # PEFT's outermost wrapper
    mixing = [child for child in layer.children() if "attention_mask" in inspect.signature(child.forward).parameters]
    return SplitLayer(layer, mixing[0] if len(mixing) == 1 else None, experts)

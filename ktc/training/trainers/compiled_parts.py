"""The parts of a layer by `torch.compile`: one kernel for many small operations, one compilation for layers alike.

In: a layer and its call. Out: what `LayerRun` computes, by the same code of the layer. A part runs the whole layer with
its attention and its experts replaced by placeholders, which return given values or keep their arguments; the compiler
drops the code that no result of the part needs. Parameters and modules are inputs of the compiled code, so layers of
one class share it. Refused, as `NotCompiled` with the reason: layers that the compiler cannot take whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ktc.model.experts.gpu.compiled_functions import has_compiler
from ktc.model.experts.private_api import floats_as_constants
from ktc.model.hf.patching import call_stock, called_as, with_attributes
from ktc.training.trainers.private_api import CompilerError, child_modules, sizes_of_their_own, with_fixed_width
from ktc.training.trainers.random_state import RandomState
from ktc.training.trainers.split_layer import LayerCall, SplitLayer

log = logging.getLogger(__name__)

Part = Literal["attend", "route", "attend_and_route", "finish"]
Routes = tuple[Tensor, Tensor, Tensor]


class NotCompiled(Exception):
    """The reason why a part of a layer runs without the compiler."""


class _Exchange:
    """Values between a part and its placeholders. A value that is None is computed by the placeholder, or stored."""

    def __init__(self) -> None:
        self.clear()
        self.rest: tuple[None, ...] | None = None  # of attention's output, if it is a tuple

    def clear(self) -> None:
        self.attended: Tensor | None = None
        self.routed: Tensor | None = None
        self.attention_output: Tensor | None = None
        self.routes: Routes | None = None


class _Attention(nn.Module):
    def __init__(self, stock: nn.Module, exchange: _Exchange) -> None:
        super().__init__()
        self.stock, self.exchange = stock, exchange

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        exchange = self.exchange
        if exchange.attended is not None:
            return exchange.attended if exchange.rest is None else (exchange.attended, *exchange.rest)
        out: Any = self.stock(*args, **kwargs)
        if isinstance(out, tuple):
            exchange.attention_output, *others = cast("tuple[Any, ...]", out)
            exchange.rest = (None,) * len(others)
        else:
            exchange.attention_output = out
        return cast("Any", out)


class _Experts(nn.Module):
    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        exchange = self.exchange
        assert exchange.routes is None, "a second call of the experts"
        exchange.routes = hidden_states, top_k_index, top_k_weights
        return torch.zeros_like(hidden_states) if exchange.routed is None else exchange.routed


def _run_part(
    part: Part, layer: nn.Module, args: Any, kwargs: Any, exchange: _Exchange, attended: Any, routed: Any
) -> Any:
    exchange.attended, exchange.routed = attended, routed
    out = layer.forward(*args, **kwargs)
    attended, routes = exchange.attention_output, exchange.routes
    exchange.clear()
    match part:
        case "attend":
            return attended
        case "route":
            return routes
        case "attend_and_route":
            return (attended, *cast("Routes", routes))
        case "finish":
            return out


class CompiledParts:
    """The compiled parts of a model's layers, on one kind of device. `backend` is one of `torch.compile`.

    `refused` has the reason for each class of layer that runs as it is.
    """

    def __init__(self, backend: Any = "inductor", device_type: str = "cuda") -> None:
        self._backend, self._device_type = backend, device_type
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._layers: dict[nn.Module, CompiledLayer] = {}
        self.refused: dict[str, str] = {}

    def of(self, split: SplitLayer, call: LayerCall, x: Tensor) -> CompiledLayer | None:
        """Return the compiled parts of a layer, `None` if it runs as it is. `call` and `x` are of its next call."""
        name = type(split.layer).__name__
        if x.device.type != self._device_type or name in self.refused:
            return None
        if self._device_type == "cuda" and not has_compiler():
            self.refuse(split, "Triton is not installed")
        elif split.layer not in self._layers:
            reason = _against(split, call, x)
            if reason:
                self.refuse(split, reason)
            else:
                self._layers[split.layer] = CompiledLayer(split, self)
        return None if name in self.refused else self._layers[split.layer]

    def refuse(self, split: SplitLayer, reason: str) -> None:
        """Run layers of this class as they are from now on."""
        name = type(split.layer).__name__
        if name not in self.refused:
            self.refused[name] = reason
            log.warning("layers of class `%s` are not compiled: %s", name, reason)

    def __str__(self) -> str:
        """Return the reasons, "" if every layer so far is compiled."""
        return "; ".join(f"`{name}` is not compiled: {reason}" for name, reason in self.refused.items())

    def function(self, split: SplitLayer, part: Part, variant: tuple[Any, ...] = ()) -> Callable[..., Any]:
        """Return the compiled function of a part of this class of layer.

        `variant` is what makes torch compile it again: one variant cannot use up the compilations of another.
        """
        key = type(split.layer), split.experts is None, part, variant
        if key not in self._functions:
            # torch counts recompilations by code object
            copy = FunctionType(_run_part.__code__.replace(), _run_part.__globals__, _run_part.__name__)
            self._functions[key] = torch.compile(copy, dynamic=True, fullgraph=True, backend=self._backend)
        return self._functions[key]


class CompiledLayer:
    """A layer with its placeholders."""

    def __init__(self, split: SplitLayer, parts: CompiledParts) -> None:
        assert split.attention is not None
        self._split, self._parts, self._exchange = split, parts, _Exchange()
        cuts: dict[nn.Module, nn.Module] = {split.attention: _Attention(split.attention, self._exchange)}
        if split.experts is not None:
            cuts[split.experts] = _Experts(self._exchange)
        named = cast("Iterator[tuple[str, nn.Module]]", split.layer.named_modules())
        places = [(path.rpartition("."), cuts[module]) for path, module in named if module in cuts]
        self._cuts = [
            (child_modules(split.layer.get_submodule(parent)), name, cut) for (parent, _, name), cut in places
        ]

    @property
    def outputs(self) -> int | None:
        """The number of values that attention returned, `None` if it was not a tuple."""
        return None if self._exchange.rest is None else 1 + len(self._exchange.rest)

    def run(
        self, part: Part, call: LayerCall, x: Tensor, attended: Tensor | None = None, routed: Tensor | None = None
    ) -> Any:
        """Return the result of a part, as the method of `LayerRun` does. `routed` is on the device of `x`.

        Raises:
            NotCompiled: the compiler refuses or fails. Layers of this class are refused from now on.
        """
        if routed is not None and not routed.is_cuda:
            routed = routed.clone()  # a view of all chunks: code is compiled for the layout of such a base
        args, kwargs = call.with_hidden(x)
        for tensor in (x, attended, routed):
            if tensor is not None:
                with_fixed_width(tensor)
        self._exchange.clear()
        given = tuple(value is None for value in (*args, *kwargs.values(), attended, routed))
        function = self._parts.function(self._split, part, (torch.is_grad_enabled(), x.shape[0] == 1, given))
        with call.autocasting(), self._cut(), sizes_of_their_own(), floats_as_constants():
            try:
                return function(part, self._split.layer, args, kwargs, self._exchange, attended, routed)
            except CompilerError as error:
                reason = str(error).strip().partition("\n")[0]
                self._parts.refuse(self._split, f"in `{part}`: {reason}")
                raise NotCompiled(reason) from error

    @contextmanager
    def _cut(self) -> Generator[None]:
        stock = [children[name] for children, name, _ in self._cuts]
        for children, name, placeholder in self._cuts:
            children[name] = placeholder
        try:
            # a layer that checkpoints itself would run its experts again
            with with_attributes(self._split.layer, gradient_checkpointing=False):
                yield
        finally:
            for (children, name, _), module in zip(self._cuts, stock, strict=True):
                children[name] = module


class _Decided(BaseException):
    """Ends a layer's code before its experts: random numbers after them belong to one part."""


def _against(split: SplitLayer, call: LayerCall, x: Tensor) -> str:
    """Return why a layer cannot be compiled by parts, "" if nothing is known against it.

    The layer runs once as far as its experts. Random numbers before them would be drawn in two parts, by compiled code
    that cannot be set back in between. Those of attention belong to one part, and so do those after the experts.
    """
    if split.attention is None:
        return "it has not one attention module"
    before = RandomState.now(x.device)
    drawn: list[bool] = []
    states = [before]

    def attention(*args: Any, **kwargs: Any) -> Any:
        drawn.append(not RandomState.now(x.device).equals(states[-1]))
        if split.experts is None:
            raise _Decided
        out = call_stock(cast("nn.Module", split.attention), *args, **kwargs)
        states.append(RandomState.now(x.device))
        return out

    def experts(*args: Any, **kwargs: Any) -> Any:
        drawn.append(not RandomState.now(x.device).equals(states[-1]))
        raise _Decided

    args, kwargs = call.with_hidden(x)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(call.autocasting())
            stack.enter_context(called_as(split.attention, attention))
            if split.experts is not None:
                stack.enter_context(called_as(split.experts, experts))
            split.layer.forward(*args, **kwargs)
    except _Decided:
        return "it draws random numbers outside of its attention, before its experts" if any(drawn) else ""
    finally:
        before.restore()
    return "it does not always call its attention and its experts"

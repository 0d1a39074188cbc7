"""A decoder layer run in parts, so that backward does not recompute its experts.

In: the layers of a compiled model, found by the experts in them. Out: for each layer its parts `attend`, `route` and
`finish`; each runs the layer's own code from its start, with the results of earlier parts filled in. So a part of any
class of layer can be checkpointed, and the experts between `route` and `finish` run once. Refused, as
`CannotStack`: models whose experts are not in a list of layers, layers that call their experts more than once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ktc.experts.called_module import CalledExperts
from ktc.experts.module import FusedMoe
from ktc.experts.saved_on_host import Parked
from ktc.experts.staging import to_device
from ktc.training.private_api import call_stock, called_as, with_attribute


class CannotStack(Exception):
    """The reason why micro-batches of this model or trainer cannot share a pass."""


class _Reached(BaseException):
    """Ends a layer's code where a part ends. Not an `Exception`, which the code might catch."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


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

    @contextmanager
    def autocasting(self) -> Generator[None]:
        """Enter the autocasting that was active around the call."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
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


def _outermost_list(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    parts = name.split(".")
    around = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((path for path in around if isinstance(modules[path], nn.ModuleList)), None)


def _split(layer: nn.Module) -> SplitLayer:
    modules = dict(cast("Iterator[tuple[str, nn.Module]]", layer.named_modules()))
    found = [_outside_wrappers(name) for name, module in modules.items() if isinstance(module, FusedMoe)]
    if len(found) > 1:
        raise CannotStack(f"a `{type(layer).__name__}` has several modules of experts")
    if any(isinstance(module, CalledExperts) for module in modules.values()):
        raise CannotStack(f"a `{type(layer).__name__}` does not call its experts with indices and weights of tokens")
    experts = modules[found[0]] if found else None
    mixing = [child for child in layer.children() if "attention_mask" in inspect.signature(child.forward).parameters]
    return SplitLayer(layer, mixing[0] if len(mixing) == 1 else None, experts)


def _outside_wrappers(name: str) -> str:
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name


@dataclass(frozen=True, slots=True)
class _RandomState:
    """Random number generators of the host and of the GPUs that a layer uses."""

    host: Tensor
    gpus: tuple[tuple[torch.device, Tensor], ...]

    @classmethod
    def now(cls, devices: tuple[torch.device, ...]) -> _RandomState:
        return cls(torch.get_rng_state(), tuple((device, torch.cuda.get_rng_state(device)) for device in devices))

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        for device, state in self.gpus:
            torch.cuda.set_rng_state(state, device)


class LayerRun:
    """One call of a layer, part by part. Every part has its own random numbers, and the same ones when repeated."""

    def __init__(self, split: SplitLayer, call: LayerCall, device: torch.device) -> None:
        self._split, self._call = split, call
        self._gpus = (device,) if device.type == "cuda" else ()
        self._states: list[_RandomState] = []
        self._outputs: int | None = None  # of attention, if it returns a tuple

    def begin_part(self) -> None:
        """Start a part. The caller calls this once before each part."""
        self._states.append(_RandomState.now(self._gpus))

    def attend(self, x: Tensor) -> Tensor:
        """Return the attention's output for the layer's input (B, T, H)."""
        attention = self._split.attention
        assert attention is not None, "a layer without attention has no such part"

        def stop(*args: Any, **kwargs: Any) -> Any:
            out = call_stock(attention, *args, **kwargs)
            if isinstance(out, tuple):
                self._outputs = len(cast("tuple[Any, ...]", out))
                raise _Reached(out[0])
            raise _Reached(out)

        return self._reached(x, {attention: stop})

    def route(self, x: Tensor, attended: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the arguments of the experts: hidden states (B T, H), indices and weights (B T, K)."""
        assert self._split.experts is not None, "a dense layer has no such part"

        def stop(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            raise _Reached((hidden_states, top_k_index, top_k_weights))

        cuts, _ = self._attended(attended)
        return self._reached(x, {**cuts, self._split.experts: stop})

    def finish(self, x: Tensor, attended: Tensor | None, routed: Tensor | None, parked: Parked | None = None) -> Tensor:
        """Return the layer's output. `routed` (B T, H) is the output of its experts, or the placeholder of `parked`."""
        cuts, part = self._attended(attended)
        calls: list[int] = []

        def known(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            assert routed is not None
            calls.append(part)
            self._states[part].restore()
            return to_device(routed, hidden_states.device) if parked is None else parked.values(routed)

        if self._split.experts is not None:
            cuts[self._split.experts] = known
        out = self._run(x, cuts)
        if not isinstance(out, Tensor):
            raise CannotStack(f"a `{type(self._split.layer).__name__}` returns more than hidden states")
        if self._split.experts is not None and len(calls) != 1:
            raise CannotStack(f"a `{type(self._split.layer).__name__}` calls its experts {len(calls)} times")
        return out

    def _attended(self, attended: Tensor | None) -> tuple[dict[nn.Module, Callable[..., Any]], int]:
        """Replace the attention by its output, and return the number of the next part."""
        if self._split.attention is None or attended is None:
            return {}, 1

        def known(*args: Any, **kwargs: Any) -> Any:
            self._states[1].restore()
            return attended if self._outputs is None else (attended, *[None] * (self._outputs - 1))

        return {self._split.attention: known}, 2

    def _reached(self, x: Tensor, cuts: Mapping[nn.Module, Callable[..., Any]]) -> Any:
        try:
            self._run(x, cuts)
        except _Reached as reached:
            return reached.value
        raise CannotStack(f"a `{type(self._split.layer).__name__}` does not always call its parts")

    def _run(self, x: Tensor, cuts: Mapping[nn.Module, Callable[..., Any]]) -> Any:
        """Run the layer's own code with some of its modules replaced."""
        self._states[0].restore()
        with ExitStack() as stack:
            stack.enter_context(self._call.autocasting())
            for module, replacement in cuts.items():
                stack.enter_context(called_as(module, replacement))
            # the parts are checkpointed; a layer that checkpoints itself would run its experts again
            stack.enter_context(with_attribute(self._split.layer, "gradient_checkpointing", False))
            return call_layer(self._split.layer, self._call, x)


def call_layer(layer: nn.Module, call: LayerCall, x: Tensor) -> Any:
    """Call the layer's forward without its hooks, which ran when the call was recorded."""
    if call.named is None:
        return layer.forward(x, *call.args, **call.kwargs)
    return layer.forward(*call.args, **{**call.kwargs, call.named: x})

"""How a model calls its layers, recorded without running them, and its head on hidden states from elsewhere.

In: a model whose tensors outside of the layers have values, and tokens. Out: the first layer's input and each layer's
other arguments (masks, positions), or logits. Refused (N602): models that compute between their layers, hand state
from layer to layer, or pass on more than hidden states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc.diagnostics import InputRefused
from ktc.model.compare.groups import not_by_layer
from ktc.model.compare.shown import Shown, arguments


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of a layer beside its hidden states, which are the first argument or the keyword `named`.

    `device` is where the layer got its hidden states.
    """

    named: str | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the layer's hidden states for the input `x` (1, T, H), on its own device.

        Raises InputRefused (N602) for a layer that fills a mapping which later layers read.
        """
        x = x.to(self.device)
        if self.named is None:
            out = layer(x, *self.args, **self.kwargs)
        else:
            out = layer(*self.args, **{**self.kwargs, self.named: x})
        _require_unshared(name for name, value in self._mappings() if value)
        return main_output(out)

    def _mappings(self) -> Iterator[tuple[str, Mapping[Any, Any]]]:
        """Yield the mappings among the arguments; a position counts from the first of `args`."""
        places: dict[int | str, Any] = {**dict(enumerate(self.args)), **self.kwargs}
        yield from ((str(place), value) for place, value in places.items() if isinstance(value, Mapping))

    def to(self, dtype: torch.dtype) -> LayerCall:
        """Return the call with floating tensors in `dtype`; masks keep finite bounds."""
        return replace(self, args=_cast(self.args, dtype), kwargs=_cast(dict(self.kwargs), dtype))


@dataclass(frozen=True, slots=True)
class Recorded:
    """The first layer's input (1, T, H), the calls, and the length of the tuple that layers return (0: no tuple).

    `added` has by a layer's number what the model adds to its input between two layers, such as features of images.
    """

    hidden: Tensor
    calls: tuple[LayerCall, ...]
    returned: int
    added: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])

    def before(self, layer: int, x: Tensor) -> Tensor:
        """Return the input of a layer, for the hidden states `x` (1, T, H) after the one before."""
        added = self.added.get(layer)
        return x if added is None else x + added.to(x.device, x.dtype)


def main_output(out: Any) -> Tensor:
    """Return the hidden states of a layer's or block's output, alone or first in a tuple."""
    first: Any = cast("tuple[Any, ...]", out)[0] if isinstance(out, tuple) and out else cast("Any", out)
    if not isinstance(first, Tensor):
        raise InputRefused(not_by_layer(f"a layer returns a `{type(first).__name__}` first"))
    return first


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        least = torch.finfo(dtype).min
        return value.clamp(min=least).to(dtype) if value.dtype != dtype else value
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in cast("dict[str, Any]", value).items()}
    return value


_LONGEST = 3  # hidden states, attention weights, a cache


class _LastLayer(BaseException):
    """Ends a run of the model that only records its layers' calls. Not an `Exception`, which the model might catch."""


class _Between(Exception):
    """The model computes something between its layers, or its layers return another structure."""


def record(model: PreTrainedModel, layers: Sequence[nn.Module], ids: Tensor, shown: Shown | None = None) -> Recorded:
    """Record the calls of all layers for `ids` (1, T) int64, which begin with the question `shown`, if there is one.

    Raises InputRefused (N602).
    """
    refused = "it computes something between its layers"
    of_images = () if shown is None else (_with_added,)  # features that only images have, where nothing else serves
    # older code indexes or unpacks the results of its layers
    for recording, returned in itertools.product((_record, *of_images), range(_LONGEST + 1)):
        try:
            if recorded := recording(model, layers, _arguments(model, ids, shown), returned):
                return recorded
        except _Between:
            continue
        except (ValueError, IndexError, TypeError, AttributeError) as error:  # raised by the model on this structure
            refused = f"its layers return more than hidden states ({error})"
    raise InputRefused(not_by_layer(refused))


def _record(
    model: PreTrainedModel, layers: Sequence[nn.Module], given: Mapping[str, Tensor], returned: int,
    answer: Callable[[Tensor], Tensor] | None = None,
) -> Recorded:  # fmt: skip
    """Record the calls; each layer returns its input. With an `answer` it returns that, and a layer's input may differ.

    Raises InputRefused (N602), and _Between.
    """
    hidden: list[Tensor] = []
    outputs: list[Tensor] = []
    calls: list[LayerCall] = []

    def forward(index: int, *args: Any, **kwargs: Any) -> Any:
        x, call = _taken(args, kwargs)
        is_other = bool(hidden) and x.shape != hidden[0].shape
        if index != len(calls) or is_other or (outputs and answer is None and not _same(x, outputs[-1])):
            raise _Between
        hidden.append(x)
        calls.append(call)
        if len(calls) == len(layers):
            raise _LastLayer
        outputs.append(x if answer is None else answer(x))
        return _returned(outputs[-1], returned)

    with _instead(layers, forward), suppress(_LastLayer):
        _call(model, given)
    if len(calls) < len(layers):
        raise InputRefused(not_by_layer(f"it called {len(calls)} of its {len(layers)} layers"))
    between = zip(hidden[1:], outputs, strict=True)
    changed = {number: x for number, (x, output) in enumerate(between, 1) if not _same(x, output)}
    return Recorded(hidden[0], tuple(calls), returned, changed)


def _with_added(
    model: PreTrainedModel, layers: Sequence[nn.Module], given: Mapping[str, Tensor], returned: int
) -> Recorded | None:
    """Record a model that adds the same to any hidden states between its layers; None for another computation."""
    from_zeros, from_ones = (
        _record(model, layers, given, returned, made) for made in (torch.zeros_like, torch.ones_like)
    )
    same = from_zeros.added.keys() == from_ones.added.keys() and all(
        torch.equal(1 + added, from_ones.added[layer]) for layer, added in from_zeros.added.items()
    )
    return from_zeros if same else None


def logits(
    model: PreTrainedModel, layers: Sequence[nn.Module], ids: Tensor, final: Tensor, returned: int,
    shown: Shown | None = None,
) -> Tensor:  # fmt: skip
    """Return the logits (T, V) fp32 of norm and head on `final` (1, T, H), the last layer's output."""

    def forward(_: int, *args: Any, **kwargs: Any) -> Any:
        x = _taken(args, kwargs)[0]
        return _returned(final.to(x.device, x.dtype), returned)

    with _instead(layers, forward):
        return cast("Tensor", _call(model, _arguments(model, ids, shown)).logits)[0].float().cpu()


def _arguments(model: nn.Module, ids: Tensor, shown: Shown | None) -> Mapping[str, Tensor]:
    if shown is None:
        return {"input_ids": ids}
    towers = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return arguments(ids, shown, towers)


def _call(model: PreTrainedModel, given: Mapping[str, Tensor]) -> Any:
    with torch.no_grad():
        return cast("Any", model)(**given, use_cache=False)


def _returned(x: Tensor, length: int) -> Any:
    """Return hidden states in the structure of a layer's result; caches and attention weights are absent."""
    return (x, *[None] * (length - 1)) if length else x


def _taken(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, LayerCall]:
    named = None if args else "hidden_states"
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, Tensor):
        raise InputRefused(not_by_layer("its layers take no hidden states"))
    rest = {name: value for name, value in kwargs.items() if name != named}
    # An empty mapping that is not a `dict`, such as that for keys and values of gemma4, may stay empty.
    _require_unshared(name for name, value in rest.items() if isinstance(value, dict))
    return x, LayerCall(named, args[1:], rest, x.device)


def _require_unshared(names: Iterable[str]) -> None:
    """Raise N602 with the first argument in which layers hand state to later ones."""
    name = next(iter(names), None)
    if name is not None:
        raise InputRefused(not_by_layer(f"its layers hand state to later layers in the argument `{name}`"))


def _same(x: Tensor, previous: Tensor) -> bool:
    """Return whether a layer's input is the output of the previous one. On another device it is a copy."""
    return x is previous or (x.device != previous.device and x.shape == previous.shape)


@contextmanager
def _instead(layers: Sequence[nn.Module], forward: Callable[..., Any]) -> Generator[None]:
    """Replace the `forward` of each layer by one that gets its number first, past `nn.Module.__setattr__`."""
    try:
        for index, layer in enumerate(layers):
            vars(layer)["forward"] = partial(forward, index)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)

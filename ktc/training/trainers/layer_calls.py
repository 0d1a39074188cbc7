"""Record how a model calls its layers, without running them, and join the calls of several micro-batches.

In: the layers, and a run of the model. Out: the first layer's input and every layer's `LayerCall` (masks, positions),
and later the model's tail on hidden states that were computed elsewhere. Refused, as `CannotStack`: models that compute
something between their layers, or pass on more than hidden states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache

from ktc.model.hf.patching import with_attributes
from ktc.training.trainers.private_api import pytree, without_masks
from ktc.training.trainers.split_layer import CannotStack, LayerCall, SplitLayer


class _LastLayer(BaseException):
    """Ends a run of the model that only records its layers' calls."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The input of the first layer (B, T, H), the device of each layer, and how each is called.

    `real` (R,) int64 are the numbers of those of the B T tokens that do not pad the end of a row; None: all.
    """

    hidden: Tensor
    devices: tuple[torch.device, ...]
    layers: tuple[LayerCall, ...]
    real: Tensor | None = None


def record(layers: Sequence[SplitLayer], run: Callable[[], object]) -> ModelCall:
    """Record the calls that `run` makes of the layers. They compute nothing, and the run ends at the last layer.

    Raises:
        CannotStack: the model cannot be run layer by layer.
    """
    hidden: list[Tensor] = []
    calls: list[LayerCall] = []

    def recorder(index: int) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            x, call = _taken(args, kwargs, calls)
            if index != len(calls) or (hidden and not _same(x, hidden[-1])):
                raise CannotStack("the model computes something between its layers")
            hidden.append(x)
            calls.append(call)
            if len(calls) == len(layers):
                raise _LastLayer
            return x

        return forward

    with _in_place_of(layers, [recorder(index) for index in range(len(layers))]):
        try:
            run()
        except _LastLayer:
            return ModelCall(hidden[0], tuple(x.device for x in hidden), tuple(calls))
        except (CannotStack, torch.OutOfMemoryError):
            raise
        except Exception as why:  # as where it unpacks a pair that a layer is to return
            if not calls:
                raise
            reason = f"the model takes more from its layers than hidden states ({type(why).__name__})"
            raise CannotStack(reason) from why
    raise CannotStack(f"the model called {len(calls)} of its {len(layers)} layers")


@contextmanager
def finished(
    layers: Sequence[SplitLayer], final: Tensor, compare: Callable[[Tensor], None], around: nn.Module | None = None
) -> Generator[None]:
    """Let the model's layers return `final`, once, inside the context. `compare` receives the first layer's input.

    `around` is the module that calls them: masks have any values while it runs, and no others'.

    Raises:
        CannotStack: the model is called a second time.
    """
    calls: list[int] = []

    def passing(index: int) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if index != len(calls):
                raise CannotStack("its trainer calls the model more than once per micro-batch")
            x = cast("Tensor", args[0] if args else kwargs["hidden_states"])
            if not calls:
                compare(x)
            calls.append(index)
            return final if len(calls) == len(layers) else x

        return forward

    unmasked = nullcontext() if around is None else _without_masks_in(around)
    with unmasked, _in_place_of(layers, [passing(index) for index in range(len(layers))]):
        yield


def caller_of(model: nn.Module, layers: Sequence[SplitLayer]) -> nn.Module | None:
    """Return the module whose list the layers are in, which calls them."""
    inside = {id(split.layer) for split in layers}
    for module in model.modules():
        lists = (child for child in module.children() if isinstance(child, nn.ModuleList))
        if any(inside <= set(map(id, child)) for child in lists):
            return module
    return None


@contextmanager
def _without_masks_in(module: nn.Module) -> Generator[None]:
    """Let this module run without masks. Another model, as a teacher's in the same loss, reads its own."""
    stock = module.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with without_masks():
            return stock(*args, **kwargs)

    with with_attributes(module, forward=forward):
        yield


@contextmanager
def _in_place_of(layers: Sequence[SplitLayer], forwards: Sequence[Callable[..., Tensor]]) -> Generator[None]:
    present = [vars(split.layer) for split in layers]  # one context for all: 16 micro-batches enter each twice a step
    before = [{name: names[name] for name in _REPLACED if name in names} for names in present]
    for names, forward in zip(present, forwards, strict=True):
        names["forward"], names["gradient_checkpointing"] = forward, False  # it may be outside of `forward`
    try:
        yield
    finally:
        for names, kept in zip(present, before, strict=True):
            for name in _REPLACED:
                names.pop(name, None)
            names.update(kept)


_REPLACED = ("forward", "gradient_checkpointing")


def _taken(args: tuple[Any, ...], kwargs: Mapping[str, Any], before: Sequence[LayerCall]) -> tuple[Tensor, LayerCall]:
    """Return a call's hidden states, and its other arguments without caches, which a second run would extend.

    Most layers are called with the arguments of the layer before, or of the one before that: then with its `LayerCall`.
    """
    named = None if args else "hidden_states"
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, Tensor):
        raise CannotStack("its layers take no hidden states")
    rest = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items() if name != named}
    if rest.get("use_cache"):
        rest["use_cache"] = False
    if rest.get("output_router_logits") or rest.get("output_attentions"):
        raise CannotStack("the outputs of its routers or its attention are requested, as by an auxiliary loss")
    positional = tuple(None if isinstance(value, Cache) else value for value in args[1:])
    autocast = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    taken = LayerCall(named, positional, rest, autocast)
    alike = next((call for call in before[:-3:-1] if _alike(call, taken)), None)
    if alike is not None:
        return x, alike
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((positional, rest))):
        raise CannotStack("its layers take arguments other than hidden states that require gradients")
    return x, taken


def _alike(first: LayerCall, second: LayerCall) -> bool:
    """Return whether both calls have the same objects as arguments."""
    ours, theirs = (
        (call.named, call.autocast, *map(id, call.args), *((name, id(value)) for name, value in call.kwargs.items()))
        for call in (first, second)
    )
    return ours == theirs


def _same(x: Tensor, previous: Tensor) -> bool:
    """Return whether a layer's input is the output of the previous one. On another device it is a copy."""
    return x is previous or (x.device != previous.device and x.shape == previous.shape)


# A call as several ----------------------------------------------------------------------------------------------------
def divided(call: ModelCall, tokens: int) -> list[ModelCall]:
    """Divide a call along the batch into calls of at most `tokens` tokens, or one sequence, where that is exact.

    One with padding stays whole: it has no more tokens than a chunk.
    """
    rows, length = call.hidden.shape[:2]
    most = max(1, tokens // length)
    if rows <= most or call.real is not None or not is_divisible(call):
        return [call]
    return [_rows_of(call, slice(first, min(first + most, rows))) for first in range(0, rows, most)]


def is_divisible(call: ModelCall) -> bool:
    """Return whether each argument of a call of several sequences has a part for each of them."""
    rows, length = call.hidden.shape[:2]
    return all(_divisible(layer, rows, length) for layer in {id(x): x for x in call.layers}.values())


def _divisible(call: LayerCall, rows: int, length: int) -> bool:
    """Return whether the first dimension of each argument shows if it has a part for each of several rows."""
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 1)
    return rows != length and all(tensor.shape[0] in (1, rows) for tensor in tensors)


def _rows_of(call: ModelCall, chosen: slice) -> ModelCall:
    rows = call.hidden.shape[0]
    known: dict[int, Tensor] = {}  # layers share their masks and positions
    layers: dict[int, LayerCall] = {}

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim < 2 or leaf.shape[0] != rows:
            return leaf
        return known.setdefault(id(leaf), leaf[chosen])

    for layer in call.layers:
        if id(layer) not in layers:
            args, kwargs = pytree.tree_map(part, (layer.args, dict(layer.kwargs)))
            layers[id(layer)] = replace(layer, args=args, kwargs=kwargs)
    return ModelCall(call.hidden[chosen], call.devices, tuple(layers[id(layer)] for layer in call.layers))


# Several calls as one -------------------------------------------------------------------------------------------------
def in_chunks(calls: Sequence[ModelCall], tokens: int) -> list[tuple[ModelCall, int]]:
    """Join neighbouring calls along the batch where they are alike and have at most `tokens` together.

    Returns:
        The calls in their order, each with the number of calls in it.
    """
    chunks: list[tuple[ModelCall, int]] = []
    for call in calls:
        length = call.hidden.shape[1]
        whole = chunks and chunks[-1][0].real is None and call.real is None
        if whole and (chunks[-1][0].hidden.shape[0] + 1) * length <= tokens:
            joined = _joined(chunks[-1][0], call)
            if joined is not None:
                chunks[-1] = (joined, chunks[-1][1] + 1)
                continue
        chunks.append((call, 1))
    return chunks


def _joined(first: ModelCall, second: ModelCall) -> ModelCall | None:
    """Return both calls as one batch, `None` if that would change the result. `second` has a single sequence."""
    if second.hidden.shape[0] != 1 or first.hidden.shape[1:] != second.hidden.shape[1:]:
        return None
    rows = first.hidden.shape[0]
    known: dict[tuple[int, int], Any] = {}  # layers share their masks and positions
    layers: list[LayerCall] = []
    joined: dict[tuple[int, int], LayerCall | None] = {}
    for pair in zip(first.layers, second.layers, strict=True):
        key = id(pair[0]), id(pair[1])
        if key not in joined:
            joined[key] = _joined_calls(*pair, rows, known)
        layer = joined[key]
        if layer is None:
            return None
        layers.append(layer)
    hidden = torch.cat((first.hidden, second.hidden))
    return ModelCall(hidden, first.devices, tuple(layers))


def _joined_calls(
    first: LayerCall, second: LayerCall, rows: int, known: dict[tuple[int, int], Any]
) -> LayerCall | None:
    leaves, spec = pytree.tree_flatten((first.args, dict(first.kwargs)))
    others, other_spec = pytree.tree_flatten((second.args, dict(second.kwargs)))
    if spec != other_spec or first.named != second.named or first.autocast != second.autocast:
        return None

    def joined(a: Any, b: Any) -> Any:
        key = (id(a), id(b))
        if key not in known:
            known[key] = _joined_leaves(a, b, rows)
        return known[key]

    merged = list(starmap(joined, zip(leaves, others, strict=True)))
    if any(leaf is _UNLIKE for leaf in merged):
        return None
    args, kwargs = pytree.tree_unflatten(merged, spec)
    return replace(first, args=args, kwargs=kwargs)


_UNLIKE = object()


def _joined_leaves(a: Any, b: Any, rows: int) -> Any:
    """Return one value for `rows` sequences with `a` and one more with `b`, or `_UNLIKE`."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a if type(a) is type(b) and (a is b or a == b) else _UNLIKE
    if b.ndim > 1 and b.shape[0] == 1 and a.shape[0] in (1, rows) and a.shape[1:] == b.shape[1:]:
        return torch.cat((a.expand(rows, *a.shape[1:]), b))
    return a if a.shape == b.shape and torch.equal(a, b) else _UNLIKE

"""Run the chunks of a step through a model's layers together: each layer's experts compute all chunks at once.

In: the layers and the recorded calls of every chunk. Out: the last layer's output of every chunk, with its graph.
Attention, routing and the code after the experts run chunk by chunk, and again in backward. So a GPU keeps only each
layer's input and the attention's output, or some of it waits in host memory (`Offloaded`). The experts' node is
computed once, and its saved tensors are on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from ktc.model.experts.host.saved_on_host import HostOffloaded, saved_in_place
from ktc.model.experts.host.staging import parts, to_host
from ktc.training.trainers.compiled_parts import CompiledParts
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.layer_parts import LayerRun, values_of
from ktc.training.trainers.part_clock import PartKind, in_span, is_timed, span
from ktc.training.trainers.recomputed import recomputed
from ktc.training.trainers.split_layer import LayerCall, SplitLayer, fused_in

Routes = tuple[Tensor, Tensor, Tensor]
Carried = tuple[Tensor | None, HostOffloaded | None]  # a part's result, or the placeholder of an offloaded one
_MANY: Final = 16_384  # tokens of a pass from which computing takes longer than the bus, which then has time for more


class Offloaded(IntEnum):
    """The states of a layer on a GPU that wait for backward in host memory."""

    NOTHING = 0
    ATTENTION = 1  # the attention's output
    INPUT = 2  # that, and the layer's input

    @property
    def told(self) -> str:
        """The states that wait, in words."""
        inputs = "inputs of layers and " if self is Offloaded.INPUT else ""
        return f"{inputs}outputs of attention wait for backward in host memory" if self else ""


@dataclass(frozen=True, slots=True)
class Kept:
    """Values that wait for backward on the GPU of a pass, beside the states of layers.

    With `results` inputs and outputs of resident experts do, and of the last `parts` layers everything that backward
    needs: these layers are not computed again. If `replays`, they are all layers, and the GPU has room for the memory
    of graphs, which the loss cannot use (`pass_graphs.py`).
    """

    results: bool = False
    parts: int = 0
    replays: bool = False

    def of_layer(self, index: int, count: int) -> Kept:
        """Return what is kept of one of `count` layers."""
        return Kept(self.results, int(index >= count - self.parts))

    @property
    def told(self) -> str:
        """The layers that are not computed again, in words."""
        return f"backward computes the last {self.parts} layers without computing them again" if self.parts else ""


NOTHING_KEPT: Final = Kept()


def through_layers(
    layers: Sequence[SplitLayer], chunks: Sequence[ModelCall], compiled: CompiledParts | None = None,
    offloaded: Offloaded = Offloaded.NOTHING, kept: Kept = NOTHING_KEPT,
) -> list[Tensor]:  # fmt: skip
    """Return the output (B, T, H) of the last layer for each chunk. With `compiled`, parts of layers are compiled.

    What is `kept` waits for backward on its GPU where it can (`stays_on`).

    Raises:
        CannotStack: a layer cannot be run in parts.
    """
    states = [chunk.hidden for chunk in chunks]
    first = next((number for number, split in enumerate(layers) if _trains(split.layer)), len(layers))
    if sum(state.shape[0] * state.shape[1] for state in states) >= _MANY:
        offloaded = max(offloaded, Offloaded.ATTENTION)
    with chunks[0].layers[0].autocasting():  # once for all layers that are called alike
        for index, split in enumerate(layers):
            states = [state.to(chunk.devices[index]) for state, chunk in zip(states, chunks, strict=True)]
            if index == first:  # its parts have gradients, those of its parameters
                states = [x if x.requires_grad else x.detach().requires_grad_() for x in states]
            calls = [chunk.layers[index] for chunk in chunks]
            of_layer = kept.of_layer(index, len(layers))
            level = Offloaded.NOTHING if of_layer.parts else offloaded
            states = _through(split, calls, states, compiled, level, of_layer, [chunk.real for chunk in chunks])
    return states


def _trains(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _through(
    split: SplitLayer, calls: Sequence[LayerCall], states: Sequence[Tensor], compiled: CompiledParts | None,
    offloaded: Offloaded, kept: Kept, real: Sequence[Tensor | None],
) -> list[Tensor]:  # fmt: skip
    part = partial(_part, keeps_graph=bool(kept.parts))
    runs = [
        LayerRun(split, call, x.device, None if compiled is None else compiled.of(split, call, x))
        for call, x in zip(calls, states, strict=True)
    ]
    none: Sequence[Carried] = [(None, None)] * len(runs)
    attended, routed, routes = none, none, list["Routes"]()
    of_one_layer = (split.attention is not None) + (split.experts is not None)
    inputs: list[tuple[Any, ...]] = [
        _offloaded(x, 1 + of_one_layer) if offloaded >= Offloaded.INPUT and _may_wait(x) else (x, None) for x in states
    ]
    if split.attention is not None and split.experts is not None and not offloaded and not is_timed():
        outputs = [part(run, run.attend_and_route, *given) for run, given in zip(runs, inputs, strict=True)]
        attended, routes = [(out[0], None) for out in outputs], [cast("Routes", out[1:]) for out in outputs]
    elif split.attention is not None:
        outputs = [part(run, run.attend, *given, kind="attention") for run, given in zip(runs, inputs, strict=True)]
        attended = [_offloaded(out, of_one_layer) if offloaded and out.is_cuda else (out, None) for out in outputs]
    inputs = [given + carried for given, carried in zip(inputs, attended, strict=True)]
    if split.experts is not None:
        routes = routes or [
            cast("Routes", part(run, run.route, *given)) for run, given in zip(runs, inputs, strict=True)
        ]
        with calls[0].autocasting():
            routed = _of_experts(split.experts, routes, kept, real)
    inputs = [given + carried for given, carried in zip(inputs, routed, strict=True)]
    return [part(run, run.finish, *given) for run, given in zip(runs, inputs, strict=True)]


def _may_wait(x: Tensor) -> bool:
    return x.is_cuda and x.requires_grad


def _part(
    run: LayerRun, part: Callable[..., Any], x: Tensor, offloaded: HostOffloaded | None, *others: Any,
    kind: PartKind = "mlp", keeps_graph: bool = False,
) -> Any:  # fmt: skip
    """Run a part of a layer, whose input is `x` or that of which `x` is the placeholder."""

    def of_values(x: Tensor, offloaded: HostOffloaded | None, *others: Any) -> Any:
        return part(values_of(x, offloaded), *others)

    began, timed = run.begin_part(), partial(span, kind, x.device)
    return recomputed(
        of_values, x, offloaded, *others, as_in_backward=run.is_compiled, span=timed, state=began,
        keeps_graph=keeps_graph,
    )  # fmt: skip


def _offloaded(result: Tensor, uses: int = 1) -> Carried:
    offloaded = HostOffloaded(result, uses)
    return offloaded.placeholder, offloaded


def stays_on(experts: nn.Module, device: torch.device) -> bool:
    """Return whether the output of experts can stay on a layer's device: they are resident there, which is a GPU."""
    offload = fused_in(experts).offload
    return offload is not None and offload.resident and device.type != "cpu" and [*offload.devices] == [device]


def _of_experts(
    experts: nn.Module, routes: Sequence[Routes], kept: Kept, real: Sequence[Tensor | None]
) -> Sequence[Carried]:
    """Compute the tokens of all chunks in one call of the experts, and return each chunk's output.

    Experts on the CPU leave it in host memory. From a GPU it is offloaded there until backward, which recomputes each
    chunk's last part, or with `kept.results` it stays. Of a chunk with padding they compute the `real` tokens, and the
    output is zero for others.
    """
    sizes = [route[0].shape[0] for route in routes]
    routes = [_of_real(route, tokens) for route, tokens in zip(routes, real, strict=True)]
    rows = [route[0].shape[0] for route in routes]
    device = fused_in(experts).backend(sum(rows)).device
    gathered = zip(*routes, strict=True)
    if device.type == "cpu":
        out = in_span("experts", experts, *(to_host(tensors) for tensors in gathered))
        on_host = all(route[0].device.type == "cpu" for route in routes)
        pieces = torch.split(out, rows) if on_host else parts(out, rows, pin=True)
        return [(_with_padding(*piece), None) for piece in zip(pieces, sizes, real, strict=True)]
    stays = kept.results and all(stays_on(experts, route[0].device) for route in routes)
    with saved_in_place(products=bool(kept.parts)) if stays else nullcontext():
        out = in_span("experts", experts, *(_joined(tensors, device) for tensors in gathered))
    whole = [out] if len(rows) == 1 else torch.split(out, rows)
    pieces = [_with_padding(*piece) for piece in zip(whole, sizes, real, strict=True)]
    if stays:
        shared = len(rows) > 1
        return [(x.clone() if shared and at is None else x, None) for x, at in zip(pieces, real, strict=True)]
    return [_offloaded(piece.to(route[0].device)) for piece, route in zip(pieces, routes, strict=True)]


def _of_real(route: Routes, real: Tensor | None) -> Routes:
    """Return the arguments of experts for the `real` tokens."""
    if real is None:
        return route
    hidden, index, weights = (tensor.index_select(0, real.to(tensor.device)) for tensor in route)
    return hidden, index, weights


def _with_padding(out: Tensor, size: int, real: Tensor | None) -> Tensor:
    """Return the rows of tokens and of the padding between them, whose rows are zero."""
    if real is None:
        return out
    return out.new_zeros(size, out.shape[1]).index_copy(0, real.to(out.device), out)


def _joined(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    return pieces[0].to(device) if len(pieces) == 1 else torch.cat([piece.to(device) for piece in pieces])

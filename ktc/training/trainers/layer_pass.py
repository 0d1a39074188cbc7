"""Run the chunks of a step through a model's layers together: each layer's experts compute all chunks at once.

In: the layers and the recorded calls of every chunk. Out: the last layer's output of every chunk, with its graph.
Attention, routing and the code after the experts run chunk by chunk, and again in backward. So a GPU keeps only each
layer's input and the attention's output, of many tokens the input alone. The experts' node is computed once, and its
saved tensors are on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from ktc.model.experts.saved_on_host import HostOffloaded
from ktc.model.experts.staging import parts, to_host
from ktc.training.trainers.compiled_parts import CompiledParts
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.layer_parts import LayerRun
from ktc.training.trainers.recomputed import recomputed
from ktc.training.trainers.split_layer import LayerCall, SplitLayer, fused_in

Routes = tuple[Tensor, Tensor, Tensor]
Carried = tuple[Tensor | None, HostOffloaded | None]  # a part's result, or the placeholder of an offloaded one
_MANY: Final = 16_384  # tokens of a pass from which computing takes longer than the bus, which then has time for more


def through_layers(
    layers: Sequence[SplitLayer], chunks: Sequence[ModelCall], compiled: CompiledParts | None = None
) -> list[Tensor]:
    """Return the output (B, T, H) of the last layer for each chunk. With `compiled`, parts of layers are compiled.

    Raises:
        CannotStack: a layer cannot be run in parts.
    """
    states = [chunk.hidden for chunk in chunks]
    first = next((number for number, split in enumerate(layers) if _trains(split.layer)), len(layers))
    offload = sum(state.shape[0] * state.shape[1] for state in states) >= _MANY
    for index, split in enumerate(layers):
        states = [state.to(chunk.devices[index]) for state, chunk in zip(states, chunks, strict=True)]
        if index == first:  # its parts have gradients, those of its parameters
            states = [x if x.requires_grad else x.detach().requires_grad_() for x in states]
        states = _through(split, [chunk.layers[index] for chunk in chunks], states, compiled, offload=offload)
    return states


def _trains(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _through(
    split: SplitLayer, calls: Sequence[LayerCall], states: Sequence[Tensor], compiled: CompiledParts | None,
    *, offload: bool,
) -> list[Tensor]:  # fmt: skip
    runs = [
        LayerRun(split, call, x.device, None if compiled is None else compiled.of(split, call, x))
        for call, x in zip(calls, states, strict=True)
    ]
    none: Sequence[Carried] = [(None, None)] * len(runs)
    attended, routed, routes = none, none, list["Routes"]()
    if split.attention is not None and split.experts is not None and not offload:
        outputs = [_part(run, run.attend_and_route, x) for run, x in zip(runs, states, strict=True)]
        attended, routes = [(out[0], None) for out in outputs], [cast("Routes", out[1:]) for out in outputs]
    elif split.attention is not None:
        outputs = [cast("Tensor", _part(run, run.attend, x)) for run, x in zip(runs, states, strict=True)]
        uses = 1 if split.experts is None else 2
        attended = [_offloaded(out, uses) if offload and out.is_cuda else (out, None) for out in outputs]
    inputs: list[tuple[Any, ...]] = [(x, *carried) for x, carried in zip(states, attended, strict=True)]
    if split.experts is not None:
        routes = routes or [
            cast("Routes", _part(run, run.route, *given)) for run, given in zip(runs, inputs, strict=True)
        ]
        with calls[0].autocasting():
            routed = _of_experts(split.experts, routes)
    inputs = [given + carried for given, carried in zip(inputs, routed, strict=True)]
    return [_part(run, run.finish, *given) for run, given in zip(runs, inputs, strict=True)]


def _part(run: LayerRun, part: Callable[..., Any], *tensors: Tensor | HostOffloaded | None) -> Any:
    run.begin_part()
    return recomputed(part, *tensors, as_in_backward=run.is_compiled)


def _offloaded(result: Tensor, uses: int = 1) -> Carried:
    offloaded = HostOffloaded(result, uses)
    return offloaded.placeholder, offloaded


def _of_experts(experts: nn.Module, routes: Sequence[Routes]) -> Sequence[Carried]:
    """Compute the tokens of all chunks in one call of the experts, and return each chunk's output.

    Experts on the CPU leave it in host memory. From a GPU it is offloaded there until backward, which recomputes each
    chunk's last part.
    """
    rows = [route[0].shape[0] for route in routes]
    device = fused_in(experts).backend(sum(rows)).device
    gathered = zip(*routes, strict=True)
    if device.type == "cpu":
        out = cast("Tensor", experts(*(to_host(tensors) for tensors in gathered)))
        on_host = all(route[0].device.type == "cpu" for route in routes)
        pieces = torch.split(out, rows) if on_host else parts(out, rows, pin=True)
        return [(piece, None) for piece in pieces]
    out = cast("Tensor", experts(*(_joined(tensors, device) for tensors in gathered)))
    pieces = zip(torch.split(out, rows), routes, strict=True)
    return [_offloaded(piece.to(route[0].device)) for piece, route in pieces]


def _joined(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    return pieces[0].to(device) if len(pieces) == 1 else torch.cat([piece.to(device) for piece in pieces])

"""One run of a layer with its blocks observed, and with their inputs and outputs replaced by those of another run.

In: a layer with weights, its call, the hidden states. Out: the layer's output, each block's input and output, and the
experts that the router chose for each token. A block is a child of the layer with children of its own: attention, the
experts with their router, a dense MLP. With `given`, every block starts from the same values as in that run, so the
error of one block is not hidden by, or blamed on, another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ktc.inference.prove.calls import LayerCall
from ktc.model.compare.experts import Experts, chosen, roles_of, routed_rows


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A block's hidden inputs by position or name, as they were, and its output (tokens, outputs) in fp32."""

    inputs: Mapping[int | str, Tensor]
    output: Tensor


@dataclass(frozen=True, slots=True)
class LayerRun:
    """The layer's output (1, T, H) as it was, its blocks, and by experts' path the choices (T, K), sorted by number.

    `rows` are hidden states (..., N, H) that the experts were given, in fp32.
    """

    output: Tensor
    blocks: Mapping[str, BlockRun]
    choices: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]


def blocks_of(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a layer that have children themselves; a list is never called."""
    return {
        name: child
        for name, child in layer.named_children()
        if not isinstance(child, nn.ModuleList) and next(child.children(), None) is not None
    }


def run_layer(
    layer: nn.Module, call: LayerCall, x: Tensor, experts: Sequence[Experts], given: LayerRun | None = None
) -> LayerRun:
    """Run the layer on `x` (1, T, H) without gradients; with `given`, its blocks start from the values of that run."""
    watch = _Watch(layer, x.shape[-1], experts, given)
    with torch.no_grad(), watch.hooked(), watch.choices_in_lists:
        output = call.run(layer, x)
    return LayerRun(output, watch.blocks, watch.choices(x.shape[1]), watch.rows)


class _Watch:
    """The hooks of one run, and what they saw."""

    def __init__(self, layer: nn.Module, hidden: int, experts: Sequence[Experts], given: LayerRun | None) -> None:
        self._layer, self._hidden, self._experts, self._given = layer, hidden, experts, given
        self._inputs: dict[str, dict[int | str, Tensor]] = {}
        self._calls: dict[str, int] = {}
        self._chosen: dict[str, Tensor] = {}
        self.blocks: dict[str, BlockRun] = {}
        self.rows: dict[str, Tensor] = {}
        self.choices_in_lists = _TopK({one.top_k for one in experts if self._is_list(one)})

    def _is_list(self, experts: Experts) -> bool:
        return isinstance(self._layer.get_submodule(experts.path), nn.ModuleList)

    @contextmanager
    def hooked(self) -> Generator[None]:
        """Watch the layer's blocks and experts inside."""
        with ExitStack() as hooks:
            for name, block in blocks_of(self._layer).items():
                hooks.enter_context(block.register_forward_pre_hook(self._before(name), with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(self._after(name)))
            for experts in self._experts:
                module = self._layer.get_submodule(experts.path)
                if isinstance(module, nn.ModuleList):
                    for expert in module:
                        hooks.enter_context(expert.register_forward_pre_hook(self._rows_of(experts.path)))
                else:
                    hooks.enter_context(module.register_forward_pre_hook(self._routed(experts), with_kwargs=True))
            yield

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._calls[name] = self._calls.get(name, 0) + 1
            places: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
            hidden = {place: value for place, value in places.items() if self._is_hidden(value)}
            self._inputs[name] = hidden
            known = self._given.blocks.get(name) if self._given is not None else None
            if known is None or self._calls[name] > 1:
                return None
            for place, value in hidden.items():
                if place in known.inputs and known.inputs[place].shape == value.shape:
                    places[place] = known.inputs[place].to(value.device, value.dtype)
            return tuple(places[i] for i in range(len(args))), {key: places[key] for key in kwargs}

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            parts = cast("tuple[Any, ...]", out) if isinstance(out, tuple) else (out,)
            if self._calls[name] > 1 or not parts or not isinstance(parts[0], Tensor):
                self.blocks.pop(name, None)  # called twice, or it returns no tensor: no row
                return None
            output = parts[0]
            self.blocks[name] = BlockRun(self._inputs[name], output.detach())
            known = self._given.blocks.get(name) if self._given is not None else None
            if known is None or known.output.shape != output.shape:
                return None
            same = known.output.to(output.device, output.dtype)
            return (same, *parts[1:]) if isinstance(out, tuple) else same

        return hook

    def _is_hidden(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (self._hidden,)

    def _routed(self, experts: Experts) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            roles = roles_of(experts, module, args, kwargs)
            if not isinstance(roles["hidden"], Tensor):
                return
            index = chosen(experts, roles)
            if index is not None:
                self._chosen[experts.path] = index
            rows = routed_rows(experts, roles)
            if rows.numel():
                self.rows[experts.path] = rows

        return hook

    def _rows_of(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                x = args[0].detach().reshape(-1, args[0].shape[-1]).float().cpu()
                self.rows[path] = torch.cat((self.rows[path], x)) if path in self.rows else x

        return hook

    def choices(self, tokens: int) -> dict[str, Tensor]:
        """Return the choices by path, each row sorted; none where a router's choice was not seen."""
        choices = dict(self._chosen)
        for experts in self._experts:
            last = self.choices_in_lists.last.get(experts.top_k)
            if experts.path not in choices and last is not None and last.numel() == tokens * experts.top_k:
                choices[experts.path] = last.reshape(-1, experts.top_k).cpu()
        return {path: index.sort(-1).values for path, index in choices.items() if len(index) == tokens}


class _TopK(TorchFunctionMode):
    """Remembers the indices of the last `topk` of some sizes: the choice of a router whose experts are a list."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self._sizes = sizes
        self.last: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk) and out[1].shape[-1] in self._sizes:
            self.last[out[1].shape[-1]] = out[1].detach()
        return out

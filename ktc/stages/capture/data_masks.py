"""Masks that depend on data: a child module that chooses keys by their values becomes one node of the graph.

Input: a block and a call of it with an explicit mask. Output: a context in which every such child returns the operator
`data_mask`, of the mask's shape. The node computes nothing: the block keeps its own code, and patterns only need to see
where the mask comes from. Refused by `check_masks`: a result with another use than as a mask of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from ktc.model.experts.private_api import pytree
from ktc.model.graph import ops
from ktc.model.graph.typed import named_modules, nodes_of
from ktc.stages.capture.forwards import replaced_forwards
from ktc.stages.capture.reasons import NO_DATA


class NotMasks(Exception):
    """A child that depends on data returns more than a mask."""


@contextmanager
def masks_from_data(
    block: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Generator[None]:
    """Run the children of `block` that read data to make a mask as the operator `data_mask` inside the context.

    They are found in a call of `run`, the block's own forward, on meta tensors.
    """
    makers = _makers(block, run, args, kwargs)

    def marking(place: int) -> Callable[..., Any]:
        return lambda *given, **named: _data_mask(given, named, place)

    with replaced_forwards([(block.get_submodule(name), marking(place)) for name, place in makers.items()]):
        yield


def _makers(
    block: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, int]:
    """Return the innermost modules that are given the mask and read data, with the mask's position among their inputs.

    Without the data of these modules, the call must run.
    """
    places: dict[str, int] = {}
    mask = kwargs.get("attention_mask")

    def trying(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*given: Any, **named: Any) -> Any:
            try:
                return original(*given, **named)
            except Exception as error:  # torch has several classes for it; other errors are raised again
                place = next((i for i, leaf in enumerate(_tensors(given, named)) if leaf is mask), None)
                if place is None or not any(words in str(error) for words in NO_DATA):
                    raise
                places[name] = place
                return _data_mask(given, named, place)

        return forward

    if not isinstance(mask, Tensor):
        return {}
    with replaced_forwards([(m, trying(name, m.forward)) for name, m in named_modules(block) if name]):
        try:
            run(*args, **kwargs)
        except Exception:  # noqa: BLE001 - it fails for another reason too, which `record` meets again and reports
            return {}
    return places


def _tensors(given: tuple[Any, ...], named: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves((given, dict(named))) if isinstance(leaf, Tensor)]


def _data_mask(given: tuple[Any, ...], named: Mapping[str, Any], place: int) -> Tensor:
    tensors = _tensors(given, named)
    return torch.ops.ktc_capture.data_mask(tensors.pop(place), tensors)


def check_masks(graph: fx.GraphModule) -> None:
    """Raise NotMasks if a `data_mask` reaches the output other than as the mask of an attention core."""
    masks = [node for node in nodes_of(graph) if node.target is ops.data_mask]
    seen, todo = set[fx.Node](), list(masks)
    while todo:
        node = todo.pop()
        for user in node.users:
            only_mask = user.target is ops.sdpa and [a is node for a in user.args].count(True) == 1
            if only_mask and user.args[ops.SDPA_MASK] is node:
                continue
            if user.op == "output":
                raise NotMasks("a module that depends on data returns more than a mask of attention")
            if user not in seen:
                seen.add(user)
                todo.append(user)

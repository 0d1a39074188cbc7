"""Adapters that code of a recurrent layer reads past: it takes the weight of a linear layer without calling the layer.

In: the captured model, and the FQNs of the linear layers that take LoRA. Out: one warning (M097) for each class and
layer. PEFT's adapters are left out in the same places, so training is equal to stock.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from types import CodeType

from torch import nn

from ktc.diagnostics import Diagnostic
from ktc.model.graph.typed import nodes_of
from ktc.stages.capture.types import BlockGraph, CapturedModel

_ABOUT = frozenset({"dtype", "device", "shape", "data"})  # attributes of a weight that compute nothing


def bypassed(captured: CapturedModel, adapted: Iterable[str]) -> tuple[Diagnostic, ...]:
    """Return the warnings (M097) about layers with the FQNs `adapted`."""
    blocks = {site.fqn: captured.block(site.block) for site in captured.sites}
    named: dict[tuple[type[nn.Module], str], Diagnostic] = {}
    for path in adapted:
        parent, _, name = path.rpartition(".")
        block = blocks.get(parent)
        if block is None or not block.recurrent:
            continue
        owner = type(captured.model.get_submodule(parent))
        if name in _read_past(owner) and (owner, name) not in named:
            named[owner, name] = _warning(block, name, path)
    return tuple(named.values())


def _warning(block: BlockGraph, name: str, path: str) -> Diagnostic:
    assert block.graph is not None, "a recurrent block has a graph"
    called = any(node.meta.get("fqn") == name for node in nodes_of(block.graph))
    if called:
        what = "may be left out: where a fused kernel of a GPU runs"
        hint = "train without these kernels, or without an adapter on this layer; `ktc explain M097`"
    else:
        what = "does nothing, as PEFT's does not:"
        hint = "it costs memory and no answer changes; `ktc explain M097`"
    message = f"the adapter on `{path}` {what} `{block.class_name}` reads the weight of `{name}`, not the layer"
    return Diagnostic("M097", message, hint=hint, severity="warning")


@cache
def _read_past(owner: type[nn.Module]) -> frozenset[str]:
    """Return the names of the layers whose weights the class's own functions read."""
    classes = [kind for kind in owner.__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    functions = [f for kind in classes for f in vars(kind).values() if inspect.isfunction(f)]
    return frozenset(name for function in functions for name in _weights(inspect.unwrap(function).__code__))


def _weights(code: CodeType) -> Iterator[str]:
    """Yield the names X of `X.weight` in code, where more than a property of the weight is read."""
    read = [i.argval if i.opname in ("LOAD_ATTR", "LOAD_METHOD") else "" for i in dis.get_instructions(code)]
    for (name, leaf), after in zip(pairwise(read), [*read[2:], ""], strict=False):
        if name and leaf == "weight" and after not in _ABOUT:
            yield str(name)

"""A key that is equal for sites which compute the same, so that one graph is valid for all of them.

Input: a block on meta tensors and its call. Output: a key. Two blocks have equal keys if their classes, tensors, plain
attributes and call signatures agree, and if they run the same operators with the same constants: in evaluation, and in
training on many tokens. A setting that a layer finds by its number (`config.limits[self.layer_idx]`) shows there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ktc.model.experts.private_api import pytree
from ktc.model.graph.typed import named_modules
from ktc.model.hf.foreign_errors import first_line
from ktc.stages.capture.expert_list import candidates
from ktc.stages.capture.export import BATCH, SEQUENCE
from ktc.stages.capture.markers import masks_given
from ktc.stages.capture.record import Call
from ktc.stages.capture.trace import plain_settings, traced
from ktc.stages.capture.unrolled import all_experts_routed

LONG = 1021  # tokens of a sequence in the second trace: more than limits on the length of a call that authors write


def identity_of(block: nn.Module, call: Call, failure: str | None, layer: int) -> object:
    """Return the key of the block at layer number `layer`. `failure` is the reason why it does not run on meta."""
    tensors = tuple((name, tuple(t.shape), t.dtype) for name, t in [*block.named_parameters(), *block.named_buffers()])
    behaviour = (
        () if failure is not None else (_behaviour(block, call), _behaviour(block.train(), resized(call, BATCH, LONG)))
    )
    block.eval()
    number = layer if failure is None and _reads_its_number(block, call, layer) else None
    return _structure(block, layer), tensors, _signature(call), failure, behaviour, number


def _reads_its_number(block: nn.Module, call: Call, layer: int) -> bool:
    """Return whether a block that loops over a list of experts reads the number of its layer.

    Its graph replaces its code, so a branch on the number must not be shared, even one that no trace reaches.
    """
    numbers = [(m, n, v) for m in block.modules() for n, v in vars(m).items() if _is_number(n, v, layer)]
    if not numbers or not candidates(block):
        return False
    for module, name, _ in numbers:
        delattr(module, name)
    try:
        without = _behaviour(block, call)
    finally:
        for module, name, value in numbers:
            setattr(module, name, value)
    return without != _behaviour(block, call)


def _structure(block: nn.Module, layer: int) -> tuple[object, ...]:
    return tuple((name, type(module), *_settings(module, layer)) for name, module in named_modules(block))


def _settings(module: nn.Module, layer: int) -> Iterator[tuple[str, str]]:
    """Yield the plain attributes and the code that was put on the instance. The layer's own number shows in a trace."""
    for name, value in sorted(plain_settings(module).items()):
        if not _is_number(name, value, layer):
            yield name, repr(value)
    for name, value in sorted(vars(module).items()):
        if callable(value) and hasattr(value, "__code__"):
            yield name, repr(value.__code__)


def _is_number(name: str, value: object, layer: int) -> bool:
    """Return whether an attribute is the number of its layer, counted from 0 or 1."""
    if type(value) is not int or value not in (layer, layer + 1):
        return False
    return "layer" in name and name.rstrip("_").endswith(("idx", "id", "index", "number", "num"))


def _signature(call: Call) -> object:
    leaves, spec = pytree.tree_flatten(call)
    return str(spec), tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)


def _behaviour(block: nn.Module, call: Call) -> tuple[str, ...]:
    """Return the operators that the block runs, those of its experts too, or why it does not run."""
    with masks_given() if isinstance(call[1].get("attention_mask"), Tensor) else nullcontext():
        try:
            return tuple(_traces(block, lambda: block(*call[0], **call[1]), call))
        except Exception as error:  # noqa: BLE001 - foreign code; blocks that fail alike are alike
            return (f"{type(error).__name__}: {first_line(error)}",)


def _traces(block: nn.Module, run: Callable[[], object], call: Call) -> Iterator[str]:
    try:
        yield from traced(block, run)
        return
    except Exception:
        lists = candidates(block)
        if not lists:
            raise
    for _, modules in lists:
        try:
            with all_experts_routed(modules):
                rows = traced(block, run)
        except Exception:  # noqa: BLE001 - another list may be the right one, as when the call was recorded
            continue
        yield from rows
        for expert in expert_traces(modules, call):
            yield from expert
        return
    raise ValueError("no list of modules explains what reads data")


def expert_traces(modules: nn.ModuleList, call: Call) -> Iterator[list[str]]:
    """Yield the trace of each expert of a list, alone on as many tokens as the first tensor of the call has."""
    hidden = next(leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor))
    sample = torch.empty(hidden.shape[:-1].numel(), hidden.shape[-1], dtype=hidden.dtype, device="meta")
    for expert in modules:
        yield traced(expert, lambda expert=expert: expert(sample))


def resized(call: Call, batch: int, length: int) -> Call:
    """Return the call with other sequences; `BATCH` and `SEQUENCE` are the sizes of a recorded call."""
    sizes = {BATCH: batch, SEQUENCE: length, BATCH * SEQUENCE: batch * length}

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty([sizes.get(size, size) for size in leaf.shape], dtype=leaf.dtype, device=leaf.device)

    return pytree.tree_map(changed, call)

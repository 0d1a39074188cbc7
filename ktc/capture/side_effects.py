"""The side effects of a block: tensors that it keeps, tensors of others that it changes, settings.

Input: a block on meta tensors and a function that calls it. Output: the reason in words, "" if there is nothing. A
block whose graph replaces its code at run time must have no such effect, since a graph has results alone.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ktc.capture.trace import is_plain, plain_settings
from ktc.graph.typed import named_modules

_PLAIN = (int, float, str, list, dict, set)


class _Produced(TorchDispatchMode):
    """Watches every tensor that an operator inside makes, and the operators that change tensors from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.changes = False
        # The storages that were made here. Holding them keeps their ids unique, and no tensor alive.
        self._inside: dict[int, object] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        named = dict(zip((declared.name for declared in func._schema.arguments), args, strict=False)) | given
        for declared in func._schema.arguments:
            if declared.alias_info is not None and declared.alias_info.is_write:
                self.changes |= any(id(_storage(t)) not in self._inside for t in _tensors(named.get(declared.name)))
        result = func(*args, **given)
        before = {id(storage): storage for storage in map(_storage, _tensors((args, given)))}
        for tensor in _tensors(result):
            self.made.append(weakref.ref(tensor))
            if id(_storage(tensor)) not in before:
                self._inside[id(_storage(tensor))] = _storage(tensor)
        return result


class _Hooks(TorchFunctionMode):
    """Sees code that puts hooks on the gradients of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.set = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.set |= getattr(func, "__name__", "") in ("register_hook", "register_post_accumulate_grad_hook")
        return func(*args, **(kwargs or {}))


def side_effect(block: nn.Module, run: Callable[[], object]) -> str:
    """Return what `run()`, a call of `block` on meta tensors, leaves behind. With and without gradients.

    Raises what `run` raises."""
    return _left_behind(block, run, torch.no_grad()) or _left_behind(block, run, torch.enable_grad())


def _left_behind(block: nn.Module, run: Callable[[], object], mode: AbstractContextManager[None]) -> str:
    settings = _settings(block) | _globals(block)
    held = _tensor_attributes(block)
    with mode, _Hooks() as hooks, _Produced() as produced:
        own_backward = any(map(has_own_backward, _tensors(run())))
    if hooks.set or own_backward:
        return "it computes gradients in its own way"
    if produced.changes:
        return "it changes a tensor that it is given"
    after_run = _settings(block) | _globals(block)
    if changed := [name for name, value in after_run.items() if settings.get(name) != value]:
        return f"it changes `{changed[0]}`"
    after = _tensor_attributes(block)
    if kept := [name for name, identity in after.items() if held.get(name) != identity]:
        return f"it keeps a result as its attribute `{kept[0]}`"
    gc.collect()  # frames of the run may still hold tensors in circles
    return "a tensor that it computes outlives its call" if any(ref() is not None for ref in produced.made) else ""


def has_own_backward(result: Tensor) -> bool:
    """Return whether Python code of the model takes part in the backward pass."""
    todo, seen = [result.grad_fn], set[object]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            return True
        todo += [source for source, _ in node.next_functions]
    return False


def _settings(block: nn.Module) -> dict[str, str]:
    return {
        f"{path}.{name}".lstrip("."): repr(value)
        for path, module in named_modules(block)
        for name, value in plain_settings(module).items()
    }


def _globals(block: nn.Module) -> dict[str, str]:
    """Return the plain values that the files of the block's classes keep."""
    files = {type(module).__module__ for _, module in named_modules(block)}
    own = sorted(name for name in files if name in sys.modules and not name.startswith(("torch.", "ktc.")))
    kept: dict[str, str] = {}
    for file in own:
        values: dict[str, Any] = dict(vars(sys.modules[file]))
        for name, value in values.items():
            if not name.startswith("__") and isinstance(value, _PLAIN) and is_plain(cast("object", value)):
                kept[f"{file.rpartition('.')[2]}.{name}"] = repr(cast("object", value))
    return kept


def _tensor_attributes(block: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the identity of the tensors in every attribute of the modules, lists and dictionaries included."""
    return {
        f"{path}.{name}".lstrip("."): tuple(id(leaf) for leaf in _tensors(value))
        for path, module in named_modules(block)
        for name, value in vars(module).items()
        if name not in ("_modules", "_parameters") and _tensors(value)
    }


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage, which is one object for all views of a tensor."""
    return tensor.untyped_storage()

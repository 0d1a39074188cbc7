"""The side effects of a block: tensors that it keeps, tensors of callers that it changes, settings that it changes.

Input: a block on meta tensors and a function that calls it. Output: the reason in words, "" if there is nothing. A
block whose graph replaces its code at run time must have no such effect, since a graph has results alone.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from ktc.model.experts.private_api import TorchDispatchMode, pytree, schema_of
from ktc.model.graph.typed import named_modules
from ktc.model.linears.plain import hooks_of
from ktc.stages.capture.trace import is_plain, plain_settings

_NOT_OF_MODELS = ("torch.", "ktc.", "builtins")  # files that keep values of their own
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_EVERY_CONFIG = frozenset(name for name in vars(PreTrainedConfig()) if name.startswith("_"))
_CONTAINERS = frozenset({"array", "itertools", "queue", "_queue", "_thread"})
# Random numbers that a graph does not draw: each run has others, and capture would see one branch.
_RANDOM: Mapping[str, Callable[[], object]] = {
    "random.getstate()": random.getstate,
    "numpy.random.get_state()": lambda: str(np.random.get_state()),
}


class _Produced(TorchDispatchMode):
    """Watches every tensor that an operator inside makes, and the operators that change tensors from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.changes = False
        # The storages that were made here. Holding them keeps their ids unique, and no tensor alive.
        self._inside: dict[int, object] = {}

    def some_live(self) -> bool:
        """Return whether a tensor that was made still exists."""
        return any(ref() is not None for ref in self.made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        named = dict(zip((declared.name for declared in schema_of(func).arguments), args, strict=False)) | given
        for declared in schema_of(func).arguments:
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.set |= getattr(func, "__name__", "") in ("register_hook", "register_post_accumulate_grad_hook")
        return func(*args, **(kwargs or {}))


def side_effect(block: nn.Module, run: Callable[[], object]) -> str:
    """Return the first side effect of `run()`, a call of `block` on meta tensors, with or without gradients.

    Raises the exceptions of `run`.
    """
    return _left_behind(block, run, torch.no_grad()) or _left_behind(block, run, torch.enable_grad())


def _left_behind(block: nn.Module, run: Callable[[], object], mode: AbstractContextManager[None]) -> str:
    settings = _settings(block) | _globals(block)
    before = _tensor_attributes(block)
    with mode, _Hooks() as hooks, _Produced() as produced:
        results = _tensors(run())
        own_backward = any(map(has_own_backward, results))
        attached = next((name for tensor in results for name in vars(tensor)), "")
        del results
    if hooks.set or own_backward:
        return "it computes gradients in its own way"
    if attached:
        return f"it puts `{attached}` on its result"
    if produced.changes:
        return "it changes a tensor that it is given"
    after = _tensor_attributes(block)
    if kept := [name for name, identity in after.items() if before.get(name) != identity]:
        return f"it keeps a result as its attribute `{kept[0]}`"
    after_run = _settings(block) | _globals(block)
    if changed := [name for name, value in after_run.items() if settings.get(name) != value]:
        return f"it changes `{changed[0]}`"
    if produced.some_live():
        gc.collect()  # frames of the run may still hold tensors in circles
    return "a tensor that it computes outlives its call" if produced.some_live() else ""


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
    values = _ReachableValues(block)
    values.values |= {name: repr(state()) for name, state in _RANDOM.items()}
    for path, module in named_modules(block):
        values.add(path, module)
    return values.values


def _globals(block: nn.Module) -> dict[str, str]:
    """Return the plain values that the files of the block's classes keep, and the classes themselves."""
    values = _ReachableValues(block)
    for file in sorted(values.files):
        if file in sys.modules:
            values.add_names(file.rpartition(".")[2], vars(sys.modules[file]))
    return values.values


class _ReachableValues:
    """The plain values that modules or files can reach: in containers, and in objects of the same package.

    A counter in an object, class or function is often the only trace of a side effect.
    """

    def __init__(self, block: nn.Module) -> None:
        bases = {base for _, module in named_modules(block) for base in type(module).__mro__}
        self.files = {base.__module__ for base in bases if not base.__module__.startswith(_NOT_OF_MODELS)}
        packages = {file.rpartition(".")[0] for file in self.files} - {"", "transformers"}
        self._packages = tuple(f"{package}." for package in sorted(packages))
        self.values: dict[str, str] = {}
        self._seen: dict[int, object] = {}

    def add(self, path: str, value: object) -> None:
        """Record `value` under `path`, with everything that it contains."""
        if is_plain(value):
            self.values[path] = repr(value)
            return
        if id(value) in self._seen or isinstance(value, Tensor):
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self.add_names(path, plain_settings(value) | _objects_of(value))
            self._add_parts(f"{path}.hooks", {str(place): hook for place, hook in enumerate(hooks_of(value))})
        elif isinstance(value, Mapping):
            self._add_parts(path, {str(key): v for key, v in cast("Mapping[object, object]", value).items()})
        elif isinstance(value, list | tuple | set | frozenset | deque):
            self._add_parts(path, {str(place): v for place, v in enumerate(cast("Iterable[object]", value))})
        elif isinstance(value, PreTrainedConfig):
            self.add_names(path, {name: v for name, v in vars(value).items() if name not in _OF_EVERY_CONFIG})
        elif isinstance(value, SimpleNamespace):
            self.add_names(path, vars(value))
        elif isinstance(value, np.ndarray):
            self.values[path] = repr(value.tolist())
        elif isinstance(value, ContextVar):
            self.add(path, cast("ContextVar[object]", value).get(None))
        elif isinstance(value, MethodType):
            self.add(path, value.__self__)
        elif isinstance(value, partial):
            self._add_parts(path, {"func": value.func, "args": value.args, "keywords": value.keywords})
        elif self._is_own(value):
            self.add_names(path, getattr(value, "__dict__", {}) | _slots_of(value))
            self._add_parts(f"{path}()", _enclosed(value))
        elif type(value).__module__ in _CONTAINERS:
            self.add_names(path, getattr(value, "__dict__", {}))
            self.values[path] = repr(value)  # such as `count(3)`

    def add_names(self, path: str, values: Mapping[str, object]) -> None:
        """Record values by their names below `path`."""
        for name, value in values.items():
            if not name.startswith("__"):
                self.add(f"{path}.{name}".lstrip("."), value)

    def _add_parts(self, path: str, values: Mapping[str, object]) -> None:
        self.values[path] = f"{len(values)} values"
        self.add_names(path, values)

    def _is_own(self, value: object) -> bool:
        """Return whether an object, class, function or file is of the files of the block or of their package."""
        name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
        return isinstance(name, str) and (name in self.files or name.startswith(self._packages))


def _slots_of(value: object) -> dict[str, object]:
    """Return the attributes that an object has without a dictionary."""
    names = [name for base in type(value).__mro__ for name in _names_in(vars(base).get("__slots__", ()))]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _names_in(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _enclosed(function: object) -> dict[str, object]:
    """Return the values that a function holds from around its definition."""
    if not isinstance(function, FunctionType):
        return {}
    enclosed: dict[str, object] = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell that is empty yet
            enclosed[name] = cell.cell_contents
    return enclosed


def _objects_of(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module that are objects: no plain values, tensors or modules."""
    attributes = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return {name: value for name, value in attributes.items() if not isinstance(value, nn.Module | Tensor)}


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

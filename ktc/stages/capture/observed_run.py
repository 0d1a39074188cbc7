"""A recorded run of a module: the torch functions that its code calls, and the names that it mentions.

In: a module, and a function that runs it. Out: `Ran`, whose calls are equal for two runs that compute the same.
Functions are recorded as the author calls them, since the operators behind them depend on gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ktc.foundation.temporary_values import context_value
from ktc.stages.capture.mentioned import Mentions

# Functions whose result has the numbers and the gradients of their first argument, in any dtype that holds them.
_COPIES = frozenset({
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "alias", "view_as", "cpu",
    "cuda",
})  # fmt: skip
_DEVICES = ("meta", "cpu", "cuda")
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_WRAPPED = re.compile(r"\bbase_layer\.|\bparametrizations\.|\.original\b")  # in the name of a weight that PEFT wraps
_LIMITS = frozenset(
    float(getattr(torch.finfo(dtype), limit))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for limit in ("min", "max", "eps", "tiny")
)


_unrecorded: ContextVar[bool] = ContextVar("unrecorded", default=False)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run. `blocked` states for each call whether the code has disabled gradients."""

    calls: tuple[tuple[str, ...], ...]
    blocked: tuple[bool, ...]
    graded: bool
    mentioned: frozenset[str]

    def computes_as(self, other: Ran) -> bool:
        """Return whether both compute the same, with the same gradients if both have any."""
        graded = self.graded and other.graded
        return self.calls == other.calls and (not graded or self.blocked == other.blocked)


def observed(module: nn.Module, run: Callable[[], object], mentions: Mentions) -> Ran:
    """Return a record of `run`, which runs the code of `module`. Raises the exceptions of `run`.

    The names that the code mentions are added to `mentions`, also before an exception.
    """
    graded = torch.is_grad_enabled()
    with _Calls(module) as calls, mentions.collected():
        run()
    return Ran(tuple(calls.rows), tuple(calls.blocked), graded, frozenset(mentions.names | calls.other_names))


def unrecorded() -> AbstractContextManager[object]:
    """Return a context in which no call is recorded: those that prepare an input are not of the module."""
    return context_value(_unrecorded, True)


class _Calls(TorchFunctionMode):
    """Records each call that makes or changes a tensor, constants and connections. `other_names` has the others."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.rows: list[tuple[str, ...]] = []
        self.blocked: list[bool] = []
        self.other_names: set[str] = set()
        self._num_given = 0
        self._main = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        tensors = (*module.named_parameters(), *module.named_buffers())
        self._names = {id(tensor): _WRAPPED.sub("", name) for name, tensor in tensors}
        self._kept_alive: list[Tensor] = []  # an id is unique only as long as its tensor lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = dict(kwargs or {}), name_of(func)
        if _unrecorded.get():
            return func(*args, **given)
        spelled = [self._spelled(leaf) for leaf in _leaves((args, given))]
        result = func(*args, **given)
        made = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
        if name in _COPIES and made and self._keeps(args[0], made[0]):
            self._name(made[0], spelled[0])
        elif made or result is None or name in _HOOKS:
            self._add(name, spelled, made)
        else:
            self.other_names.add(name)
        return result

    def _keeps(self, source: Tensor, made: Tensor) -> bool:
        """Return whether a conversion rounds to nothing narrower than the source or the module's own dtype."""
        if made.dtype in (source.dtype, self._main):
            return True
        wide = source.dtype if source.is_floating_point() else self._main
        return made.is_floating_point() and any(_holds(made.dtype, dtype) for dtype in (wide, self._main))

    def _add(self, name: str, spelled: list[str], made: list[Tensor]) -> None:
        if name == "_set_grad_enabled":
            return
        self.rows.append((name, *spelled))
        self.blocked.append(not torch.is_grad_enabled())
        for place, tensor in enumerate(made):
            self._name(tensor, f"%{len(self.rows)}.{place}")

    def _name(self, tensor: Tensor, name: str) -> str:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = name
            self._kept_alive.append(tensor)
        return self._names[id(tensor)]

    def _spelled(self, leaf: object) -> str:
        if isinstance(leaf, Tensor):
            if id(leaf) not in self._names:
                self._num_given += 1
            return self._name(leaf, f"given {self._num_given}")
        if isinstance(leaf, torch.dtype | torch.device) or (isinstance(leaf, str) and leaf in _DEVICES):
            return "a dtype or a device"
        return "a limit of a dtype" if isinstance(leaf, float) and leaf in _LIMITS else repr(leaf)


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a dtype has every number of another."""
    one, two = torch.finfo(dtype), torch.finfo(other)
    return one.eps <= two.eps and one.max >= two.max


def _leaves(value: object) -> Iterator[object]:
    """Yield the items of nested containers, in order. Four times as fast as pytree, which would dominate the runs."""
    if isinstance(value, dict):
        value = list(cast("Mapping[object, object]", value).values())
    if isinstance(value, tuple | list):
        for item in cast("Sequence[object]", value):
            yield from _leaves(item)
    else:
        yield value


def name_of(func: Any) -> str:
    """Return the name of a torch function as a mode receives it, or of the property of a tensor that it gets."""
    name = str(getattr(func, "__name__", func))
    return str(func.__self__.__name__) if name == "__get__" else name

"""Loops over experts without data: inside `all_experts_routed`, a block runs on meta as if every expert were chosen.

The tokens of an expert are data, and a Python loop over the experts reads them. Here each such read has a result that
is independent of data: a mask picks as many rows as it has elements, every expert index occurs, and an expert of a list
is one marker. The run has the dataflow of the loop but not its values; `canonical` reads the dataflow. A branch is
followed only where it asks whether an expert has tokens (`expert_hits`). All other reads of data raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ktc.stages.capture.expert_hits import DependsOnData, Hits
from ktc.stages.capture.forwards import replaced_forwards

_NAME = "ktc_unrolled"  # of the operator library
_PICKERS = frozenset({"nonzero", "argwhere"})
_NUMBERS = frozenset({"unique", "unique_consecutive", "_unique2"})
_SELF = frozenset({"item", "squeeze", "view", "reshape", "flatten", "long", "int", "cpu", "to", "detach", "clone"})


@cache
def markers() -> Any:
    """Return the operators `picked(mask, dim)`, the rows of a mask, `expert(x, number)`, an expert's result, and
    `counted(numbers, count)`, the tokens of each expert.
    """
    library = torch.library.Library(_NAME, "DEF")
    library.define("picked(Tensor mask, int dim) -> Tensor")
    library.define("expert(Tensor x, int number) -> Tensor")
    library.define("counted(Tensor numbers, int count) -> Tensor")
    library.impl("picked", _picked_on_meta, "Meta")
    library.impl("expert", _expert_on_meta, "Meta")
    library.impl("counted", _counted_on_meta, "Meta")
    operators = getattr(torch.ops, _NAME)
    operators.library = library  # keeps the library alive as long as its operators
    return operators


def _picked_on_meta(mask: Tensor, dim: int) -> Tensor:
    return mask.new_empty((mask.numel(),), dtype=torch.long)


def _expert_on_meta(x: Tensor, number: int) -> Tensor:
    return torch.empty_like(x)


def _counted_on_meta(numbers: Tensor, count: int) -> Tensor:
    return numbers.new_empty((count,), dtype=torch.long)


class _Number(int):
    """A number that also supports the methods of a tensor with one element."""

    def __getitem__(self, _: object) -> _Number:
        return self

    def __getattr__(self, name: str) -> Callable[..., _Number]:
        if name not in _SELF:
            raise AttributeError(name)
        return lambda *_, **__: self


class _Count(_Number):
    """The tokens of an expert. It is compared with zero alone: with any other number the answer would be data."""

    def _compare(self, other: object, answer: bool, zero: int = 0) -> bool:
        if other != zero:
            raise DependsOnData("it compares a number of tokens")
        return answer

    def __eq__(self, other: object) -> bool:
        return self._compare(other, int(self) == 0)

    def __ne__(self, other: object) -> bool:
        return self._compare(other, int(self) != 0)

    def __gt__(self, other: object) -> bool:
        return self._compare(other, int(self) > 0)

    def __le__(self, other: object) -> bool:
        return self._compare(other, int(self) <= 0)

    def __ge__(self, other: object) -> bool:
        return self._compare(other, int(self) > 0, zero=1)

    def __lt__(self, other: object) -> bool:
        return self._compare(other, int(self) <= 0, zero=1)

    __hash__ = int.__hash__


class _ExpertNumbers(list[_Number]):
    """Every expert's index, in order, instead of a tensor of those that occur."""

    def __init__(self, count: int) -> None:
        super().__init__(map(_Number, range(count)))

    def __getattr__(self, name: str) -> Callable[..., _ExpertNumbers]:
        if name not in _SELF | {"tolist", "numpy", "unique"}:
            raise AttributeError(name)
        return lambda *_, **__: self


class _NoData(TorchFunctionMode):
    """Answer a loop's reads of data for `count` experts; pass all other operations through."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._hits = Hits()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and first.is_meta:
            if name in _PICKERS or (name == "where" and len(args) == 1 and not given):
                return self.rows_picked_by(first, name == "where" or bool(given.get("as_tuple", False)))
            if name in _NUMBERS:
                self._hits.require_chosen(first, self._count)
                return _ExpertNumbers(self._count)
            if name == "__bool__":
                return self._hits.says_whether_hit(first, self._count)
            if name in ("tolist", "numpy", "unbind", "__iter__") and self._counts_tokens(first):
                self._hits.require_counts(first, self._count)
                counts = [_Count(sys.maxsize), *[_Count(0)] * (self._count - 1)]  # the first expert gets all tokens
                return iter(counts) if name == "__iter__" else counts
            if name == "cpu":
                return first
        result = self._called(func, args, given)
        self._hits.record(func, args, given, result)
        return result

    def _called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if name == "bincount":
                return markers().counted(args[0], self._count)
            if name in ("__getitem__", "__setitem__"):
                args = tuple(self._places(value) if place == 1 else value for place, value in enumerate(args))
        return func(*args, **kwargs)

    def rows_picked_by(self, mask: Tensor, as_tuple: bool) -> Any:
        if self._has_one_per_expert(mask):
            return self.hit(mask, self._count)
        rows = self._rows(mask)
        return rows if as_tuple else torch.stack(rows, -1)

    def hit(self, mask: Tensor, count: int) -> _ExpertNumbers:
        """Return all experts for a mask of those that have tokens."""
        self._hits.require_hits(mask, count)
        return _ExpertNumbers(count)

    def _counts_tokens(self, tensor: Tensor) -> bool:
        return self._has_one_per_expert(tensor) and not tensor.is_floating_point()

    def _has_one_per_expert(self, tensor: Tensor) -> bool:
        """Test for one element per expert. A number of tokens is symbolic, and comparing it would add a guard."""
        size = tensor.shape[0] if tensor.dim() == 1 else None
        return isinstance(size, int) and size == self._count

    def _rows(self, mask: Tensor) -> tuple[Tensor, ...]:
        rows = tuple(markers().picked(mask, dim) for dim in range(mask.dim()))
        for row in rows:
            self._hits.forget(row)
        return rows

    def _places(self, index: Any) -> Any:
        """Return an index without masks: each becomes the positions that it picks."""
        parts = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
        if not any(_is_mask(part) for part in parts):
            return cast("Any", index)
        return tuple(place for part in parts for place in (self._rows(part) if _is_mask(part) else (part,)))


class _EveryNumber(_NoData):
    """For code that holds its experts in stacked tensors: a mask of a fixed length is one of experts.

    The last `unused` places of such a mask are not experts.
    """

    def __init__(self, count: int, unused: int) -> None:
        super().__init__(count)
        self._unused = unused

    def rows_picked_by(self, mask: Tensor, as_tuple: bool) -> Any:
        sizes: list[object] = list(mask.shape)
        if len(sizes) == 1 and isinstance(sizes[0], int):
            return self.hit(mask, sizes[0] - self._unused)
        return super().rows_picked_by(mask, as_tuple)


def _is_mask(part: object) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) and part.dim() > 0


@contextmanager
def all_experts_routed(experts: nn.ModuleList) -> Generator[None]:
    """Run a loop over `experts` without data inside the context; each expert is one marker."""
    children = list(experts)
    with replaced_forwards([(child, _marker(number)) for number, child in enumerate(children)]), _NoData(len(children)):
        yield


@contextmanager
def every_expert(count: int, unused: int) -> Generator[None]:
    """Run a loop over stacked tensors of `count` experts without data inside the context, once for every expert."""
    with _EveryNumber(count, unused):
        yield


def _marker(number: int) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        return markers().expert(hidden_states, number)

    return forward

"""The only data that a loop over experts may read: which experts have tokens, and how many.

Input: every tensor operation of a run on meta, in order, and a tensor that Python code reads. Output: whether this
tensor states, for any choice of experts, exactly that an expert has tokens. The operations between the choice and the
tensor are repeated on small samples of choices, and their result is compared. Reading anything else is refused
(`DependsOnData`), since a run on meta sees one side of such a branch only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from ktc.model.experts.private_api import pytree
from ktc.model.graph.typed import traced_size
from ktc.stages.capture.private_api import base_of

_T = TypeVar("_T")
_CHOOSE = frozenset({"topk", "sort", "argsort", "argmax", "max", "multinomial", "kthvalue"})
# A sample has fewer tokens than a limit that authors write, so it shows no larger number in these.
_ARITHMETIC = frozenset({
    "gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal", "add", "sub", "subtract", "rsub", "radd",
    "mul", "div", "truediv", "floordiv", "floor_divide", "mod", "remainder", "clamp", "clip", "clamp_min", "clamp_max",
})  # fmt: skip
_IN_PLACE = frozenset({"add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor"})
# The values of unknown tensors, such as scores: an answer must not depend on them.
_LEVELS = (0.5, 1e-30, 1e30)


class DependsOnData(Exception):
    """Code reads more from data than which experts have tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class _Value:
    """A tensor of the run: an operation on other values, or `choice`, or something unknown (neither)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    call: tuple[Callable[..., Any], Any, Any] | None = None
    place: int = 0  # among the results of the call
    choice: bool = False
    changes: bool = False  # the call changes its first argument, which is the value


@dataclass(slots=True)
class Hits:
    """The operations of one run. `record` is called after each of them."""

    _values: dict[int, _Value] = field(default_factory=dict[int, _Value])
    _held: list[object] = field(default_factory=list[object])  # an id is unique only as long as its tensor lives

    def record(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> None:
        """Record that `func` returned `result`."""
        name = _name(func)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and _changes_its_first(name):
            call = (func, *pytree.tree_map(self._value_of, (tuple(args), dict(kwargs))))
            # What a view changes is changed in its base too, under another name.
            base = base_of(first)
            known = None if base is not None else call
            self._set(first, _Value(_sizes(first), first.dtype, known, changes=True))
            if base is not None:
                self._set(base, _Value(_sizes(base), base.dtype))
            return
        produced = [(i, leaf) for i, leaf in enumerate(pytree.tree_leaves(result)) if isinstance(leaf, Tensor)]
        if not produced:
            return
        call = (func, *pytree.tree_map(self._value_of, (tuple(args), dict(kwargs))))
        chooses = name in _CHOOSE and first is not None and first.is_floating_point()
        for place, tensor in produced:
            if chooses:
                self._set(tensor, _Value(_sizes(tensor), tensor.dtype, choice=not tensor.is_floating_point()))
            else:
                self._set(tensor, _Value(_sizes(tensor), tensor.dtype, call, place))

    def forget(self, tensor: Tensor) -> None:
        """Take `tensor` as unknown."""
        self._set(tensor, _Value(_sizes(tensor), torch.float32))

    def says_whether_hit(self, tensor: Tensor, count: int) -> bool:
        """Return what a branch on `tensor` does where every one of `count` experts has tokens.

        Raises DependsOnData unless the tensor says of one expert whether it has any.
        """
        value, choice = self._question(tensor)

        def answer() -> bool | None:
            for number in sorted(_numbers(value) & set(range(count))):
                answers = {_agrees(value, choice, *sample, number) for sample in _samples(choice.shape, count, number)}
                if len(answers) == 1:
                    return answers.pop()
            return None

        hit = _apart(answer)
        if hit is None:
            raise DependsOnData("it reads something else than whether an expert has tokens")
        return hit

    def require_hits(self, tensor: Tensor, count: int) -> None:
        """Require that the places of `tensor` that are not zero are the experts with tokens. Raises DependsOnData."""
        self._require(tensor, count, lambda read, counts: torch.equal(read[:count] != 0, counts > 0))

    def require_counts(self, tensor: Tensor, count: int) -> None:
        """Require that `tensor` has the number of tokens of each expert. Raises DependsOnData."""
        self._require(tensor, count, lambda read, counts: torch.equal(read[:count], counts.to(read.dtype)))

    def require_chosen(self, tensor: Tensor, count: int) -> None:
        """Require that `tensor` has the numbers of the experts with tokens and no other. Raises DependsOnData."""
        self._require(tensor, count, _lists)

    def _require(self, tensor: Tensor, count: int, holds: Callable[[Tensor, Tensor], bool]) -> None:
        value, choice = self._question(tensor)

        def answer() -> bool:
            return all(
                holds(_computed(value, choice, sample, level), torch.bincount(sample.flatten(), minlength=count))
                for sample, level in _samples(choice.shape, count, count // 2)
            )

        if not _apart(answer):
            raise DependsOnData("it reads something else than the experts that have tokens")

    def _question(self, tensor: Tensor) -> tuple[_Value, _Value]:
        value = self._value_of(tensor)
        assert isinstance(value, _Value), "a tensor has a value"
        behind = list(_behind(value))
        choices = [source for source in behind if source.choice]
        if len(choices) != 1:
            raise DependsOnData("it reads data that is not the choice of experts")
        tokens = choices[0].shape[0] if choices[0].shape else 0
        calls = (source.call for source in behind if source.call is not None)
        if any(_plain(func) in _ARITHMETIC and _beyond(tokens, given) for func, *given in calls):
            raise DependsOnData("it compares with a number")
        return value, choices[0]

    def _value_of(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._values:  # an input, or a parameter
            self._set(leaf, _Value(_sizes(leaf), leaf.dtype, choice=leaf.dtype in (torch.long, torch.int)))
        return self._values[id(leaf)]

    def _set(self, tensor: Tensor, value: _Value) -> None:
        self._values[id(tensor)] = value
        self._held.append(tensor)


def _apart(compute: Callable[[], _T]) -> _T:
    """Return `compute()` on tensors with data: modes of torch, such as those of an export, hold in one thread."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(compute).result()


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")


def _changes_its_first(name: str) -> bool:
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name.strip("_")[1:] in _IN_PLACE)
    return name.endswith("_")


def _plain(func: Callable[..., Any]) -> str:
    return _name(func).strip("_")


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    return tuple(traced_size(size) for size in tensor.shape)


def _inputs(value: _Value) -> list[_Value]:
    leaves = [] if value.call is None else pytree.tree_leaves(value.call[1:])
    return [leaf for leaf in leaves if isinstance(leaf, _Value)]


def _behind(value: _Value) -> Iterator[_Value]:
    todo, seen = [value], set[int]()
    while todo:
        value = todo.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            todo += _inputs(value)


def _numbers(value: _Value) -> set[int]:
    """Return the integers that the operations behind a value are given."""
    calls = (source.call for source in _behind(value) if source.call is not None)
    return {leaf for call in calls for leaf in pytree.tree_leaves(call[1:]) if type(leaf) is int}


def _beyond(tokens: int, given: object) -> bool:
    return any(isinstance(leaf, int | float) and abs(leaf) >= tokens for leaf in pytree.tree_leaves(given))


def _lists(read: Tensor, counts: Tensor) -> bool:
    numbers = torch.zeros_like(counts).index_fill(0, read.flatten().long(), 1)
    return torch.equal(numbers, (counts > 0).long())


def _agrees(value: _Value, choice: _Value, sample: Tensor, level: float, number: int) -> bool:
    """Return whether a value is true where the expert has tokens, or false where it has none."""
    return bool(_computed(value, choice, sample, level).any()) == bool((sample == number).any())


def _samples(shape: tuple[int, ...], count: int, number: int) -> Iterator[tuple[Tensor, float]]:
    """Yield choices with and without the expert `number`, each with a value of all scores.

    A token chooses an expert once.
    """
    generator = torch.Generator().manual_seed(count)
    columns = shape[-1] if len(shape) > 1 else 1

    def rows(numbers: Sequence[int]) -> Tensor:
        tokens = math.prod(shape) // columns
        order = torch.rand(tokens, len(numbers), generator=generator).argsort(-1)
        return torch.tensor(numbers)[order[:, :columns]].view(shape)

    anything = rows(range(count))
    always = anything.clone().view(-1, columns)
    always[(always != number).all(-1), 0] = number
    samples = [anything, always.view(shape)]
    if columns < count:
        others = [expert for expert in range(count) if expert != number]
        samples += [rows(others), rows(others[:columns])]
        for place in (0, -1):
            once = rows(others).view(-1, columns)
            once[place, place] = number
            samples.append(once.view(shape))
    yield from product(samples, _LEVELS)


def _computed(value: _Value, choice: _Value, sample: Tensor, level: float) -> Tensor:
    """Return a value where the experts are chosen as in `sample` and every score is `level`."""
    known: dict[int, Any] = {id(choice): sample}
    todo = [value]
    try:
        while todo:
            current = todo[-1]
            if missing := [i for i in _inputs(current) if id(i) not in known]:
                todo += missing
                continue
            todo.pop()
            if id(current) not in known:
                known[id(current)] = _repeated(current, known, level)
    except Exception as error:  # an operation that runs on meta alone raises anything
        raise DependsOnData(f"it reads what cannot be repeated: {type(error).__name__}") from error
    return known[id(value)]


def _repeated(value: _Value, known: Mapping[int, Any], level: float) -> Tensor:
    if value.call is None:
        return torch.full(value.shape, level).to(value.dtype)

    def given(leaf: object) -> object:
        if isinstance(leaf, _Value):
            return known[id(leaf)].clone() if value.changes else known[id(leaf)]
        if isinstance(leaf, torch.SymInt):
            return traced_size(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    func, args, kwargs = value.call
    args, kwargs = pytree.tree_map(given, (args, kwargs))
    if _name(func) == "bincount":
        kwargs["minlength"] = max(value.shape)
    result = func(*args, **kwargs)
    if value.changes:
        return args[0]
    return pytree.tree_leaves(result)[value.place]

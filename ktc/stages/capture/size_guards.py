"""Branches on the size of a call: the conditions under which an exported graph holds.

Export runs a block at one size. Where its code compares a size, export records the result as a guard over symbols.
Input: an exported program. Output: the first guard that other sizes violate, "" if the graph holds for all. Sizes of 1
are outside: export takes every dynamic size to be larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram

_SIZES = (2, 3, 4, 8, 100, 1_000_003)
_LARGEST_FACTOR = 64  # of a number of tokens: the sequences of a batch, or their length


def violated_guard(program: ExportedProgram, step: int = 1) -> str:
    """Return a guard of `program` that does not hold for every size, as text.

    Sizes are multiples of `step`, from two on.
    """
    for guard in _guards(program):
        symbols: list[Any] = sorted(guard.free_symbols, key=str)
        numbers = [int(atom) for atom in guard.atoms() if atom.is_Integer and atom > 1]
        near = (number // step + more for number in numbers for more in (-1, 0, 1))
        sizes = sorted({size * step for size in (*_SIZES, *near) if size > 1})
        for values in (*product(sizes, repeat=len(symbols)), *_products(numbers, len(symbols), step)):
            if guard.subs(dict(zip(symbols, values, strict=True))) == False:  # noqa: E712 - a sympy truth value
                return str(guard)
    return ""


def _products(numbers: Iterable[int], symbols: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of sizes whose product is one of `numbers`, or one divided by another: a number of tokens.

    One sequence is a pair too: the number itself may be prime.
    """
    if symbols != 2:
        return
    quotients = {number // other for number in numbers for other in (1, *numbers) if number % other == 0}
    for number in sorted(quotients - {1}):
        for one in range(1, min(number, _LARGEST_FACTOR) + 1):
            if number % one == 0:
                yield from ((one * step, number // one * step), (number // one * step, one * step))


def _guards(program: ExportedProgram) -> Iterator[Any]:
    """Yield the guards as sympy expressions over the sizes of the program's inputs."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else ()
        symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
        if symbolic is not None:
            guards = cast("list[Any]", symbolic.node.shape_env.guards)
            yield from (guard.expr for guard in guards)
            return

"""The comparison of stock with another model on one case: each side's values by name, their errors, and the verdict.

In: two sides, and a function that computes a case on one of them. Out: a frozen `Comparison`. Foreign code raises
anything: an error of stock ends the case, and an error of the other side alone is a difference. Errors in fp32 above
the limit are decided in fp64, since rounding may explain them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from ktc.model.compare.double import InDouble
from ktc.model.compare.errors import TOLERANCE, relative_error
from ktc.model.hf.foreign_errors import first_line

S = TypeVar("S")
Values = Mapping[str, Tensor | None]
Floors = Callable[[Values], Callable[[str], float]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The relative Frobenius error of each value by name, or why there is none.

    `refused` is the error of stock itself, `raised` that of the other side alone, in one line. `alone` names values
    that one side alone has: a missing value counts as zero.
    """

    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    alone: tuple[str, ...] = ()
    refused: str = ""
    raised: str = ""
    limit: float = TOLERANCE

    @property
    def worst(self) -> float:
        """The largest error; infinity where the other side raises."""
        return float("inf") if self.raised else max(self.errors.values(), default=0.0)

    @property
    def differing(self) -> str:
        """The first value with an error beyond the limit, "" without one."""
        return next((name for name, error in self.errors.items() if not error <= self.limit), "")

    @property
    def open(self) -> bool:
        """Whether both sides computed the case and a value differs: rounding may be the cause."""
        return not self.refused and not self.raised and bool(self.differing)


def compare(
    stock: Callable[[], Values], other: Callable[[], Values], floors: Floors = lambda _: lambda _: 0.0
) -> Comparison:
    """Return the errors of the other side's values against those of stock.

    `floors` takes stock's values and returns the least norm, by name, that errors are relative to.
    """
    try:
        expected = stock()
    except Exception as error:  # noqa: BLE001 - foreign code
        return Comparison(refused=in_a_line(error))
    try:
        actual = other()
        least = floors(expected)
        names = dict.fromkeys((*expected, *actual))
        errors = {name: relative_error(actual.get(name), expected.get(name), least(name)) for name in names}
    except Exception as error:  # noqa: BLE001 - foreign code, and tensors without data
        return Comparison(raised=in_a_line(error))
    return Comparison(errors, tuple(name for name in names if name not in expected or name not in actual))


def decided(single: Comparison, case: Callable[[S, S], Comparison], in_double: Callable[[], tuple[S, S]]) -> Comparison:
    """Return the comparison in fp32, `single`, or in fp64 where rounding may explain its errors.

    `case` compares two sides, `in_double` returns them in fp64. Stock code that does not run in fp64 decides nothing.
    """
    if not single.open:
        return single
    try:
        wide = in_double()
    except Exception as error:  # noqa: BLE001 - foreign code
        return Comparison(raised=in_a_line(error))
    with InDouble():
        double = case(*wide)
    return single if double.refused else double


def in_a_line(error: BaseException) -> str:
    """Return an exception as its type and the first line of its message, at most 200 characters."""
    return f"{type(error).__name__}: {first_line(error)}"

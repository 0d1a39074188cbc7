"""The results of a proof: errors at every site, the inputs that were tried, the constants that were met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ktc.model.compare.errors import TOLERANCE

_GUARD = 1e-5  # what authors add to a denominator, or clamp it to, is smaller
_UNLIMITED = 1e30  # infinity, or the largest number of bf16 and fp32


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant with which the stock code compares values, and how many values were on each side of it.

    `replaced`: the code is not part of the rewritten block, so that only values on both sides show what it does.
    """

    operator: str  # clamp_min, gt, ...
    value: float
    below: int
    above: int
    replaced: bool = False

    @property
    def met(self) -> bool:
        """Whether values on both sides were tried."""
        return self.below > 0 and self.above > 0

    @property
    def unproven(self) -> bool:
        """Whether the rewrite may differ beyond this constant.

        Excluded are guards against a division by zero, and limits beyond all numbers, and
        zero with no value below it: those are of sums of weights, of squares and of counts.
        """
        size = abs(self.value)
        harmless = 0 < size < _GUARD or size >= _UNLIMITED or (self.value == 0 and self.below == 0)
        return self.replaced and not self.met and not harmless


@dataclass(frozen=True, slots=True)
class Proof:
    """One distinct rewrite against the stock modules, at each of its sites. Errors are relative Frobenius norms.

    `forward` is the worst of everything that the block returns or keeps, `gradients` the worst of each gradient, over
    all sites and `cases`. `difference` says in words where the two differ, "" where they do not; it is also set for a
    rewrite that cannot be compared.
    """

    rewrite: str
    block: str  # the key of the captured block
    class_name: str
    rules: tuple[str, ...]
    sites: tuple[str, ...]
    forward: float
    gradients: Mapping[str, float]
    cases: tuple[str, ...]
    constants: tuple[Constant, ...]
    seed: int
    tolerance: float = TOLERANCE
    difference: str = ""
    compared: bool = field(default=True)  # False where the twin has no such block, or the rewrite does not run there

    @property
    def worst_gradient(self) -> float:
        """The largest error of all gradients."""
        return max(self.gradients.values(), default=0.0)

    @property
    def holds(self) -> bool:
        """Whether every error is a number within the tolerance: NaN does not hold."""
        within = all(error <= self.tolerance for error in (self.forward, *self.gradients.values()))
        return self.compared and within and not self.difference

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the verdict as `holds`."""
        return {
            "rewrite": self.rewrite, "block": self.class_name, "rules": list(self.rules), "sites": list(self.sites),
            "forward": self.forward, "gradients": dict(self.gradients), "cases": list(self.cases),
            "constants": [
                {"operator": c.operator, "value": c.value, "below": c.below, "above": c.above, "replaced": c.replaced}
                for c in self.constants
            ],
            "seed": self.seed, "tolerance": self.tolerance, "holds": self.holds, "difference": self.difference,
        }  # fmt: skip

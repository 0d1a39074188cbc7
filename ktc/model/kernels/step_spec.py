"""`StepSpec`: the operations of a decoding step beside its products and its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ktc.foundation.isa import Isa


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One kernel, for operations of any sizes. `dtype` is that of its sums; it reads and writes any."""

    op: Literal["step"]
    dtype: Literal["fp32"]
    isa: Isa

    @property
    def entry(self) -> str:
        """The name under which the kernel library exposes it."""
        return f"Step_{self.isa}"

    @property
    def summary(self) -> tuple[str, ...]:
        """Describe the computation and the weight format, for a table of kernels."""
        return "step (decode)", "any", "any", "", "", "any"

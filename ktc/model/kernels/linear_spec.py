"""`LinearSpec` and `PackedLinearSpec`: kernels for linear layers, everything their templates may ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ktc.foundation.formats import WeightFormat
from ktc.foundation.isa import INSTRUCTION_SETS, PREFERENCE, Isa

ISAS: Final = tuple(isa for isa in PREFERENCE if INSTRUCTION_SETS[isa].linear)
Dtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One kernel, for layers of any size. `dtype` is that of weights, inputs and outputs; sums are fp32."""

    op: Literal["linear"]
    dtype: Dtype
    isa: Isa

    @property
    def entry(self) -> str:
        """The name under which the kernel library exposes it."""
        return f"Linear_{self.dtype}_{self.isa}"

    @property
    def summary(self) -> tuple[str, ...]:
        """Describe the computation and the weight format, for a table of kernels."""
        return f"{self.op} (decode)", "any", "any", "", "", self.dtype


@dataclass(frozen=True, slots=True)
class PackedLinearSpec:
    """One kernel, for layers of any size whose weights are blocks of a GGUF file, multiplied as they are stored.

    `dtype` is that of inputs and outputs; sums are fp32.
    """

    op: Literal["packed_linear"]
    dtype: Literal["bf16"]
    weight_format: WeightFormat
    isa: Isa

    @property
    def entry(self) -> str:
        """The name under which the kernel library exposes it."""
        return f"PackedLinear_{self.weight_format}_{self.isa}"

    @property
    def summary(self) -> tuple[str, ...]:
        """Describe the computation and the weight format, for a table of kernels."""
        return "linear (as stored)", "any", "any", "", "", self.weight_format

"""`FusedMoeSpec`: exactly the values that a kernel template uses, hashable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ktc.foundation.formats import CODES, FORMATS, WeightFormat
from ktc.foundation.isa import INSTRUCTION_SETS, PREFERENCE, Dtype, Isa
from ktc.model.kernels.form import Activation

SILU = Activation()
# Which weight formats each instruction set multiplies, the best one first.
KERNELS: Mapping[Isa, tuple[WeightFormat, ...]] = {
    isa: tuple(name for name, row in FORMATS.items() if row.dtype in INSTRUCTION_SETS[isa].dtypes) for isa in PREFERENCE
}


@dataclass(frozen=True, slots=True)
class FusedMoeSpec:
    """One fused-MoE kernel. A dimension is a compile-time constant, or `None` where it stays dynamic.

    `dtype` is that of hidden states and output, `format_gate_up` and `format_down` those of the packed weights. The
    stock model's layout does not matter to a kernel, which packs gate, up and down one by one.
    """

    op: Literal["fused_moe"]
    hidden: int | None  # H
    intermediate: int | None  # I
    num_experts: int | None  # E
    top_k: int | None  # k
    dtype: Dtype
    format_gate_up: WeightFormat
    format_down: WeightFormat
    isa: Isa
    activation: Activation = SILU
    gated: bool = True
    biased: bool = False
    max_lora_rank: int = 0
    group_size: int = 0  # of codes: how many weights of a row share a scale

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """Return the weight formats: one, or that of gate and up and that of down."""
        return tuple(dict.fromkeys((self.format_gate_up, self.format_down)))

    def format_of(self, part: str) -> WeightFormat:
        """Return the weight format of gate, up or down."""
        return self.format_down if part.startswith("down") else self.format_gate_up

    @property
    def integer_products(self) -> bool:
        """Whether forward multiplies integers, in both products."""
        return FORMATS[self.format_down].integer_products

    def group_of(self, weight_format: WeightFormat) -> int:
        """Return how many weights of a row share a scale in one of the spec's formats: 0 for all, or without scales.

        `group_size` applies to the format with several sizes.
        """
        sizes = CODES[weight_format].group_sizes if weight_format in CODES else (0,)
        return self.group_size if self.group_size in sizes else sizes[0]

    @property
    def entry(self) -> str:
        """The class name under which the kernel library exposes this specialisation."""
        dims = "_".join(
            f"{letter}{'n' if size is None else size}"
            for letter, size in zip("HIEk", (self.hidden, self.intermediate, self.num_experts, self.top_k), strict=True)
        )
        formats = "_".join(self.formats)
        formats += f"g{self.group_size}" if self.group_size else ""
        return f"FusedMoe_{dims}_{self.dtype}_{formats}_{self.isa}_{_identifier(self)}"

    @property
    def summary(self) -> tuple[str, ...]:
        """Describe the computation, its sizes H, I, E and k, and the weight formats, for a table of kernels."""
        constants = (self.hidden, self.intermediate, self.num_experts, self.top_k)
        sizes = ("any" if size is None else str(size) for size in constants)
        return f"{self.op} ({self.activation})", *sizes, ", ".join(self.formats)


# What an identifier cannot hold: 1.702 is 1p702 there, -2.0 is m2p0.
_SPELLED = str.maketrans({".": "p", "-": "m", "+": ""})


def _identifier(spec: FusedMoeSpec) -> str:
    """Return the form as a part of an identifier: `silu`, `silu_alpha1p702_limit7p0_up1p0_biased`."""
    act = spec.activation
    settings = (("alpha", act.alpha, 1.0), ("limit", act.limit or 0.0, 0.0), ("up", act.up_offset, 0.0))
    settings += (("gate_cap", act.gate_cap or 0.0, 0.0), ("up_cap", act.up_cap or 0.0, 0.0))
    changed = (f"{name}{float(value)!r}".translate(_SPELLED) for name, value, default in settings if value != default)
    flags = (name for name, on in (("ungated", not spec.gated), ("biased", spec.biased)) if on)
    return "_".join((act.function, *changed, *flags))

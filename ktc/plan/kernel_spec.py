"""`KernelSpec`: everything a kernel template may ask, hashable, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ktc.experts.form import Activation
from ktc.isa import Isa

WeightFormat = Literal[
    "bf16", "fp16", "fp32", "fp64", "int8", "int4", "fp8", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "mxfp4"
]
SILU = Activation()
BITS_PER_WEIGHT: Mapping[WeightFormat, int] = {"bf16": 16, "fp32": 32, "fp64": 64}


@dataclass(frozen=True, slots=True)
class Codes:
    """A format of codes that kernels multiply. `group_sizes`: how many weights of an output share a scale along
    the contraction; the first is what a program gets that quantises. `even`: rows must be whole groups. `unit`: rows
    are padded to a multiple of it."""

    bits: int
    scale_bytes: int
    group_sizes: tuple[int, ...]
    even: bool
    unit: int = 32


# A group of 0 is a whole row. FP8 checkpoints have one scale for 128 rows as well: it is repeated for each of them.
CODES: Mapping[WeightFormat, Codes] = {
    "int4": Codes(4, 2, (32, 64, 128), even=True),
    "int8": Codes(8, 8, (0,), even=False, unit=64),  # products in integers: beside a scale there is an offset
    "fp8": Codes(8, 4, (128,), even=False),
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A format of blocks as GGUF files have them, `stored_bytes` for `weights` of a row; kernels keep the bits of
    `span` blocks together. `quantises`: whether weights that are stored otherwise can be made into it."""

    weights: int
    stored_bytes: int
    span: int = 1
    quantises: bool = True


BLOCKS: Mapping[WeightFormat, Blocks] = {
    "fp16": Blocks(1, 2),
    "q8_0": Blocks(32, 34),
    "q4_0": Blocks(32, 18),
    "mxfp4": Blocks(32, 17, span=2),
    "q4_k": Blocks(256, 144, quantises=False),
    "q5_k": Blocks(256, 176, quantises=False),
    "q6_k": Blocks(256, 210, quantises=False),
}
# Which weight formats each instruction set multiplies: what runtime/include/ktc can instantiate in this version.
IN_BF16: tuple[WeightFormat, ...] = ("bf16", *CODES, *BLOCKS)
KERNELS: Mapping[Isa, tuple[WeightFormat, ...]] = {
    "amx": IN_BF16,
    "avx512_bf16": IN_BF16,
    "avx512": IN_BF16,
    "avx2": IN_BF16,
    "scalar": (*IN_BF16, "fp32", "fp64"),
}


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One fused-MoE kernel. A dimension is a compile-time constant, or `None` where it stays dynamic.

    `dtype` is that of hidden states and output, `format_gate_up` and `format_down` those of the packed weights. How the
    stock model stores them is no business of a kernel, which packs gate, up and down one by one.
    """

    op: Literal["fused_moe"]
    hidden: int | None  # H
    intermediate: int | None  # I
    num_experts: int | None  # E
    top_k: int | None  # k
    dtype: Literal["bf16", "fp32", "fp64"]
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
        """What weights are stored in: one format, or that of gate and up and that of down."""
        return tuple(dict.fromkeys((self.format_gate_up, self.format_down)))

    def format_of(self, part: str) -> WeightFormat:
        """What gate, up or down is stored in."""
        return self.format_down if part.startswith("down") else self.format_gate_up

    def group_of(self, weight_format: WeightFormat) -> int:
        """How many weights of a row share a scale in one of the spec's formats: 0 where all do, or there is none.

        `group_size` speaks of the format that leaves a choice.
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


# What an identifier cannot hold: 1.702 is 1p702 there, -2.0 is m2p0.
_SPELLED = str.maketrans({".": "p", "-": "m", "+": ""})


def _identifier(spec: KernelSpec) -> str:
    """The form as a part of an identifier: `silu`, `silu_alpha1p702_limit7p0_up1p0_biased`."""
    act = spec.activation
    settings = (("alpha", act.alpha, 1.0), ("limit", act.limit or 0.0, 0.0), ("up", act.up_offset, 0.0))
    changed = (f"{name}{float(value)!r}".translate(_SPELLED) for name, value, default in settings if value != default)
    flags = (name for name, on in (("ungated", not spec.gated), ("biased", spec.biased)) if on)
    return "_".join((act.function, *changed, *flags))

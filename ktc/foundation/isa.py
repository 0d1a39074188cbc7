"""The instruction sets that kernels are written for, one row each.

Host detection, the rule language, plan, codegen and bench read these rows. The kernels of an instruction set are in
`runtime/include/ktc/isa/NAME.hpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Isa = Literal["scalar", "avx2", "avx512", "avx512_bf16", "amx"]
Dtype = Literal["bf16", "fp32", "fp64"]  # of hidden states and outputs


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One instruction set.

    `cpu` names the CPU flags it needs, as Linux reports them, and `compiler` the flags of its translation units.
    `dtypes` are what its kernels compute in; with more than one, the C++ type is a template over the element.
    """

    name: Isa
    cpu: frozenset[str]
    compiler: tuple[str, ...]
    dtypes: tuple[Dtype, ...] = ("bf16",)
    bf16_products: bool = False  # multiplies bf16 without widening it
    words: bool = False  # multiplies codes of integers as 16-bit words, with rows in 16-bit fixed point
    tiles: bool = False  # blocked products in tile registers, which the operating system must grant
    linear: bool = True  # has a kernel for linear layers of few rows

    def cxx_type(self, element: str) -> str:
        """Return the C++ type that kernels on `element` are instantiated with."""
        name = f"ktc::{self.name}::Isa"
        return f"{name}<{element}>" if len(self.dtypes) > 1 else name


_AVX512_CPU: Final = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
_AVX512: Final = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
# Every CPU with bf16 products has VNNI, for products of integers, and AMX likewise; a virtual machine may hide one.
_BF16_CPU: Final = _AVX512_CPU | {"avx512_bf16", "avx512_vnni"}
_BF16: Final = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_AMX_CPU: Final = _BF16_CPU | {"amx_tile", "amx_bf16", "amx_int8"}
_AMX: Final = (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8")

# The slowest first; each implies those before it.
_ROWS: Final = (
    InstructionSet("scalar", frozenset(), (), dtypes=("bf16", "fp32", "fp64")),
    InstructionSet("avx2", frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c"), words=True),
    InstructionSet("avx512", _AVX512_CPU, _AVX512, words=True),
    InstructionSet("avx512_bf16", _BF16_CPU, _BF16, bf16_products=True),
    InstructionSet("amx", _AMX_CPU, _AMX, bf16_products=True, tiles=True, linear=False),
)
INSTRUCTION_SETS: Final[Mapping[Isa, InstructionSet]] = {row.name: row for row in _ROWS}
PREFERENCE: Final[tuple[Isa, ...]] = tuple(reversed(INSTRUCTION_SETS))
"""The best one first."""


def isa_of(value: object) -> Isa | None:
    """Return the instruction set of that name, `None` for an unknown one."""
    return next((isa for isa in PREFERENCE if isa == value), None)

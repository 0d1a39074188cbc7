"""How a target says what its settings may be: annotations of its fields, and the types that several targets share.

A field annotated with `EnumName` takes words of the rule language. Where its type is a `Literal`, that lists the words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ktc.foundation.environment import MOST_THREADS

Value = int | float | bool | str | None | tuple["Value", ...]
Facet = Literal["kernel", "adapter", "quant", "place"]


@dataclass(frozen=True, slots=True)
class EnumName:
    """The name of an enum of the rule language."""

    name: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest and the largest number that a setting takes."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class NoConfig:
    """The config of a module that follows from the stock module alone."""


Rank = Annotated[int, Bounds(1, 1024)]
Alpha = Annotated[float, Bounds(0, 2**20)]
Dropout = Annotated[float, Bounds(0, 1)]
Threads = Annotated[int, Bounds(1, MOST_THREADS)]
Count = Annotated[int, Bounds(0, 2**24)]
Positive = Annotated[int, Bounds(1, 2**20)]
PositiveInt = Annotated[int, Bounds(1, 2**62)]  # of a config
NaturalInt = Annotated[int, Bounds(0, 2**62)]

# Their words are those of the whole language (`ktc/language/dsl/schema.py`).
Format = Annotated[str, EnumName("format")]
Isa = Annotated[str, EnumName("isa")]
Dtype = Annotated[str, EnumName("dtype")]
Device = Annotated[str, EnumName("device")]
Phase = Annotated[str, EnumName("phase")]

# `flash_decode` computes few new tokens without gradients, `sdpa` all other calls; `auto` is the first where it runs.
AttentionKernel = Annotated[Literal["sdpa", "flash_decode", "auto"], EnumName("attn")]
FLASH_DECODE, AUTO = "flash_decode", "auto"
# The numbers that a cache of keys and values holds: the model's dtype, or codes that `flash_decode` reads.
KvFormat = Annotated[Literal["auto", "int8"], EnumName("kv_format")]
INT8 = "int8"

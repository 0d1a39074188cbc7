"""The kernels of a linear layer by the words of a rule, and the configs of the modules that run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from ktc.model.targets.config import PositiveInt
from ktc.model.targets.settings import EnumName

LinearKernel = Annotated[Literal["torch", "gemv"], EnumName("kernel")]
ManyRowsKernel = Annotated[Literal["torch", "packed", "auto"], EnumName("many_rows")]

STORED_LINEAR: Final = "stored_linear"  # the module of a layer whose weight stays in blocks


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """The kernels of few and of many rows. `grid` is an `Int4Grid` as text, None for weights that are not rounded."""

    threads: PositiveInt
    decode_kernel: LinearKernel
    prefill_kernel: ManyRowsKernel
    grid: str | None


@dataclass(frozen=True, slots=True)
class StoredLinearConfig:
    """The threads of the kernel, and the format of the blocks."""

    threads: PositiveInt
    format: str

"""`AttentionSpec`: kernels for attention of few new tokens over a cache, everything that their templates read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ktc.foundation.host import Host
from ktc.foundation.isa import INSTRUCTION_SETS, PREFERENCE, Isa
from ktc.model.kernels.linear_spec import ISAS as LINEAR_ISAS
from ktc.model.kernels.linear_spec import Dtype

ISAS: Final[dict[Dtype, tuple[Isa, ...]]] = {
    dtype: tuple(isa for isa in PREFERENCE if isa in LINEAR_ISAS or (dtype == "bf16" and INSTRUCTION_SETS[isa].tiles))
    for dtype in ("bf16", "fp16", "fp32")
}
"""The instruction sets of kernels over a cache of numbers, by their dtype. Tiles multiply bf16."""
_ENTRIES: Final = {
    "attention": "Attention", "int8_attention": "Int8Attention", "sparse_attention": "SparseAttention",
}  # fmt: skip


def attention_isa(dtype: Dtype, host: Host) -> Isa:
    """Return the host's best instruction set for attention over a cache of numbers."""
    return next(isa for isa in ISAS[dtype] if isa in host.isas)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One kernel, for any sizes. `dtype` is that of queries, new keys and outputs; sums are fp32.

    `attention` reads a cache of that dtype, `int8_attention` one of int8 codes. `sparse_attention` keeps an index of
    keys, chooses positions, and attends to these or to all.
    """

    op: Literal["attention", "int8_attention", "sparse_attention"]
    dtype: Dtype
    isa: Isa

    @property
    def entry(self) -> str:
        """The name under which the kernel library exposes it."""
        return f"{_ENTRIES[self.op]}_{self.dtype}_{self.isa}"

    @property
    def summary(self) -> tuple[str, ...]:
        """Describe the computation and the weight format, for a table of kernels."""
        return f"{self.op} (decode)", "any", "any", "", "", self.dtype

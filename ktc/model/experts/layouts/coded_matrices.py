"""Matrices of experts as the kernels of the CPU store them: panels of codes and scales, which a GPU multiplies too.

In: packed bytes of experts, and the panels of a format. Out: where a GPU's kernels find codes and scales in them. One
order of the bits serves both processors, so that bytes are sent and kept without being rewritten.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ktc.model.experts.layouts.panel_codes import PLAIN, PanelCodes, codes_of
from ktc.model.experts.layouts.panels import WIDTH, BlockPanels, DensePanels, GroupPanels, Panels, RowPanels


@functools.cache
def codes_of_panels(panels: Panels) -> PanelCodes | None:
    """Return where codes and scales are in panels; None for those whose codes no GPU multiplies."""
    match panels:
        case GroupPanels():
            return codes_of(panels.row, panels.group)
        case BlockPanels() | RowPanels():
            return codes_of(panels.row)
        case _:
            return None


def addressed_codes(panels: Panels) -> PanelCodes | None:
    """Return the same, and those of plain weights in bf16, for the kernels that read experts by their addresses."""
    is_plain = isinstance(panels, DensePanels) and panels.dtype == torch.bfloat16
    return PLAIN if is_plain else codes_of_panels(panels)


def are_coded(*panels: Panels) -> bool:
    """Return whether a GPU can multiply all of these panels as they are stored."""
    return all(codes_of_panels(stored) is not None for stored in panels)


@dataclass(frozen=True, slots=True)
class CodedMatrices:
    """The matrices (G, parts * rows, columns) of G experts, in their packed bytes (G, bytes of an expert).

    From byte `begin` of an expert on there are `num_panels` of `panels`. Each has 32 outputs: as many of each of the
    `parts` (gate and up), one part behind the other. `interleaved` are the parts of the decoded matrices.
    """

    packed: Tensor
    panels: Panels
    begin: int
    num_panels: int
    rows: int
    columns: int
    parts: int = 1
    interleaved: bool = False

    @property
    def codes(self) -> PanelCodes:
        """The codes of a panel."""
        codes = codes_of_panels(self.panels)
        assert codes is not None, "panels whose codes a GPU multiplies"
        return codes

    @property
    def panel_bytes(self) -> int:
        """The bytes of a panel, whose columns are filled up to blocks of 32."""
        return self.panels.nbytes(-(-self.columns // WIDTH) * WIDTH)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the decoded matrices."""
        return len(self.packed), self.parts * self.rows, self.columns

    def __getitem__(self, experts: slice) -> CodedMatrices:
        """Return views of some experts."""
        return replace(self, packed=self.packed[experts])

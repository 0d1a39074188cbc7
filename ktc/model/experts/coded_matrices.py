"""Matrices of experts as the kernels of the CPU store them: panels of codes and scales, which a GPU multiplies too.

In: packed bytes of experts, and the panels of a format. Out: where a GPU's kernels find codes and scales in them. One
order of the bits serves both processors, so that bytes are sent and kept without being rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ktc.model.experts.panel_codes import PanelCodes, codes_of
from ktc.model.experts.panels import WIDTH, BlockPanels, GroupPanels, Panels


def is_coded(panels: Panels) -> bool:
    """Return whether a GPU multiplies the codes of panels."""
    group = panels.group if isinstance(panels, GroupPanels) else 0
    return isinstance(panels, GroupPanels | BlockPanels) and codes_of(panels.row, group) is not None


@dataclass(frozen=True, slots=True)
class CodedMatrices:
    """The matrices (G, parts * rows, columns) of G experts, in their packed bytes (G, bytes of an expert).

    From byte `first` of an expert on there are its `panels`. Each has 32 outputs: as many of each of the `parts` (gate
    and up), one part behind the other. `interleaved` are the parts of the decoded matrices.
    """

    packed: Tensor
    stored: Panels
    first: int
    panels: int
    rows: int
    columns: int
    parts: int = 1
    interleaved: bool = False

    @property
    def codes(self) -> PanelCodes:
        """The codes of a panel."""
        assert isinstance(self.stored, GroupPanels | BlockPanels), "panels whose codes a GPU multiplies"
        group = self.stored.group if isinstance(self.stored, GroupPanels) else 0
        codes = codes_of(self.stored.row, group)
        assert codes is not None, "panels whose codes a GPU multiplies"
        return codes

    @property
    def panel_bytes(self) -> int:
        """The bytes of a panel, whose columns are filled up to blocks of 32."""
        return self.stored.nbytes(-(-self.columns // WIDTH) * WIDTH)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the decoded matrices."""
        return len(self.packed), self.parts * self.rows, self.columns

    def __getitem__(self, experts: slice) -> CodedMatrices:
        """Return views of some experts."""
        return replace(self, packed=self.packed[experts])

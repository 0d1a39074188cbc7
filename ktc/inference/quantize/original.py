"""The weights that a quantised checkpoint is made of: those of a checkpoint, with a merged adapter added to them.

In: a checkpoint or a compiled model of one, and an adapter. Out: an `Original`: an index of weights in full precision,
and a reader of their rows; stacks of experts are matrices where that is asked for (`expert_matrices`). The weights that
training saw decide what merging an adapter means (`trained_grids`).
Refused: weights that are quantised already (Q501), a merge that rounds them again without a request for it (Q505), and
the refusals of `plan_additions`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ktc.adapters.adapter import Adapter, read_adapter, require_lora
from ktc.adapters.base_model import BaseModel, find_base, read_base
from ktc.adapters.factors import FactorReader
from ktc.adapters.layouts import PlacedAdapter, place
from ktc.adapters.merge import plan_additions
from ktc.adapters.merged_reader import Addition, MergedReader
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.files import file_digest
from ktc.inference.quantize.expert_matrices import ExpertMatrices
from ktc.inference.quantize.trained_grids import rounds_again
from ktc.model.checkpoint.full_precision import FullPrecision
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.checkpoint.index import CheckpointIndex, open_index
from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.checkpoint.reader import RowReader, TensorReader
from ktc.model.hf.stock_model import quantization_config_of


@dataclass(frozen=True, slots=True)
class Original:
    """`index` has an entry for each weight in full precision; `additions` say what an adapter adds to which.

    `stored` is the index of the tensors as they are stored, `config` the `quantization_config` of config.json.
    """

    base: BaseModel
    stored: CheckpointIndex
    index: CheckpointIndex
    config: Mapping[str, Any] | None
    weights: FullPrecision
    matrices: ExpertMatrices | None
    adapter: Adapter | None
    additions: Mapping[str, Addition]

    @property
    def adapter_digest(self) -> str:
        """The sha256 of the adapter's weights, "" without one."""
        return file_digest(self.adapter.weights) if self.adapter else ""

    @contextmanager
    def reader(self, grids: Mapping[str, Int4Grid]) -> Generator[tuple[RowReader, Callable[[], float]]]:
        """Yield a reader of rows, and the sum of squares of what the adapter added to those that were read.

        The tensors in `grids` are rounded to their grid before the adapter is added.
        """
        with ExitStack() as opened:
            rows: RowReader = self.weights.reader(opened.enter_context(TensorReader(self.index.folder)))
            if self.matrices is not None:
                rows = self.matrices.reader(rows)
            if grids:
                rows = _RoundedReader(rows, grids)
            if self.adapter is None:
                yield rows, lambda: 0.0
                return
            factors = opened.enter_context(FactorReader(self.adapter.weights))
            merged = MergedReader(self.additions, factors, rows)
            yield merged, lambda: merged.added


def open_original(model: Path, adapter: Path | None, apart: Callable[[str], bool] | None = None) -> Original:
    """Return the weights of `model`, with `adapter` added.

    Stacks in the modules of experts that `apart` accepts by their FQN are read as matrices. Raises InputRefused (Q501
    for a GGUF file, Q502, A6xx).
    """
    opened = require_lora(read_adapter(adapter)) if adapter else None
    base = find_base(opened, model) if opened else read_base(model)
    index = open_index(base.folder)
    if index.gguf is not None:
        raise InputRefused(_quantised(base, "a GGUF file"))
    config = quantization_config_of(base.config)
    weights = FullPrecision(index, config)
    matrices = ExpertMatrices(base, weights.index, apart) if apart else None
    read = matrices.index if matrices else weights.index
    placed = place(opened, base) if opened else None
    if placed and matrices:
        _require_rows(placed, matrices)
    added = plan_additions(placed, read) if placed else dict[str, Addition]()
    return Original(base, index, read, config, weights, matrices, opened, added)


def _require_rows(placed: PlacedAdapter, matrices: ExpertMatrices) -> None:
    """Raise InputRefused (Q502) for an adapter of stacks that store columns, of which PEFT's factors are too."""
    if turned := sorted(matrices.turned & {one.name for one in placed.placed}):
        message = f"the adapter changes `{turned[0]}`, whose experts are stored by columns, and INT4 has rows"
        hint = "merge it first (`ktc merge`), then `ktc quantize` the result"
        raise InputRefused(Diagnostic("Q502", message, hint=hint))


def require_one_rounding(original: Original, requantise: bool) -> None:
    """Refuse to round the weights of a quantised checkpoint a second time (Q501, Q505)."""
    if original.adapter is None and original.config is not None:
        raise InputRefused(_quantised(original.base, "quantised already"))
    if original.config is not None and not requantise:
        raise InputRefused(rounds_again(f"the quantised weights of `{original.base.name}`"))


def _quantised(base: BaseModel, what: str) -> Diagnostic:
    message = f"`{base.name}` is {what}: its weights would be rounded twice"
    return Diagnostic("Q501", message, hint="quantise the original of full precision")


class _RoundedReader:
    """Reads rows as a `RowReader`, those of tensors in `grids` rounded to their grid, as training had them."""

    def __init__(self, rows: RowReader, grids: Mapping[str, Int4Grid]) -> None:
        self._rows, self._grids = rows, grids

    def read(self, entry: TensorEntry, rows: slice | None = None) -> Tensor:
        """Return the tensor, or the `rows` of its first dimension (no step), in the dtype of `entry`."""
        weights, grid = self._rows.read(entry, rows), self._grids.get(entry.name)
        return weights if grid is None or not weights.numel() else grid.rounded(weights)

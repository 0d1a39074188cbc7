"""The weights that a quantised checkpoint is made of: those of a checkpoint, with a merged adapter added to them.

In: a checkpoint or a compiled model of one, and an adapter. Out: an `Original`: an index of weights in full precision,
and a reader of their rows. What an adapter was trained beside decides what merging it means: with `fake_quant(weights =
merged)` the sum was rounded in training, as a merge rounds it. Beside rounded or quantised weights the adapter was
exact, and a merge that rounds the sum is another function.
Refused: weights that are quantised already (Q501), a merge that rounds them again and was not asked for (Q505), a
scheme that is not the grid of training (Q506), and what `plan_additions` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ktc.adapters.adapter import Adapter, read_adapter
from ktc.adapters.base_model import BaseModel, find_base, read_base
from ktc.adapters.factors import FactorReader
from ktc.adapters.layouts import place
from ktc.adapters.merge import plan_additions
from ktc.adapters.merged_reader import Addition, MergedReader
from ktc.checkpoint.full_precision import FullPrecision
from ktc.checkpoint.header import TensorEntry
from ktc.checkpoint.index import CheckpointIndex, open_index
from ktc.checkpoint.int4 import Int4Grid
from ktc.checkpoint.reader import RowReader, TensorReader
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.files import file_digest
from ktc.model import manifest as compiled
from ktc.quantise.scheme import Scheme


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
    adapter: Adapter | None
    additions: Mapping[str, Addition]

    @property
    def adapter_digest(self) -> str:
        """The sha256 of the adapter's weights, "" without one."""
        return file_digest(self.adapter.weights) if self.adapter else ""

    @contextmanager
    def reader(
        self, grid: Int4Grid | None = None, names: Container[str] = ()
    ) -> Generator[tuple[RowReader, Callable[[], float]]]:
        """Yield a reader of rows, and the sum of squares of what the adapter added to those that were read.

        The tensors `names` are rounded to `grid` before the adapter is added.
        """
        with ExitStack() as opened:
            rows: RowReader = self.weights.reader(opened.enter_context(TensorReader(self.index.folder)))
            if grid is not None:
                rows = _RoundedReader(rows, grid, names)
            if self.adapter is None:
                yield rows, lambda: 0.0
                return
            factors = opened.enter_context(FactorReader(self.adapter.weights))
            merged = MergedReader(self.additions, factors, rows)
            yield merged, lambda: merged.added


def open_original(model: Path, adapter: Path | None) -> Original:
    """Return the weights of `model`, with `adapter` added. Raises InputRefused (Q501 for a GGUF file, A6xx)."""
    opened = read_adapter(adapter) if adapter else None
    base = find_base(opened, model) if opened else read_base(model)
    index = open_index(base.folder)
    if index.gguf is not None:
        raise InputRefused(_quantised(base, "a GGUF file"))
    config = _quantisation(base)
    weights = FullPrecision(index, config)
    added = plan_additions(place(opened, base), weights.index) if opened else dict[str, Addition]()
    return Original(base, index, weights.index, config, weights, opened, added)


def require_one_rounding(original: Original, model: Path, scheme: Scheme, requantise: bool) -> None:
    """Refuse to round weights a second time (Q501, Q505), or to another grid than that of training (Q506).

    `model` is the compiled model or the checkpoint that was named.
    """
    if original.adapter is None and original.config is not None:
        raise InputRefused(_quantised(original.base, "quantised already"))
    if original.adapter is not None and not requantise:
        _require_trained_grid(original.base, model, original.config, scheme)


def _quantisation(base: BaseModel) -> Mapping[str, Any] | None:
    configs = (base.config, base.config.get_text_config())
    found = next((c.quantization_config for c in configs if getattr(c, "quantization_config", None)), None)
    return cast("Mapping[str, Any] | None", found if found is None or isinstance(found, dict) else found.to_dict())


def _quantised(base: BaseModel, what: str) -> Diagnostic:
    message = f"`{base.name}` is {what}: its weights would be rounded twice"
    return Diagnostic("Q501", message, hint="quantise the original of full precision")


def _require_trained_grid(
    base: BaseModel, model: Path, config: Mapping[str, Any] | None, scheme: Scheme
) -> None:  # fmt: skip
    """Compare the merge with what training rounded: the checkpoint's codes, or the grids of a compiled program."""
    if config is not None:
        raise InputRefused(_rounds_again(f"the quantised weights of `{base.name}`"))
    grid = trained_grid(model)
    if grid and grid != scheme.grid:
        message = f"training rounded weights to `{grid}`, and the scheme `{scheme.name}` is `{scheme.grid}`"
        raise InputRefused(Diagnostic("Q506", message, hint="use the scheme of the program, or `ktc merge` alone"))


def trained_grid(model: Path) -> str:
    """Return the grid to which the program of a compiled model rounds sums or trained weights, "" for none.

    Raises InputRefused (Q505) where it rounds a frozen base, beside which adapters are exact.
    """
    found = ""
    for rewrite, grid, is_frozen in _grids(model):
        if is_frozen:
            raise InputRefused(_rounds_again(f"weights that `{rewrite.rule}` rounds at `{rewrite.fqn}`"))
        found = grid
    return found


def frozen_grid(model: Path) -> Int4Grid | None:
    """Return the grid to which the program of a compiled model rounds a frozen base, `None` for none."""
    return next((Int4Grid.parse(grid) for _, grid, is_frozen in _grids(model) if is_frozen), None)


def _grids(model: Path) -> Iterator[tuple[compiled.Rewrite, str, bool]]:
    """Yield the rewrites that round weights, their grids, and whether the weights are frozen and the adapter apart."""
    rewrites = compiled.read_manifest(model).rewrites if (model / compiled.FILE).is_file() else ()
    for rewrite in rewrites:
        grid = str(rewrite.args.get("grid") or "")
        if grid:
            yield rewrite, grid, not (rewrite.args.get("merged") or rewrite.args.get("masters"))


class _RoundedReader:
    """Reads rows as a `RowReader`, those of `names` rounded to a grid, as training had them."""

    def __init__(self, rows: RowReader, grid: Int4Grid, names: Container[str]) -> None:
        self._rows, self._grid, self._names = rows, grid, names

    def read(self, entry: TensorEntry, rows: slice | None = None) -> Tensor:
        """Return the tensor, or the `rows` of its first dimension (no step), in the dtype of `entry`."""
        found = self._rows.read(entry, rows)
        return self._grid.rounded(found) if entry.name in self._names and found.numel() else found


def _rounds_again(beside: str) -> Diagnostic:
    message = f"the adapter was trained beside {beside}, and a merge rounds the sum of both again"
    hint = "use the adapter beside the INT4 model, or accept the drift that is reported: `--requantize-merged`"
    return Diagnostic("Q505", message, hint=hint)

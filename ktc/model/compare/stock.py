"""The stock model with the values of one group of tensors at a time: one layer, or all tensors outside of the layers.

In: the stock class, the checkpoint. Out: layers in fp32, then in the model's own dtype. Values are read by safetensors
and put in place by transformers' loading code; a quantised checkpoint's codes are decoded first. GGUF files, whose
names and layouts are not transformers', are read by the rows of `weights.json`. Refused (N604): tensors that
transformers cannot put in place, parameters without a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.checkpoint import CheckpointIndex, StoredWeight, WeightSource, stored_weights
from ktc.model.checkpoint.reader import TORCH_DTYPE, TensorReader
from ktc.model.checkpoint.values import read_weight
from ktc.model.compare.groups import OUTSIDE, group_of, put, tensors_of
from ktc.model.hf.stock_loading import load_tensors, targets_of
from ktc.model.hf.stock_model import quantization_config_of
from ktc.model.loading.buffers import compute_buffers
from ktc.model.packed_store import weight_store


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the checkpoint, plain or with codes, and the `target` that it fills, whole or in part."""

    weight: StoredWeight
    target: str


class StockModel:
    """The stock model in fp32 on meta. A group is loaded once, may be converted to the own dtype, and is released.

    `layers` names the list of decoder layers. `dtypes` has the own dtype of each tensor, and by "" the model's. `rows`
    is given for GGUF files alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtypes: Mapping[str, torch.dtype],
        layers: str,
        index: CheckpointIndex,
        rows: Sequence[WeightSource],
    ) -> None:
        self.model, self._dtypes, self.layers, self._index = model, dtypes, layers, index
        self._rows = rows if index.gguf is not None else ()
        self._parts = {} if self._rows else _grouped(model, layers, index)
        compute_buffers(model, {})

    @property
    def read_by(self) -> str:
        """Whether transformers or the rows of `weights.json` put values in place."""
        return "rows" if self._rows else "transformers"

    def bytes_of(self, group: str) -> int:
        """Return the bytes that loading a group reads."""
        if self._rows:
            return sum(weight_store.stored_bytes(row, self._index) for row in self._rows_of(group))
        entries = (part.weight.entry for part in self._parts.get(group, ()))
        return sum(entry.end - entry.begin for entry in entries)

    def load(self, group: str) -> None:
        """Give the tensors of a group their values in fp32. Raises InputRefused (N604)."""
        if self._rows:
            weight_store.fill(self.model, self._rows_of(group), self._index, {})
        else:
            self._load_stock(group)
        if group == OUTSIDE:
            self.model.tie_weights()
            compute_buffers(self.model, {})
        empty = [name for name, owner, leaf in tensors_of(self.model, self.layers, group) if _of(owner, leaf).is_meta]
        if empty:
            raise InputRefused(_unfilled(f"nothing in the checkpoint fills `{empty[0]}`"))

    def to_own_dtype(self, group: str, coarser: torch.dtype | None = None) -> None:
        """Convert a loaded group to the model's own dtype, or to a `coarser` one that a kernel computes in."""
        with torch.no_grad():
            for name, owner, leaf in tensors_of(self.model, self.layers, group):
                stored = self._dtypes.get(name)
                wanted = coarser if coarser is not None and stored == self.dtype else stored
                tensor = _of(owner, leaf)
                if wanted is not None and tensor.is_floating_point() and tensor.dtype != wanted:
                    put(owner, leaf, tensor.to(wanted))
        if group == OUTSIDE:
            self.model.tie_weights()

    def release(self, group: str) -> None:
        """Free the values of a group; its tensors are fp32 on meta again."""
        for _, owner, leaf in tensors_of(self.model, self.layers, group):
            tensor = _of(owner, leaf)
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            put(owner, leaf, torch.empty(tensor.shape, dtype=dtype, device="meta"))

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the decoder layers."""
        count = len(cast("nn.ModuleList", self.model.get_submodule(self.layers)))
        return tuple(f"{self.layers}.{index}" for index in range(count))

    @property
    def dtype(self) -> torch.dtype:
        """The model's own dtype."""
        return self._dtypes[""]

    def _rows_of(self, group: str) -> list[WeightSource]:
        return [row for row in self._rows if group_of(row.target, self.layers) == group]

    def _load_stock(self, group: str) -> None:
        parts = self._parts.get(group, ())
        plain = [part for part in parts if part.weight.quantised is None]
        with ExitStack() as stack:
            files: dict[str, Any] = {
                file: stack.enter_context(safe_open(self._index.folder / file, framework="pt"))
                for file in sorted({part.weight.entry.file for part in plain})
            }
            tensors: dict[str, Any] = {
                part.weight.name: files[part.weight.entry.file].get_slice(part.weight.entry.name) for part in plain
            }
            tensors.update(self._decoded([part for part in parts if part.weight.quantised is not None]))
            targets = _as_stored(parts)
            for target, dtype in targets.items():
                self._cast(target, dtype)
            wrong = load_tensors(self.model, tensors)
        if wrong:
            raise InputRefused(*(_unfilled(f"transformers cannot use {what}") for what in wrong[:10]))
        for target in targets:
            self._cast(target, torch.float32)

    def _cast(self, target: str, dtype: torch.dtype) -> None:
        """Give one tensor of the model, on meta or with values, another dtype."""
        parent, _, leaf = target.rpartition(".")
        owner = self.model.get_submodule(parent)
        put(owner, leaf, _of(owner, leaf).detach().to(dtype))

    def _decoded(self, parts: Sequence[_Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that codes stand for, in fp32, by their names in an unquantised checkpoint."""
        with TensorReader(self._index.folder) as reader:
            for part in parts:
                entry = part.weight.entry
                row = WeightSource(
                    part.target, None, None, entry.name, entry.file, entry.dtype, entry.shape,
                    quantised=part.weight.quantised,
                )  # fmt: skip
                yield part.weight.name, read_weight(reader, self._index, row, None, torch.float32)


def _as_stored(parts: Sequence[_Part]) -> dict[str, torch.dtype]:
    """Return the dtype of each target that plain tensors of one half dtype fill.

    transformers joins the tensors of many experts, with copies of all of them: in half precision they take half of the
    memory, and the conversion to fp32 afterwards is exact.
    """
    stored: dict[str, set[str]] = {}
    for part in parts:
        quantised = part.weight.quantised is not None
        stored.setdefault(part.target, set()).add("codes" if quantised else part.weight.entry.dtype)
    halves = {name: TORCH_DTYPE[name] for name in ("bf16", "f16")}
    return {
        target: halves[next(iter(kinds))] for target, kinds in stored.items() if kinds <= {*halves} and len(kinds) == 1
    }


def _grouped(model: PreTrainedModel, layers: str, index: CheckpointIndex) -> dict[str, list[_Part]]:
    weights, broken = stored_weights(index.tensors, quantization_config_of(model.config))
    if broken:
        raise InputRefused(*broken[:10])
    targets = targets_of(model, [weight.name for weight in weights])
    groups: dict[str, list[_Part]] = {}
    for weight in weights:
        target = targets.get(weight.name)
        if target is not None:
            groups.setdefault(group_of(target, layers), []).append(_Part(weight, target))
    return groups


def own_dtypes(model: nn.Module, model_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor of a model that was built in its own dtype, and by "" that dtype."""
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {"": model_dtype, **{name: tensor.dtype for name, tensor in tensors}}


def _of(owner: nn.Module, leaf: str) -> Tensor:
    return cast("Tensor", getattr(owner, leaf))


def _unfilled(what: str) -> Diagnostic:
    hint = "compare whole answers instead: `ktc eval`; and please report the model family"
    return Diagnostic("N604", f"the stock model cannot be filled layer by layer: {what}", hint=hint)

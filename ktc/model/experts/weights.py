"""The weights of one layer's experts: stock tensors that PyTorch computes with, a kernel's packed form, or both.

A layer has both where packed weights change with the parameters that they are made of (`weight_training.py`).

In: one part of one expert at a time, as values, codes or GGUF blocks, or the packed bytes of all experts at once.
Out: the tensors that backends read, and the parts that were never loaded.
`restore` begins a load into the same memory, and `process` ends it (`load_state.py`).
Refused (`ValueError`): a part that the form lacks, another shape, packed bytes or codes without a kernel.
"""

from __future__ import annotations

import copy
import itertools
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ktc.diagnostics import InputRefused
from ktc.model.checkpoint.int4 import WHOLE_ROW
from ktc.model.experts.kept.kept_experts import renew_kept
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.layouts.stock_layout import StockTensor, canonical_parts, parts_of, stock_names, stock_shape
from ktc.model.experts.load_state import Loads
from ktc.model.experts.streamed.expert_stream import renew_streams
from ktc.model.experts.trained.lora import NO_LORA, ExpertsLora
from ktc.model.experts.trained.weight_training import FROZEN, State, WeightTraining, not_rounded, state_of
from ktc.model.kernels.form import ExpertPart, ExpertsForm, ExpertsSizes


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes, without the lock of the interpreter."""
    torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))


class ExpertsWeights:
    """Weights of one layer. `packed` holds them, or `stock` where there is no kernel, or both, depending on `training`.

    With a kernel that packs once, the stock tensors are shapes without storage, and every value in them is NaN.
    `dtype` is that of frozen stock tensors and of the reference. `fqn` is the module's name in the model, from the
    loader. Where weights train, `stock` is the module's own dictionary of parameters: PyTorch may replace them there.
    `packed_from` is the state of the parameters that the packed weights were made of.
    """

    fqn: str = "routed experts"

    def __init__(
        self,
        form: ExpertsForm,
        sizes: ExpertsSizes,
        dtype: torch.dtype,
        packed: PackedExperts | None,
        training: WeightTraining = FROZEN,
    ) -> None:
        self.form, self.sizes, self.dtype, self.packed, self.training = form, sizes, dtype, packed, training
        self.packed_from: State | None = None
        self.stock: dict[Any, nn.Parameter] = {name: self._stock_tensor(name) for name in stock_names(form)}
        self._generation = 0
        self.loads: Loads[tuple[int, ExpertPart]] = Loads(itertools.product(range(sizes.num_experts), parts_of(form)))

    def _stock_tensor(self, name: StockTensor) -> nn.Parameter:
        shape, dtype = stock_shape(self.form, name, *self.sizes[:3]), self.training.stored_in(self.dtype)
        if self.packed and not self.training.repacks:  # NaN shows in the results of any code that computes with it
            tensor = torch.full((), torch.nan, dtype=dtype).expand(shape)
        else:
            tensor = torch.zeros(shape, dtype=dtype)
        return nn.Parameter(tensor, requires_grad=self.training.trains)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights and of the tensors that they are made of, 0 without a kernel."""
        if self.packed is None:
            return 0
        kept = sum(tensor.nbytes for tensor in self.stock.values()) if self.training.repacks else 0
        return self.packed.nbytes + kept

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertsWeights:
        """Copy the weights that train, and those made of them; copies of a layer share the rest."""
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        if not self.training.trains:
            memo.update((id(tensor), tensor) for tensor in self.stock.values())
        if self.packed is not None and self.training.repacks:
            memo[id(self.packed)] = self.packed.beside()
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if self.training.repacks:
            copied.packed_from, copied.loads = None, self.loads.separate()
        return copied

    def become(self, dtype: torch.dtype) -> None:
        """Convert the stock tensors to another float dtype. They are new tensors: copies of the layer share the old."""
        for name, tensor in self.stock.items():
            self.stock[name] = nn.Parameter(tensor.detach().to(dtype), requires_grad=tensor.requires_grad)
        self.dtype, self.loads = dtype, self.loads.separate()

    def restore(self, name: str) -> None:
        """Await a load of all parts into the same memory. Raises `RuntimeError` for weights that are mapped read-only.

        Until `process`, calls are refused (L460) with `name`, the module's.
        """
        if self.packed is not None:
            self.packed.require_writable()
            renew_streams(self.packed, sent=False)
        self.loads.restore(name)

    def process(self) -> None:
        """Admit calls, with copies on GPUs renewed; nothing where that was done. Raises InputRefused (L460)."""
        if not self.loads.process():
            return
        self._generation = self.loads.generation
        if self.packed is not None:
            renew_streams(self.packed, sent=True)
            renew_kept(self.packed)

    def copy_from(self, other: ExpertsWeights) -> None:
        """Load all parts from weights of the same form, sizes and kernel."""
        if self.packed is not None and not self.training.repacks:
            self.fill_packed(lambda target: copy_bytes(target, other.packed_storage))
            return
        for name, tensor in self.stock.items():
            tensor.detach().copy_(other.stock[name])
        self.packed_from = None
        self.loads.loaded_all()

    def missing(self) -> tuple[tuple[int, ExpertPart], ...]:
        """Return the (expert, part) pairs that were never loaded, in order of expert."""
        parts = parts_of(self.form)
        return tuple(sorted(self.loads.missing, key=lambda pair: (pair[0], parts.index(pair[1]))))

    def require_loaded(self) -> None:
        """Raise `RuntimeError` if a part was never loaded, InputRefused (L460) between `restore` and `process`."""
        self.loads.require_processed(self._generation)
        if self.loads.missing:
            missing = self.missing()
            raise RuntimeError(f"{len(missing)} expert weights were never loaded, the first is {missing[0]}")

    def load(self, expert: int, part: ExpertPart, tensor: Tensor) -> None:
        """Store one part in any float dtype. Raises `ValueError` for another shape, or a part that the form lacks."""
        parts = parts_of(self.form)
        if part not in parts:
            raise ValueError(f"experts of the form `{self.form}` have no `{part}`, only {', '.join(parts)}")
        self._check(expert, part, tensor)
        if self.packed is not None and not self.training.repacks:
            self._pack(expert, part, tensor)
        else:
            rounds = not self.training.repacks and not part.endswith("_bias")
            kept = self._on_grid(tensor.detach()) if rounds else tensor.detach()
            self._stock_part(expert, part).copy_(kept)
            self.packed_from = None
        self.loads.loaded((expert, part))

    def beside(self, lora: ExpertsLora) -> ExpertsLora:
        """Return the factors that are added to the products: none where `lora` is merged into the weights."""
        return NO_LORA if self.training.merged else lora

    def current(self, lora: ExpertsLora = NO_LORA) -> PackedExperts:
        """Return the packed weights, packed again if a parameter changed since. `lora` is merged if training says so.

        Raises `ValueError` without a kernel, and `InputRefused` (L463) for weights that cannot be rounded.
        """
        packed = self._require_packed()
        if not self.training.repacks:
            return packed
        merged = lora if self.training.merged else NO_LORA
        state = (*state_of(self.stock.values()), *merged.state)
        if state != self.packed_from:
            self.packed_from = None  # until all experts are packed
            with torch.no_grad():
                for expert in range(self.sizes.num_experts):
                    self._pack_again(expert, merged)
            self.packed_from = state
        return packed

    def effective(self, lora: ExpertsLora) -> Mapping[StockTensor, Tensor]:
        """Return the stock tensors as they are multiplied: with a merged adapter, and rounded. Differentiable."""
        tensors: dict[StockTensor, Tensor] = dict(self.stock)
        if not self.training.repacks:
            return tensors
        for name, factors in zip(stock_names(self.form), lora.products if self.training.merged else (), strict=False):
            if factors is not None:
                delta = torch.stack([factors.delta(expert) for expert in range(self.sizes.num_experts)])
                tensors[name] = tensors[name] + (delta.transpose(1, 2) if self.form.transposed else delta)
        if self.training.grid is not None:
            for name in stock_names(self.form)[:2]:
                rows = tensors[name].transpose(1, 2) if self.form.transposed else tensors[name]
                rounded = self.training.grid.rounded(rows)
                tensors[name] = rounded.transpose(1, 2) if self.form.transposed else rounded
        return tensors

    def _pack_again(self, expert: int, merged: ExpertsLora) -> None:
        """Pack all parts of one expert from the stock tensors, of which gate_up and down are the first."""
        for name, factors in itertools.zip_longest(stock_names(self.form), merged.products):
            tensor = self.stock[name].detach()[expert]
            if factors is not None:
                delta = factors.delta(expert)
                tensor = tensor.float() + (delta.t() if self.form.transposed else delta)
            for part, matrix in canonical_parts(self.form, name, tensor):
                try:
                    self._pack(expert, part, matrix)
                except ValueError as error:
                    raise InputRefused(not_rounded(f"{self.fqn}.{expert}.{part}", str(error))) from error

    def _pack(self, expert: int, part: ExpertPart, values: Tensor) -> None:
        """Pack one part on the grid. A kernel with scales for groups repeats the scale of a row for each group."""
        packed, grid = self._require_packed(), self.training.grid
        coding = packed.coding(part)
        if grid is None or part.endswith("_bias") or coding == ("int4", grid.group):
            packed.load(expert, part, values)
        elif coding is not None and grid.group == WHOLE_ROW:
            coded = grid.coded(values)
            scales = coded.scales.expand(-1, values.shape[1] // coding[1])
            packed.load_codes(expert, part, coded.codes, scales)
        else:
            packed.load(expert, part, self._on_grid(values.detach()))

    def _on_grid(self, matrix: Tensor) -> Tensor:
        return matrix if self.training.grid is None else self.training.grid.rounded(matrix)

    def takes_codes(self, part: ExpertPart, method: str, group: int) -> bool:
        """Return whether the kernel multiplies such codes of a part."""
        stored = self.packed is not None and self.packed.coding(part) == (method, group) and not self.form.transposed
        return stored and self._keeps_stored(method, group)

    def _keeps_stored(self, method: str, group: int) -> bool:
        """Return whether codes of the checkpoint are already on the grid of training."""
        grid = self.training.grid
        return not self.training.repacks and (grid is None or (method, group) == ("int4", grid.group))

    def load_codes(self, expert: int, part: ExpertPart, codes: Tensor, scales: Tensor) -> None:
        """Store one part without rounding: a code per weight, a scale per row and group.

        Raises `ValueError` for another shape, a code out of range, or a scale that the format cannot hold.
        """
        self._check(expert, part, codes)
        self._require_packed().load_codes(expert, part, codes, scales)
        self.loads.loaded((expert, part))

    def takes_blocks(self, part: ExpertPart, type_name: str) -> bool:
        """Return whether the kernel multiplies a part in GGUF blocks of this type."""
        plain = not self.training.repacks and self.training.grid is None
        return plain and self.packed is not None and self.packed.blocks(part) == type_name

    def load_blocks(self, expert: int, part: ExpertPart, blocks: Tensor) -> None:
        """Store one part from uint8 rows of whole GGUF blocks, (I, bytes of H weights) or (H, bytes of I weights).

        Raises `ValueError` for another shape, or if the kernel takes no blocks.
        """
        self._require_packed().load_blocks(expert, part, blocks)
        self.loads.loaded((expert, part))

    @property
    def packed_storage(self) -> memoryview:
        """The packed bytes of all experts in order. Raises `ValueError` without a kernel."""
        return memoryview(self._require_packed().whole().numpy().data)

    def fill_packed(self, fill: Callable[[memoryview], None]) -> None:
        """Load all experts from the bytes that `fill` writes, in the order of `packed_storage`."""
        packed = self._require_packed()
        filled = packed.to_fill()
        fill(memoryview(filled.numpy().data))
        packed.take(filled)
        self.loads.loaded_all()

    def take_packed(self, mapping: mmap.mmap) -> None:
        """Compute from a read-only mapping of bytes in the order of `packed_storage`."""
        self._require_packed().use_mapping(mapping)
        self.loads.loaded_all()

    def expert(self, expert: int, part: ExpertPart) -> Tensor:
        """Return a copy of one part, in the dtype it is computed in."""
        if self.packed is not None and not self.training.repacks:
            return self.packed.unpack(expert, part, self._shape(part))
        return self._stock_part(expert, part).clone(memory_format=torch.contiguous_format)

    def _require_packed(self) -> PackedExperts:
        if self.packed is None:
            raise ValueError("experts without a kernel have no packed form")
        return self.packed

    def _check(self, expert: int, part: ExpertPart, tensor: Tensor) -> None:
        expected, shape = self._shape(part), tuple(tensor.shape)
        if shape != expected:
            raise ValueError(f"expert {expert}, `{part}`: expected shape {expected}, found {shape}")

    def _shape(self, part: ExpertPart) -> tuple[int, ...]:
        rows, columns = self.sizes.intermediate, self.sizes.hidden
        if part.startswith("down"):
            rows, columns = columns, rows
        return (rows,) if part.endswith("_bias") else (rows, columns)

    def _stock_part(self, expert: int, part: ExpertPart) -> Tensor:
        """Return a view of the stock tensor that holds the part."""
        for name, tensor in self.stock.items():
            matrices = dict(canonical_parts(self.form, name, tensor.detach()[expert]))
            if part in matrices:
                return matrices[part]
        raise KeyError(part)

"""Random weights of a layer's experts in the form that their kernel packs, made in memory at the speed of copies.

In: experts that are not loaded, and a seed. Out: the same experts, loaded. Some experts are packed once for all layers
of one kind; all others are copies of their bytes, and each layer begins with another one. No two neighbours are equal.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.formats import STORED
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.layouts.stock_layout import parts_of
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.block_reference import random_blocks
from ktc.model.kernels.form import ExpertPart, ExpertsForm

STD: Final = 0.02  # of a weight: as models are initialised
_PACKED: Final = 8  # experts of a kind that are packed
_SEED_OF_LAYER: Final = 1_000_003


class RandomExperts:
    """Random experts of one seed. All layers with the same kernel and sizes share the experts that were packed once."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kinds: dict[tuple[str, ExpertsForm], Tensor] = {}

    def fill(self, experts: FusedMoe, layer: int, copied: Callable[[int], None]) -> None:
        """Load every part of every expert. Layers with consecutive numbers `layer` differ.

        `copied` is called from several threads, with the bytes of each expert that is finished.
        """
        packed = experts.weights.packed
        if packed is None or experts.weights.training.repacks:
            _load_values(experts, self._seed + _SEED_OF_LAYER * layer)
            return
        some = self._packed(packed, experts.form)
        experts.weights.fill_packed(lambda target: _repeat(some, layer, target, copied))

    def _packed(self, packed: PackedExperts, form: ExpertsForm) -> Tensor:
        """Return the bytes of some experts: uint8 (N, bytes of one)."""
        kind = packed.key, form
        if kind not in self._kinds:
            self._kinds[kind] = _pack(packed.unloaded(), form, torch.Generator().manual_seed(self._seed))
        return self._kinds[kind]


def _pack(empty: PackedExperts, form: ExpertsForm, generator: torch.Generator) -> Tensor:
    number, hidden, intermediate, _ = empty.sizes
    some = min(_PACKED, number)
    for expert in range(some):
        for part in parts_of(form):
            rows, columns = (hidden, intermediate) if part.startswith("down") else (intermediate, hidden)
            if part.endswith("_bias"):
                empty.load(expert, part, torch.zeros(rows))
            elif (kind := empty.blocks(part)) is not None:
                blocks = random_blocks(rows, columns, STORED[kind].name, STD, generator)
                empty.load_blocks(expert, part, blocks)
            else:
                empty.load(expert, part, _values((rows, columns), generator))
    nbytes = empty.nbytes // number
    return empty.packed[: some * nbytes].clone().view(some, nbytes)


def _values(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(0, STD, generator=generator)


def _repeat(some: Tensor, first: int, target: memoryview, copied: Callable[[int], None]) -> None:
    """Copy the rows of `some` over `target` in turn, beginning with row `first`."""
    number, nbytes = some.shape
    into, sources = torch.frombuffer(target, dtype=torch.uint8).data_ptr(), some.data_ptr()

    def copy(expert: int) -> None:
        source = sources + (first + expert) % number * nbytes
        ctypes.memmove(into + expert * nbytes, source, nbytes)  # without the lock of the interpreter
        copied(nbytes)

    with ThreadPoolExecutor(host.usable_threads()) as pool:
        list(pool.map(copy, range(len(target) // nbytes)))


def _load_values(experts: FusedMoe, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[ExpertPart, torch.Size] = {part: experts.expert(0, part).shape for part in parts_of(experts.form)}
    for expert in range(experts.num_experts):
        for part, shape in shapes.items():
            values = torch.zeros(shape) if part.endswith("_bias") else _values(tuple(shape), generator)
            experts.load_expert(expert, part, values)

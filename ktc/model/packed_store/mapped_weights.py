"""Plain weights mapped from the checkpoint instead of read, after `ktc pack` has checked them.

In: a model on meta tensors, the rows of `weights.json`, the checkpoint's index. Out: the rows that remain to be read:
those for a GPU, for a module of ktc, for another dtype, or misaligned in their file. Mappings are private: a write to a
parameter copies its page, and the file never changes.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from ktc.foundation.regular_files import open_regular
from ktc.model.checkpoint import CheckpointIndex, TensorEntry, WeightSource
from ktc.model.checkpoint.reader import TORCH_DTYPE
from ktc.model.graph.typed import owner_of
from ktc.model.packed_store.placement import device_of

_ALIGNMENT: Final = 8  # of the reference implementation of safetensors


def map_weights(
    model: nn.Module, sources: Sequence[WeightSource], index: CheckpointIndex, placement: Mapping[str, str]
) -> tuple[WeightSource, ...]:
    """Map every parameter that its file stores unchanged; return the other rows, in order."""
    files: dict[str, mmap.mmap] = {}
    rest: list[WeightSource] = []
    for source in sources:
        entry = index.tensors.get(source.source_key)
        old = _parameter(model, source)
        if entry is None or old is None or not _fits(source, entry, old, placement):
            rest.append(source)
            continue
        if entry.file not in files:
            files[entry.file] = _map_private(index.folder / entry.file)
        tensor = torch.frombuffer(files[entry.file], dtype=old.dtype, count=old.numel(), offset=entry.begin)
        parameter = nn.Parameter(tensor.view(entry.shape), requires_grad=old.requires_grad)
        setattr(*owner_of(model, source.target), parameter)
    return tuple(rest)


def _parameter(model: nn.Module, source: WeightSource) -> nn.Parameter | None:
    """Return the parameter that a row fills whole; `None` for parts of experts, buffers and unknown names."""
    try:
        parameter = getattr(*owner_of(model, source.target), None)
    except AttributeError:
        return None
    return parameter if source.is_plain and isinstance(parameter, nn.Parameter) else None


def _fits(source: WeightSource, entry: TensorEntry, parameter: Tensor, placement: Mapping[str, str]) -> bool:
    as_compiled = (entry.dtype, entry.shape) == (source.dtype, source.shape)
    as_stored = (TORCH_DTYPE.get(entry.dtype), entry.shape) == (parameter.dtype, tuple(parameter.shape))
    on_cpu = device_of(source.target, placement).type == "cpu"
    return as_compiled and as_stored and on_cpu and entry.begin % _ALIGNMENT == 0 and entry.begin < entry.end


def _map_private(path: Path) -> mmap.mmap:
    with open_regular(path) as file:
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

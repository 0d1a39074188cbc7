"""The compiled model with one group of tensors at a time, filled by the loader's own code.

In: an opened folder. Out: layers as `ktc.load` makes them: the recipe realised, experts from the packed store or packed
from the checkpoint, tensors on their devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from ktc.model.checkpoint import WeightSource
from ktc.model.compare.groups import OUTSIDE, group_of, put, tensors_of
from ktc.model.compare.opened import Opened, without_router_logits
from ktc.model.experts.module import FusedMoe
from ktc.model.loading import load_as
from ktc.model.loading.buffers import compute_buffers
from ktc.model.loading.compiled_model import compiled_class
from ktc.model.packed_store import weight_store, weights_stage
from ktc.model.packed_store.packed_store import PackedStore
from ktc.model.packed_store.placement import follow


class CompiledLayers:
    """The realised model on meta. A layer is loaded once and released; what is outside of the layers, any number."""

    def __init__(self, opened: Opened, layers: str) -> None:
        self._opened, self._layers = opened, layers
        manifest = opened.manifest
        model_class = compiled_class(opened.stock_class)
        self.model = load_as.realised_on_meta(model_class, opened.folder, manifest, opened.library)
        self._placement = dict(manifest.placement)
        without_router_logits(self.model.config)
        compute_buffers(self.model, self._placement)
        follow(self.model, self._placement)

    def bytes_of(self, group: str) -> int:
        """Return the bytes that loading a group reads."""
        store = self._store_of(group)
        packed = dict(store.headers) if store is not None else {}
        rest = [row for row in self._rows_of(group) if row.target.rpartition(".")[0] not in packed]
        read = sum(weight_store.stored_bytes(row, self._opened.index) for row in rest)
        return read + (store.size if store is not None else 0)

    def load(self, group: str) -> None:
        """Give the tensors of a group their values. Raises what the loader raises."""
        rows, store = self._rows_of(group), self._store_of(group)
        stored = weights_stage.StoredWeights(rows, self._opened.index, store)
        weights_stage.fill_weights(self.model, self._placement, stored=stored, map=False)
        if group == OUTSIDE:
            self.model.tie_weights()
            tensors = tensors_of(self.model, self._layers, group)
            empty = [name for name, owner, leaf in tensors if getattr(owner, leaf).is_meta]
            assert not empty, f"the loader fills what is outside of the layers, and left {empty}"
        else:
            weight_store.check_filled(self.model.get_submodule(group))

    def release(self, group: str) -> None:
        """Free the values of a group. A layer's packed experts are dropped, so it cannot be loaded again."""
        persistent = {name for name in self.model.state_dict() if group_of(name, self._layers) == group}
        for name, owner, leaf in tensors_of(self.model, self._layers, group):
            if name in persistent:
                put(owner, leaf, torch.empty_like(getattr(owner, leaf), device="meta"))
        if group != OUTSIDE:
            layer = self.model.get_submodule(group)
            modules = cast("Iterator[tuple[str, nn.Module]]", layer.named_modules())
            for path in [path for path, module in modules if isinstance(module, FusedMoe)]:
                layer.set_submodule(path, nn.Identity())

    def _rows_of(self, group: str) -> Sequence[WeightSource]:
        return [row for row in self._opened.rows if group_of(row.target, self._layers) == group]

    def _store_of(self, group: str) -> PackedStore | None:
        store = self._opened.store
        if store is None:
            return None
        headers = {fqn: header for fqn, header in store.headers.items() if group_of(fqn, self._layers) == group}
        return PackedStore(store.folder, headers)

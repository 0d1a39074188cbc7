"""`Sparse`: attention of few new tokens over the positions of a cache that an index, or a model's own indexer, chooses.

In: queries and what the cache holds, in calls of a stock module whose cache layer is followed. Out: attention's output,
or None for a call that stays dense: up to `budget` positions, many tokens, gradients, caches that no index follows.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from ktc.model.attention.decode import MOST_TOKENS, Chosen, DecodeAttention, KVCacheView, is_seen_mask
from ktc.model.attention.index_kernel import IndexKernel
from ktc.model.attention.key_codes import estimates
from ktc.model.attention.key_index import KeyIndex, index_of, is_followed, keep_index, length_of
from ktc.model.attention.row_indices import RowIndices, every_position, joined, row_lengths, row_of
from ktc.model.attention.selection import attend_chosen, choose, visible_positions
from ktc.model.attention.sparsity import Sparsity, Traffic
from ktc.model.attention.split_decode import has_kernels
from ktc.model.attention.step_index import IndexedLayer, StepIndex, unfit_width
from ktc.model.hf.patching import Patch
from ktc.model.kernels.step_context import StepContext
from ktc.model.linears.gemv import is_traced

log = logging.getLogger(__name__)
_CACHE: Final = "past_key_values"
_DENSE_STEPS: Final = 32768  # positions up to which dense attention is as fast in recorded steps on a GPU
_SHORT: Final = f"recorded steps over up to {_DENSE_STEPS} positions stay dense, which takes no longer on a GPU"


@dataclass(slots=True)
class FollowedLayer:
    """A cache layer during one call of its module, and its index."""

    cache: Any
    number: int
    index: KeyIndex | None

    @property
    def layer(self) -> Any:
        layers = getattr(self.cache, "layers", ())
        return layers[self.number] if self.number < len(layers) else None


@dataclass(frozen=True, slots=True)
class Sparse:
    """The sparse attention of a module. `decode` is a kernel of both kinds; without one, PyTorch computes.

    With `indexer`, the model's own indexer chooses. `unfit` says why kernels of recorded steps
    cannot run, "" if they can.
    """

    sparsity: Sparsity
    decode: DecodeAttention | None
    indexer: bool = False
    unfit: str = ""

    def attend(
        self, module: Any, query: Tensor, kv: KVCacheView, *, scale: float, mask: Tensor | None,
        sinks: Tensor | None = None, indices: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Compute query (B, H, T, k) -> (B, T, H, v), or return None for a call that stays dense.

        `mask` is bool, (B or 1, 1, T, L); `indices` (B, T, K) are the choice of the model's indexer.
        """
        if torch.is_grad_enabled() or query.shape[2] > MOST_TOKENS or is_traced():
            return None
        if not is_seen_mask(mask):
            if mask is None or not mask.is_floating_point() or _index_of_step(module, kv) is None:
                return None
            mask = mask > torch.finfo(mask.dtype).min / 2  # of a step on a GPU, whose mask is added
        if indices is None and (index := _index_of_step(module, kv)) is not None and query.shape[2] == 1:
            return self._in_step(module, query, kv, index, mask, scale, sinks)
        decode = self.decode if self.decode is not None and self.decode.serves(query, kv, mask) else None
        if indices is not None:
            chosen = _of_indexer(indices, kv, mask)
            lengths = [kv.keys.shape[2]] * len(query)
        elif self.indexer:
            return None
        else:
            lengths, chosen = self._by_index(module, query, kv, mask, scale, decode)
        if chosen is None:
            return None
        module.traffic = module.traffic + self._traffic(query, kv, chosen, lengths, by_index=indices is None)
        attended = attend_chosen if decode is None else decode.of_chosen
        return attended(query, kv, chosen, scale=scale, sinks=sinks)

    def _in_step(
        self, module: Any, query: Tensor, kv: KVCacheView, index: StepIndex, mask: Tensor | None, scale: float,
        sinks: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """Compute a step that is recorded on a GPU, whose layer has codes of its own."""
        if mask is None or kv.keys.shape[2] <= dense_steps(self.sparsity):
            if kv.keys.shape[2] > self.sparsity.budget:
                log_once(module, _SHORT)
            return None
        from ktc.model.attention.sparse_kernels import StepKeys, attend_sparsely

        position: Tensor = module.step_context.followed_layer.layer.position
        keys = StepKeys(kv, index, position, mask[..., : kv.keys.shape[2]])
        return attend_sparsely(query.detach(), keys, scale=scale, sparsity=self.sparsity, sinks=sinks)[0]

    def _by_index(
        self, module: Any, query: Tensor, kv: KVCacheView, mask: Tensor | None, scale: float,
        decode: DecodeAttention | None,
    ) -> tuple[list[int], Chosen | None]:  # fmt: skip
        """Return the positions of each row, and those chosen by the index of the followed cache layer.

        The kernel `decode` chooses; without one, PyTorch.
        """
        followed: FollowedLayer | None = module.step_context.followed_layer
        layer = None if followed is None else followed.layer
        if followed is None or layer is None or layer.keys is not kv.keys:
            return [], None
        rows, most = getattr(layer, "row_indices", None), kv.keys.shape[2]
        has_length = isinstance(rows, RowIndices) or is_followed(layer)
        # in a captured step the layer has its length on the GPU, and no index follows it
        length = length_of(layer) if most > self.sparsity.budget and has_length else most
        if length <= self.sparsity.budget:
            return [], None
        if isinstance(rows, RowIndices) and query.shape[2] == 1:
            lengths = row_lengths(mask, len(query), length)
            if lengths is not None:
                return lengths, self._by_row(rows, lengths, query, kv, scale, decode)
        if not is_followed(layer):
            is_of_step = hasattr(layer, "index")
            if is_of_step and most <= dense_steps(self.sparsity) and not unindexed(module, query.device.type):
                log_once(module, _SHORT)
                return [], None
            reason = (unindexed(module, query.device.type) if is_of_step else "") or (
                "no index follows this cache (or `torch.inference_mode`, whose tensors have no versions)"
            )
            log_once(module, f"attention over `{type(layer).__name__}` stays dense: {reason}")
            return [], None
        rope_keys = None if kv.rope_keys is None else kv.rope_keys[:, :, :length]
        keys = kv.keys[:, :, :length]
        kv = KVCacheView(keys, keys if kv.values is kv.keys else kv.values[:, :, :length], rope_keys)
        mask = None if mask is None else mask[..., :length]
        followed.index, chosen = self._select(followed.index, query, kv, mask, scale, decode)
        return [length] * len(query), chosen

    def _by_row(
        self, rows: RowIndices, lengths: list[int], query: Tensor, kv: KVCacheView, scale: float,
        decode: DecodeAttention | None,
    ) -> Chosen:  # fmt: skip
        """Return the positions that each row of a running batch reads, chosen by the row's own index."""
        H, (K, columns) = query.shape[1], kv.keys.shape[1:3]
        parts = list[Chosen]()
        for at, length in enumerate(lengths):
            if length <= self.sparsity.budget:
                parts.append(every_position(length, K if self.sparsity.shared else H, query.device))
                continue
            row = query[at : at + 1], row_of(kv, at, length)
            rows.rows[at], chosen = self._select(rows.rows[at], *row, None, scale, decode)
            parts.append(chosen)
        return joined(parts, [columns - length for length in lengths])

    def _select(
        self, index: KeyIndex | None, query: Tensor, kv: KVCacheView, mask: Tensor | None, scale: float,
        decode: DecodeAttention | None,
    ) -> tuple[KeyIndex, Chosen]:  # fmt: skip
        """Return the index with all keys of `kv`, made where it is missing, and its choice."""
        B, _, T, _ = query.shape
        K, length = kv.keys.shape[1:3]
        visible = visible_positions(mask, B, T, length, query.device)
        if index is None or index.format != self.sparsity.index:
            index = KeyIndex.of(kv, visible[:, -1], self.sparsity.index)
        if decode is None:
            index.extend(kv, length)
            scores = estimates(query, index.codes, index.format, length, scale)
            return index, choose(scores, K, visible, self.sparsity)
        kernel = IndexKernel(decode.kernel, decode.threads)
        kernel.extend(index, kv, length)
        return index, kernel.select(index, query, mask, self.sparsity, scale)

    def _traffic(
        self, query: Tensor, kv: KVCacheView, chosen: Chosen, lengths: list[int], *, by_index: bool
    ) -> Traffic:  # fmt: skip
        """Return the bytes that a call reads, counted from its tensors."""
        K = kv.keys.shape[1]
        parts = {id(tensor): tensor for tensor in kv.tensors}  # latents are keys and values
        row_bytes = sum(tensor.shape[-1] * tensor.itemsize for tensor in parts.values())
        sizes = query.shape[1], K, row_bytes, query.shape[-1]
        index = sum(self.sparsity.traffic(length, *sizes).index for length in lengths) if by_index else 0
        gathered = int(chosen.counts.sum()) * row_bytes
        return Traffic(index, gathered, sum(lengths) * K * row_bytes, len(query) * query.shape[2])


def _index_of_step(module: Any, kv: KVCacheView) -> StepIndex | None:
    """Return the index of the layer that the module reads in a step that is recorded on a GPU."""
    followed: FollowedLayer | None = module.step_context.followed_layer
    layer = None if followed is None else followed.layer
    return getattr(layer, "index", None) if layer is not None and layer.keys is kv.keys else None


def unindexed(module: Any, device: str) -> str:
    """Return why steps that a GPU replays have no index for an attention module with `sparse`; "" if they can."""
    sparse: Sparse = module.sparse
    if sparse.indexer:
        return "the model's own indexer keeps its keys on the host"
    if sparse.decode is not None or not computes_steps(device):
        return "its sparse attention keeps an index of the keys on the host"
    place = next((one.device for one in module.parameters() if one.device.type == device), torch.device(device))
    if not has_kernels(place):
        return f"its sparse attention has no kernels for {place}"
    if sparse.unfit:
        return sparse.unfit
    absorption = getattr(module, "absorption", None)
    if absorption is not None:
        return unfit_width(absorption.sizes.latent, absorption.sizes.rope)
    width: int | None = getattr(module, "head_dim", None)
    return "its heads have no width that is known" if width is None else unfit_width(width)


def indexed_layers(model: nn.Module, device: str) -> dict[int, IndexedLayer]:
    """Return how the layers of a memory are indexed whose steps are recorded on devices of type `device`."""
    modules = cast("list[Any]", [one for one in model.modules() if isinstance(getattr(one, "sparse", None), Sparse)])
    return {
        int(module.layer_idx): IndexedLayer(
            module.sparse.sparsity.index, hasattr(module, "absorption"), dense_steps(module.sparse.sparsity)
        )
        for module in modules
        if not unindexed(module, device)
    }


def dense_steps(sparsity: Sparsity) -> int:
    """Return up to how many positions recorded steps on a GPU are dense."""
    return max(sparsity.budget, _DENSE_STEPS)


def computes_steps(device: str) -> bool:
    """Return whether sparse attention has kernels for recorded steps on devices of this type."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return device == "cuda" or bool(knobs.runtime.interpret)


def _of_indexer(indices: Tensor, kv: KVCacheView, mask: Tensor | None) -> Chosen | None:
    """Return the visible positions that an indexer chose; None where it chose among no more than it takes."""
    B, T, most = indices.shape
    K, L = kv.keys.shape[1:3]
    if most >= L:
        return None
    visible = visible_positions(mask, B, T, L, indices.device)
    taken = visible.gather(-1, indices.long())
    positions = torch.where(taken, indices, L).sort(-1).values
    lists = positions.masked_fill(positions == L, 0).int()[:, :, None].expand(-1, -1, K, -1)
    return Chosen(lists.contiguous(), taken.sum(-1).int()[:, :, None].expand(-1, -1, K).contiguous())


@contextmanager
def following(context: StepContext, cache: Any, number: int) -> Generator[None]:
    """While a stock module updates layer `number` of `cache` and attends to it, keep the index of that layer."""
    followed = FollowedLayer(cache, number, None)
    layer = followed.layer
    if layer is not None and is_followed(layer) and layer.is_initialized:
        followed.index = index_of(layer)
        keep_index(layer, None)  # after an error there is none
    with context.entered(followed_layer=followed):
        yield
    layer = followed.layer
    if layer is not None and followed.index is not None:
        keep_index(layer, followed.index)


@functools.cache
def follows_cache(stock: type[nn.Module]) -> type[Patch]:
    """Return the patch of a module of class `stock` whose calls follow the cache that they are given."""
    forward = stock.forward
    place = list(inspect.signature(forward).parameters).index(_CACHE) - 1

    @functools.wraps(forward)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(_CACHE, args[place] if place < len(args) else None)
        if cache is None:
            return forward(self, *args, **kwargs)
        with following(self.step_context, cache, self.layer_idx):
            return forward(self, *args, **kwargs)

    return type("FollowsCache", (Patch,), {"forward": followed})


def log_once(module: Any, message: str) -> None:
    """Log a warning about an attention module, once for each message."""
    if message not in module.logged:
        module.logged = (*module.logged, message)
        log.warning("layer %s: %s", module.layer_idx, message)

"""Kernels of sparse attention in recorded steps, compared with the reference before their first use on a GPU.

In: the attention modules of a model. Out: nothing, or HostLacks (H248). Sizes are those of the modules, so that Triton
compiles nothing that no step needs. Modules whose kernels need more of a GPU than it has stay dense in recorded steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.selection import attend_chosen, chosen_of
from ktc.model.attention.sparse import Sparse, unindexed
from ktc.model.attention.sparsity import Sparsity
from ktc.model.attention.split_decode import relative_error
from ktc.model.attention.step_index import IndexedLayer

_BOUND: Final = 0.01  # of the relative error of bf16 numbers
_MOST: Final = 64 * 512  # numbers that a program adds up in its registers
_LENGTH, _ROOM, _READ = 600, 1024, 64  # positions of the check, of its memory, and those that are chosen


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Query heads, key heads, the width of keys, that of rotary keys beside latents or 0, and that of values."""

    heads: int
    key_heads: int
    width: int
    rope: int
    value: int


def check_sparse_steps(modules: Iterable[Any], device: torch.device) -> None:
    """Check the kernels for the attention modules that are sparse in recorded steps. Raises HostLacks (H248).

    Modules whose kernels the device cannot run are marked as `unfit`.
    """
    for module in modules:
        sparse: Sparse = module.sparse
        sizes = None if unindexed(module, device.type) else _sizes(module)
        if sizes is not None:
            settings = sparse.sparsity
            unfit = _check(sizes, Sparsity(_READ, 4, 16, settings.index, settings.shared), device)
            module.sparse = replace(sparse, unfit=unfit)


def _sizes(module: Any) -> _Sizes | None:
    """Return the sizes of a module, None where its config has other names for them."""
    absorption = getattr(module, "absorption", None)
    if absorption is not None:
        sizes = absorption.sizes
        return _Sizes(sizes.heads, 1, sizes.latent, sizes.rope, sizes.latent)
    heads = getattr(module.config, "num_attention_heads", None)
    key_heads = getattr(module.config, "num_key_value_heads", heads)
    if heads is None or key_heads is None:
        return None
    return _Sizes(heads, key_heads, module.head_dim, 0, module.head_dim)


@functools.cache
def _check(sizes: _Sizes, sparsity: Sparsity, device: torch.device) -> str:
    """Return why a device cannot run the kernels, "" if it can. Raises HostLacks (H248) where they are wrong."""
    from triton.errors import TritonError

    from ktc.model.attention.sparse_kernels import StepKeys, attend_sparsely

    together = sizes.heads // (sizes.key_heads if sparsity.shared else sizes.heads)
    if together * sizes.value > _MOST:
        return f"sparse attention of {together} heads of {sizes.value} values is more than a program adds up"
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    keys = random(1, sizes.key_heads, _ROOM, sizes.width)
    values = random(1, sizes.key_heads, _ROOM, sizes.rope or sizes.value)
    query = random(1, sizes.heads, 1, sizes.width + sizes.rope)
    layer = IndexedLayer(sparsity.index, sizes.rope > 0, sparsity.budget)
    kv = KVCacheView(keys, keys, values) if sizes.rope else KVCacheView(keys, values)
    index = layer.index(keys, values)
    layer.encode(index, keys, values, 0, slice(0, _LENGTH - 1))
    mask = (torch.arange(_ROOM, device=device) < _LENGTH).view(1, 1, 1, _ROOM)
    step = StepKeys(kv, index, torch.tensor([_LENGTH - 1], device=device), mask)
    with torch.no_grad():
        try:
            summed, choice = attend_sparsely(query, step, scale=0.1, sparsity=sparsity)
        except TritonError as error:  # as of too little shared memory for many heads that choose together
            words = str(error).strip().partition("\n")[0] or type(error).__name__
            return f"{device} cannot run sparse attention of {sizes.heads} heads in recorded steps: {words}"
        taken = choice.taken(sparsity.k)
        wanted = attend_chosen(query, kv, chosen_of(taken[:, None], _ROOM), scale=0.1)
    error, count = relative_error(summed.double(), wanted.double()), int(taken.sum(-1).min())
    if not error <= _BOUND or count < sparsity.budget or bool(taken[..., _LENGTH:].any()):
        message = f"sparse attention of new tokens is wrong on {device}: an error of {error:.2g}, {count} positions"
        hint = "use the tested versions of torch and Triton (constraints.txt), or leave out `sparse_attention`"
        raise HostLacks(Diagnostic("H248", message, hint=hint))
    return ""

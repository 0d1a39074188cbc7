"""Keys and values of all positions for stock latent attention: by the module's own code, or by a kernel on a GPU.

In: a module that absorbs, its latents and rotary keys. Out: what the module's `EXPAND` returns. `check_joined_keys`
compares the kernel with that code of each class, on numbers that bf16 has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.attention.latent_sizes import LatentSizes
from ktc.model.attention.split_decode import SplitDecode, has_kernels
from ktc.model.hf.latent_cache import EXPAND
from ktc.model.hf.patching import stock_class
from ktc.model.linears.gemv import is_plain, is_traced


def expanded(module: Any, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of all positions. The kernel takes calls on a GPU that nothing differentiates."""
    expand = getattr(stock_class(module), EXPAND)
    if not _joins(module.decode, latent, k_rope):
        return expand(module, latent, k_rope)
    projected: Tensor = module.get_submodule(module.absorption.kv_b)(latent[:, 0])
    if not is_plain(projected) or projected.stride(-1) != 1:
        return expand(_Projected(module, projected), latent, k_rope)
    return _joined(module.absorption.sizes, projected, k_rope)


def check_joined_keys(module: Any, device: torch.device) -> None:
    """Compare the kernel with the module's own code, in which numbers stand for its projection.

    Raises HostLacks (H248).
    """
    if not has_kernels(device):
        return
    sizes: LatentSizes = module.absorption.sizes
    projected = _numbers(2, 3, sizes.heads * (sizes.nope + sizes.value), device=device)
    latent, stock = _numbers(2, 1, 3, sizes.latent, device=device), stock_class(module)
    for dtype in (torch.bfloat16, torch.float32):  # its rotary keys may be wider than its projection
        k_rope = (_numbers(2, 1, 3, sizes.rope, device=device).double() / 7).to(dtype)
        with torch.no_grad():
            by_kernel = _joined(sizes, projected, k_rope)
            by_module = getattr(stock, EXPAND)(_Projected(module, projected), latent, k_rope)
        if any(
            one.dtype != two.dtype or not torch.equal(one, two) for one, two in zip(by_kernel, by_module, strict=True)
        ):
            message = f"keys of `{stock.__name__}` are put together wrongly on {device}"
            hint = "use the tested versions of torch, Triton and transformers (constraints.txt), or `kernel = sdpa`"
            raise HostLacks(Diagnostic("H248", message, hint=hint))


class _Projected:
    """A module whose up-projection has been computed: its own code reads everything else from the module."""

    def __init__(self, module: Any, projected: Tensor) -> None:
        self._module = module

        def project(latent: Tensor) -> Tensor:
            return projected.view(*latent.shape[:-1], -1)

        setattr(self, module.absorption.kv_b, project)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _numbers(*shape: int, device: torch.device) -> Tensor:
    return (torch.arange(torch.Size(shape).numel(), device=device) % 251).view(shape).bfloat16()


def _joined(sizes: LatentSizes, projected: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of a projection (B, L, H (n + v)), whose dtype both have."""
    from ktc.model.attention.joined_kernels import joined

    values = projected.view(*projected.shape[:2], sizes.heads, -1)[..., sizes.nope :].transpose(1, 2)
    return joined(projected, k_rope, sizes.heads, sizes.nope), values


def _joins(decode: object, latent: Tensor, k_rope: Tensor) -> bool:
    """Return whether a kernel puts keys together: those on a GPU that nothing differentiates."""
    device = latent.device
    if not isinstance(decode, SplitDecode) or device.type != decode.device or torch.is_grad_enabled() or is_traced():
        return False
    if torch.is_autocast_enabled(device.type) or not (is_plain(latent) and is_plain(k_rope)):
        return False
    return k_rope.stride(-1) == 1 and has_kernels(device)

"""The up-projection of keys and values as two matrices per head, with LoRA on it in factored form.

In: the module at `kv_b`, adapted by PEFT or not. Out: `UpProjection`. A module that computes more than its weight and
plain LoRA (DoRA, dropout in training, hooks, a bias) has none; the reason is returned instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from ktc.model.experts.trained.lora import Factors
from ktc.model.linears.lora_linear import FusedLinear
from ktc.model.linears.plain import has_hooks, is_plain_linear


@dataclass(frozen=True, slots=True)
class UpProjection:
    """`weight` (H, n + v, c): the rows of each head, those of the keys first. `nope` is n.

    The factors of each adapter are `a` (rank, c) and `b` (H, n + v, rank).
    """

    weight: Tensor
    nope: int
    adapters: tuple[Factors, ...] = ()

    def parts(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of queries that meet latents and rotary keys: (B, H, T, n + r) -> (..., c), (..., r)."""
        return self.into_latent(query[..., : self.nope]), query[..., self.nope :]

    def absorbed(self, query: Tensor) -> Tensor:
        """Return both parts: (B, H, T, n + r) -> (B, H, T, c + r)."""
        return torch.cat(self.parts(query), dim=-1)

    def into_latent(self, q_nope: Tensor) -> Tensor:
        """Absorb W_UK into queries: (B, H, T, n) -> (B, H, T, c)."""
        out = _per_head(q_nope, self.weight[:, : self.nope])
        for adapter in self.adapters:
            low = _per_head(q_nope.to(adapter.b.dtype), adapter.b[:, : self.nope])
            out = out + (low @ adapter.a * adapter.scale).to(out.dtype)
        return out

    def out_of_latent(self, summed: Tensor) -> Tensor:
        """Apply W_UV to weighted sums of latents: (B, H, T, c) -> (B, H, T, v)."""
        out = _by_rows(summed, self.weight[:, self.nope :])
        for adapter in self.adapters:
            low = summed.to(adapter.a.dtype) @ adapter.a.T
            out = out + (_by_rows(low, adapter.b[:, self.nope :]) * adapter.scale).to(out.dtype)
        return out


def _per_head(rows: Tensor, matrices: Tensor) -> Tensor:
    """(B, H, T, k), (H, k, m) -> (B, H, T, m)."""
    B, H, T, _ = rows.shape
    out = torch.bmm(rows.transpose(0, 1).reshape(H, B * T, -1), matrices)
    return out.view(H, B, T, -1).transpose(0, 1)


def _by_rows(rows: Tensor, matrices: Tensor) -> Tensor:
    """(B, H, T, k), (H, m, k) -> (B, H, T, m). In bf16 the matrices as second factors take six times as long."""
    B, H, T, _ = rows.shape
    out = torch.bmm(matrices, rows.transpose(0, 1).reshape(H, B * T, -1).transpose(1, 2))
    return out.view(H, -1, B, T).permute(2, 0, 3, 1)


def up_projection(module: nn.Module, heads: int, nope: int) -> UpProjection | str:
    """Return the up-projection that calling `module` applies, or the reason why it has none."""
    adapters: tuple[Factors, ...] | str = ()
    base = module
    if isinstance(module, LoraLinear):
        base = module.get_base_layer()
        adapters = _adapters(module, heads)
        if isinstance(adapters, str):
            return adapters
        if has_hooks(module):
            return "it has hooks"
    plain = is_plain_linear(base) or (type(base) is FusedLinear and not has_hooks(base))
    if not plain or not isinstance(base, nn.Linear):
        return f"it is a `{type(base).__name__}` with code of its own"
    if "bias" in dict(base.named_parameters(recurse=False)):
        return "it has a bias"
    return UpProjection(base.weight.view(heads, -1, base.weight.shape[1]), nope, adapters)


def _adapters(module: LoraLinear, heads: int) -> tuple[Factors, ...] | str:
    layer = cast("Any", module)
    if layer.disable_adapters:
        return "merged adapters are disabled" if layer.merged else ()
    if layer.merged:
        return ()
    factors: list[Factors] = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        a, b = layer.lora_A[name], layer.lora_B[name]
        drops = isinstance(layer.lora_dropout[name], nn.Dropout) and layer.training
        if name in layer.lora_variant or b.bias is not None or layer.fan_in_fan_out:
            return f"its adapter `{name}` is not plain LoRA"
        if drops and layer.lora_dropout[name].p > 0:
            return f"its adapter `{name}` has dropout in training"
        factors.append(Factors(a.weight, b.weight.view(heads, -1, b.weight.shape[1]), float(layer.scaling[name])))
    return tuple(factors)

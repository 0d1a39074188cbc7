"""Routed experts of a layer and the arguments that their layer calls them with, by role.

In: a step of the recipe, and a call of stock or compiled experts. Out: hidden states, and the choices of the tokens; or
the arguments of a call. Experts of transformers take hidden states, indices and weights in this order. A module of the
model's own names its arguments, and may take only rows that are sorted by expert (`Called`). Experts in a list
are called one by one, and have no call of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktc.model.experts.own_module import Called, Role
from ktc.model.manifest.manifest import Manifest, Rewrite, config_of

_UNCHOSEN = -1


@dataclass(frozen=True, slots=True)
class Experts:
    """Where a layer's routed experts are: the module's path in the layer, its number of experts, and top k.

    `inputs` names the parameters of a module of the model's own with their roles, and `called` is their meaning; empty
    for experts of transformers and for a list.
    """

    path: str
    num_experts: int
    top_k: int
    inputs: tuple[tuple[str, Role], ...] = ()
    called: Called = "routed"


def own_step(step: Rewrite, manifest: Manifest) -> Rewrite | None:
    """Return the step that reads the model's own module before `step` replaces it; `None` for other experts."""
    return next((s for s in manifest.rewrites if s.module == "own_experts" and s.fqn == step.fqn), None)


def experts_of(step: Rewrite, manifest: Manifest, path: str) -> Experts:
    """Return the experts that `step` puts in place, at `path` in their layer."""
    about = (path, int(step.args["num_experts"]), int(step.args["top_k"]))
    reading = own_step(step, manifest)
    if reading is None:
        return Experts(*about)
    config = config_of(reading)
    return Experts(*about, tuple(config.inputs.items()), config.called)


def roles_of(experts: Experts, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Role, Any]:
    """Return the arguments of a call of `module`, stock or compiled, by role."""
    if experts.inputs:
        given = {**dict(zip((name for name, _ in experts.inputs), args, strict=False)), **kwargs}
        return {role: given.get(name) for name, role in experts.inputs}
    signature = inspect.signature(type(module).forward)  # the module's own may be wrapped
    _, hidden, index, weights, *_ = signature.bind(module, *args, **kwargs).arguments.values()
    return {"hidden": hidden, "index": index, "weights": weights}


def chosen(experts: Experts, roles: Mapping[Role, Any]) -> Tensor | None:
    """Return the choices (T, K) of a call, in any order; `None` if they are not seen.

    Rows that are sorted by expert are zero where the router did not choose the expert. K is then the number of
    experts, and other numbers are -1.
    """
    if experts.called == "by_expert":
        rows = roles["hidden"].detach().reshape(experts.num_experts, -1, roles["hidden"].shape[-1])
        numbers = torch.arange(experts.num_experts, device=rows.device)
        return torch.where((rows != 0).any(-1).t(), numbers, _UNCHOSEN).cpu()
    index = roles["index"]
    if not isinstance(index, Tensor) or index.is_floating_point():
        return None
    return index.detach().reshape(-1, index.shape[-1]).cpu()


def routed_rows(experts: Experts, roles: Mapping[Role, Any]) -> Tensor:
    """Return the hidden states of a call in fp32, without rows of no token, in their number of dimensions."""
    hidden: Tensor = roles["hidden"].detach().float().cpu()
    rows = hidden.reshape(-1, hidden.shape[-1])
    if experts.called == "by_expert":
        rows = rows[(rows != 0).any(-1)]
    return rows.reshape(*[1] * (hidden.dim() - 2), *rows.shape)


def call_alone(
    experts: Experts, module: nn.Module, rows: Tensor, index: Tensor, weights: Tensor, expert: Tensor
) -> Tensor:
    """Return the outputs (N, H) of stock or compiled experts for rows that each reach one `expert` (N,).

    `rows` is (..., N, H). `index` and `weights` (N, K) choose that expert; each expert has as many rows.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    if experts.called == "by_expert":
        order = expert.argsort(stable=True)
        (name, _), *_ = experts.inputs
        sorted_rows = module(**{name: flat[order].reshape(rows.shape)}).reshape(flat.shape)
        return torch.empty_like(sorted_rows).index_copy_(0, order.to(sorted_rows.device), sorted_rows)
    if not experts.inputs:
        return module(rows, index, weights).reshape(flat.shape)
    given: dict[Role, Tensor] = {"hidden": rows, "index": index, "weights": weights}
    return module(**{name: given[role] for name, role in experts.inputs}).reshape(flat.shape)

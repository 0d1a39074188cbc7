"""The recipe carried out: in a stock model and the recipe, out the same model with the modules put in place.

On meta tensors nothing is allocated for what a kernel packs; on a model with real weights they move into the new
modules. Refused: a step for a module that is not there or of another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.runtime.fused_moe import FusedMoe
from ktc.runtime.kernel_library import Kernel, KernelLibrary
from ktc.runtime.lora_linear import KTLinear
from ktc.runtime.manifest import Rewrite


def realise(model: nn.Module, recipe: Sequence[Rewrite], kernels: KernelLibrary | None) -> None:
    """Put every module of `recipe` into `model`, in place. Without `kernels` each one is its PyTorch reference.

    Raises `InputRefused` (L420) where the model has no such module: it was compiled for another transformers version.
    """
    for step in recipe:
        parent, _, name = step.fqn.rpartition(".")
        try:
            old = model.get_submodule(step.fqn)
        except AttributeError as error:
            raise InputRefused(_no_such_module(step, "no module")) from error
        kernel = kernels.kernel(step.kernel) if kernels is not None and step.kernel is not None else None
        try:
            made = _MAKERS[step.module](old, step, kernel)
        except ValueError as error:  # the sizes of another model, or no activation of ours
            raise InputRefused(_no_such_module(step, f"a `{type(old).__name__}` of another kind ({error})")) from error
        setattr(model.get_submodule(parent), name, made)


def _lora_linear(old: nn.Module, step: Rewrite, kernel: Kernel | None) -> nn.Module:
    if not isinstance(old, nn.Linear):
        raise InputRefused(_no_such_module(step, f"a `{type(old).__name__}`"))
    return KTLinear.from_linear(old)


def _fused_moe(old: nn.Module, step: Rewrite, kernel: Kernel | None) -> nn.Module:
    gate_up, down = (getattr(old, name, None) for name in ("gate_up_proj", "down_proj"))
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        raise InputRefused(_no_such_module(step, f"a `{type(old).__name__}`"))
    args = step.args
    experts, hidden, inner = args["num_experts"], args["hidden"], args["intermediate"]
    if (tuple(gate_up.shape), tuple(down.shape)) != ((experts, 2 * inner, hidden), (experts, hidden, inner)):
        found = f"experts of other sizes: {list(gate_up.shape)} and {list(down.shape)}"
        raise InputRefused(_no_such_module(step, found))
    made = FusedMoe(
        experts,
        hidden,
        inner,
        args["top_k"],
        args["activation"],
        kernel=kernel,
        threads=args["threads"],
        dtype=gate_up.dtype,
        activations=args["activations"],
    )
    if not gate_up.is_meta:
        take_experts(made, gate_up, down)
    return made.train(old.training)


def take_experts(module: FusedMoe, gate_up: Tensor, down: Tensor, first: int = 0) -> None:
    """Load experts `first`, `first + 1`, ... from `gate_up` (n, 2I, H) and `down` (n, H, I)."""
    with torch.no_grad():
        for offset in range(gate_up.shape[0]):
            gate, up = gate_up[offset].chunk(2)
            module.load_expert(first + offset, "gate", gate)
            module.load_expert(first + offset, "up", up)
            module.load_expert(first + offset, "down", down[offset])


def _no_such_module(step: Rewrite, found: str) -> Diagnostic:
    return Diagnostic(
        "L420",
        f"rule `{step.rule}` puts `{step.module}` at `{step.fqn}`, where this model has {found}",
        hint="compile it again with the installed transformers",
    )


_MAKERS: Mapping[str, Callable[[nn.Module, Rewrite, Kernel | None], nn.Module]] = {
    "fused_moe": _fused_moe,
    "lora_linear": _lora_linear,
}

"""The recipe carried out: in a stock model and the recipe, out the same model with the modules put in place.

On meta tensors nothing is allocated for what a kernel packs; on a model with real weights they move into the new
modules. Refused: a step for a module that is not there or of another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.experts.backend import Offload
from ktc.experts.form import parse_form
from ktc.experts.kernel_library import Kernel, KernelLibrary
from ktc.experts.module import FusedMoe
from ktc.experts.stock_layout import StockTensor, canonical_parts, stock_names, stock_shape
from ktc.linears.gemv import Gemv
from ktc.linears.lora_linear import KTLinear
from ktc.model.graph_block import graph_block
from ktc.model.manifest import Rewrite


def realise(
    model: nn.Module, recipe: Sequence[Rewrite], kernels: KernelLibrary | None, folder: Path | None = None
) -> None:
    """Put every module of `recipe` into `model`, in place. Without `kernels` each one is its PyTorch reference.

    `folder` holds the code of the blocks that the recipe replaces by their graphs.
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
            if step.module == "graph_block":
                assert folder is not None, "a recipe with code of blocks comes from a folder"
                graph_block(old, step.args, folder)
                continue
            made = _MAKERS[step.module](old, step, kernel)
        except ValueError as error:  # the sizes of another model, or no activation of ours
            raise InputRefused(_no_such_module(step, f"a `{type(old).__name__}` of another kind ({error})")) from error
        setattr(model.get_submodule(parent), name, made)


def _linear(old: nn.Module, step: Rewrite, kernel: Kernel | None) -> nn.Module:
    if not isinstance(old, nn.Linear):
        raise InputRefused(_no_such_module(step, f"a `{type(old).__name__}`"))
    return KTLinear.from_linear(old, Gemv(kernel, step.args["threads"]) if kernel is not None else None)


def _fused_moe(old: nn.Module, step: Rewrite, kernel: Kernel | None) -> nn.Module:
    args = step.args
    form = parse_form(args["form"])
    experts, hidden, inner = args["num_experts"], args["hidden"], args["intermediate"]
    stacked: dict[StockTensor, Tensor] = {}
    for name in stock_names(form):
        tensor = getattr(old, name, None)
        if not isinstance(tensor, Tensor):
            raise InputRefused(_no_such_module(step, f"a `{type(old).__name__}` without `{name}`"))
        wanted = stock_shape(form, name, experts, hidden, inner)
        if tuple(tensor.shape) != wanted:
            found = f"experts of other sizes: `{name}` {list(tensor.shape)} instead of {list(wanted)}"
            raise InputRefused(_no_such_module(step, found))
        stacked[name] = tensor
    made = FusedMoe(
        experts,
        hidden,
        inner,
        args["top_k"],
        form,
        kernel=kernel,
        threads=args["threads"],
        dtype=stacked["down_proj"].dtype,
        activations=args["activations"],
        numa=args["numa"],
        offload=Offload(torch.device(args["prefill"]), args["prefill_tokens"]) if args["prefill"] else None,
    )
    if not stacked["down_proj"].is_meta:
        take_experts(made, stacked)
    return made.train(old.training)


def take_experts(module: FusedMoe, stacked: Mapping[StockTensor, Tensor], first: int = 0) -> None:
    """Load experts `first`, `first + 1`, ... from the stock tensors of the module's form, by their names."""
    with torch.no_grad():
        for name, tensor in stacked.items():
            for offset, slice_ in enumerate(tensor):
                for part, matrix in canonical_parts(module.form, name, slice_):
                    module.load_expert(first + offset, part, matrix)


def _no_such_module(step: Rewrite, found: str) -> Diagnostic:
    return Diagnostic(
        "L420",
        f"rule `{step.rule}` puts `{step.module}` at `{step.fqn}`, where this model has {found}",
        hint="compile it again with the installed transformers",
    )


_MAKERS: Mapping[str, Callable[[nn.Module, Rewrite, Kernel | None], nn.Module]] = {
    "fused_moe": _fused_moe,
    "kt_linear": _linear,
    "lora_linear": _linear,
}

"""The recipe carried out: in a stock model and the recipe, out the same model with the modules put in place.

On meta tensors nothing is allocated for what a kernel packs; on a model with real weights they move into the new
modules. Refused: a step for a module that is not there or of another kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.own_module import StockExperts, parse_called, parse_held, parse_inputs, stock_experts
from ktc.model.kernels.form import parse_form
from ktc.model.kernels.kernel_library import Kernel, KernelLibrary
from ktc.model.linears.lora_linear import KTLinear
from ktc.model.linears.plain import is_plain_linear
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.linears.streamed_linear import StreamedLinear
from ktc.model.linears.trained_linear import TrainedLinear
from ktc.model.loading.graph_block import graph_block
from ktc.model.manifest.manifest import Rewrite
from ktc.model.targets import MODULES
from ktc.model.targets.kt_linear import STORED_LINEAR
from ktc.model.targets.module_target import WrongModule


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
            if step.module == "own_experts":
                made = own_experts(old, step.args)
            elif step.module == "streamed_linear":
                made = streamed_linear(old, step)
            elif step.module == STORED_LINEAR:
                made = stored_linear(old, step, kernel)
            else:
                made = MODULES[step.module].realise(old, step.args, kernel)
        except WrongModule as error:
            raise InputRefused(_no_such_module(step, str(error))) from error
        except ValueError as error:  # the sizes of another model, or no activation of ours
            raise InputRefused(_no_such_module(step, f"a `{type(old).__name__}` of another kind ({error})")) from error
        if isinstance(made, FusedMoe):
            made.weights.fqn = step.fqn
        if isinstance(made, TrainedLinear):
            made.fqn = step.fqn
        setattr(model.get_submodule(parent), name, made)


def own_experts(module: nn.Module, args: Mapping[str, Any]) -> StockExperts:
    """Return the tensors of an experts module of the model's own, for the step that follows. Raises `ValueError`."""
    form, parts = parse_form(args["form"]), parse_held(args["parts"])
    sizes = (args["num_experts"], args["hidden"], args["intermediate"])
    inputs, called = parse_inputs(args["inputs"]), parse_called(args["called"])
    return StockExperts(stock_experts(module, form, parts, sizes), inputs, called)


def streamed_linear(module: nn.Module, step: Rewrite) -> StreamedLinear:
    """Return the layer that streams the weights of `module`, from `begin` on. Raises `WrongModule`."""
    if not isinstance(module, nn.Linear):
        raise WrongModule(f"a `{type(module).__name__}`")
    return StreamedLinear.from_linear(module, torch.device(step.device), step.args["stream_buffer"])


def stored_linear(module: nn.Module, step: Rewrite, kernel: Kernel | None) -> nn.Linear:
    """Return the layer that takes the blocks of a file, without `kernel` one with PyTorch's weight and product.

    Raises `WrongModule`.
    """
    if not isinstance(module, nn.Linear) or not is_plain_linear(module):
        raise WrongModule(f"a `{type(module).__name__}`" + " with code of its own" * isinstance(module, nn.Linear))
    if kernel is None:
        return KTLinear.from_linear(module)
    return StoredLinear.from_linear(module, kernel, step.args["format"], step.args["threads"])


def _no_such_module(step: Rewrite, found: str) -> Diagnostic:
    return Diagnostic(
        "L420",
        f"rule `{step.rule}` puts `{step.module}` at `{step.fqn}`, where this model has {found}",
        hint="compile it again: the modules of the model are not those that were compiled",
    )

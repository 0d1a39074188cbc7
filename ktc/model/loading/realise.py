"""The modules of a recipe, put into a stock model.

In: a stock model and the recipe. Out: the same model with the modules in place. On meta tensors nothing is allocated
for weights that a kernel packs. On a model with real weights these move into the new modules. Refused: a step for a
module that is missing or of another kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.own_module import StockExperts, stock_experts
from ktc.model.kernels.form import parse_form
from ktc.model.kernels.kernel_library import Kernel, KernelLibrary
from ktc.model.linears.lora_linear import FusedLinear
from ktc.model.linears.plain import is_plain_linear
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.linears.streamed_linear import StreamedLinear
from ktc.model.linears.trained_linear import TrainedLinear
from ktc.model.loading.graph_block import graph_block
from ktc.model.manifest.configs import GraphBlockConfig, HostTableConfig, OwnExpertsConfig, StreamedLinearConfig
from ktc.model.manifest.manifest import Rewrite, config_of
from ktc.model.targets import MODULES
from ktc.model.targets.kt_linear import StoredLinearConfig
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
            made = _made(old, step, kernel, folder)
        except WrongModule as error:
            raise InputRefused(_no_such_module(step, str(error))) from error
        except ValueError as error:  # the sizes of another model, or an unknown activation
            raise InputRefused(_no_such_module(step, f"a `{type(old).__name__}` of another kind ({error})")) from error
        if isinstance(made, FusedMoe):
            made.weights.fqn = step.fqn
        if isinstance(made, TrainedLinear):
            made.fqn = step.fqn
        if made is not old:
            setattr(model.get_submodule(parent), name, made)


def _made(old: nn.Module, step: Rewrite, kernel: Kernel | None, folder: Path | None) -> nn.Module:
    """Return the module of a step; a block that runs its graph is `old` itself."""
    match config_of(step):
        case GraphBlockConfig() as config:
            assert folder is not None, "a recipe with code of blocks comes from a folder"
            return graph_block(old, config, folder)
        case OwnExpertsConfig() as config:
            return own_experts(old, config)
        case StreamedLinearConfig() as config:
            return StreamedLinear.from_linear(_linear(old), torch.device(step.device), config.stream_buffer)
        case HostTableConfig():
            return old  # its weight is shown to the GPU once it is loaded
        case StoredLinearConfig() as config:
            linear = _linear(old, plain=True)
            if kernel is None:
                return FusedLinear.from_linear(linear)
            device = torch.device(step.device)
            return StoredLinear.from_linear(linear, kernel, config.format, config.threads, device)
        case config:
            return MODULES[step.module].realise(old, config, kernel)


def own_experts(module: nn.Module, config: OwnExpertsConfig) -> StockExperts:
    """Return the tensors of an experts module of the model's own, for the step that follows. Raises `ValueError`."""
    sizes = (config.num_experts, config.hidden, config.intermediate)
    stacked = stock_experts(module, parse_form(config.form), config.parts, sizes)
    return StockExperts(stacked, config.inputs, config.called)


def _linear(module: nn.Module, *, plain: bool = False) -> nn.Linear:
    """Return `module` as a linear layer; with `plain` it must have no code of its own. Raises `WrongModule`."""
    if not isinstance(module, nn.Linear) or (plain and not is_plain_linear(module)):
        raise WrongModule(f"a `{type(module).__name__}`" + " with code of its own" * isinstance(module, nn.Linear))
    return module


def _no_such_module(step: Rewrite, present: str) -> Diagnostic:
    return Diagnostic(
        "L420",
        f"rule `{step.rule}` puts `{step.module}` at `{step.fqn}`, where this model has {present}",
        hint="compile it again: the modules of the model are not those that were compiled",
    )

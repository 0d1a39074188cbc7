"""`FusedLinear` in a graph and in a model: what the targets on linear layers share.

`FusedLinear` is an `nn.Linear` with the same weight, so PEFT adapts it and the checkpoint's names stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx, nn

from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.experts.trained.weight_training import WeightTraining
from ktc.model.graph import ops
from ktc.model.kernels.kernel_library import Kernel, permitted_threads
from ktc.model.linears.gemv import Gemv
from ktc.model.linears.lora_linear import FusedLinear
from ktc.model.linears.many_rows import ManyRows
from ktc.model.linears.plain import is_plain_linear
from ktc.model.linears.trained_linear import TrainedLinear
from ktc.model.targets.module_target import WrongModule

if TYPE_CHECKING:
    from ktc.model.targets.kt_linear import LinearConfig


def linear_in_graph(graph: fx.GraphModule, node: fx.Node, fqn: str) -> FusedLinear:
    """Return the module for a linear node, with the weights of the graph."""
    weight, bias = graph.get_parameter(f"{fqn}.weight"), ops.argument(node, "bias")
    with torch.device("meta"):
        linear = FusedLinear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach())
    if bias is not None:
        linear.bias = nn.Parameter(graph.get_parameter(f"{fqn}.bias").detach())
    return linear


def linear_of_model(old: nn.Module, config: LinearConfig, kernel: Kernel | None) -> FusedLinear:
    """Return the module for a stock layer. Raises `WrongModule` for a module that is not an `nn.Linear` alone."""
    layer, grid = _plain(old), Int4Grid.parse(config.grid)
    if kernel is None:
        return FusedLinear.from_linear(layer, grid=grid)
    threads, many = config.threads, config.prefill_kernel
    decode = Gemv(kernel, threads) if config.decode_kernel == "gemv" else None
    # The kernel of many rows multiplies bf16; without bf16 weights the product is PyTorch's.
    product = None
    if many != "torch" and kernel.dtype == "bf16":
        product = ManyRows(kernel, permitted_threads(threads), many)
    return FusedLinear.from_linear(layer, decode, product, grid)


def linear_on_grid(old: nn.Module, grid: str | None = None) -> FusedLinear:
    """Return the module for a stock layer whose frozen weight may be rounded. Raises as `linear_of_model`."""
    return FusedLinear.from_linear(_plain(old), grid=Int4Grid.parse(grid))


def trained_linear_of_model(old: nn.Module, training: WeightTraining) -> TrainedLinear:
    """Return the module for a stock layer whose weight changes in training. Raises as `linear_of_model`."""
    return TrainedLinear.from_linear(_plain(old), training)


def _plain(old: nn.Module) -> nn.Linear:
    if not isinstance(old, nn.Linear) or not is_plain_linear(old):
        raise WrongModule(f"a `{type(old).__name__}`" + " with code of its own" * isinstance(old, nn.Linear))
    return old

"""`KTLinear` in a graph and in a model: what the targets on linear layers share.

`KTLinear` is an `nn.Linear` with the same weight, so PEFT adapts it and the checkpoint's names stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.experts.weight_training import WeightTraining
from ktc.model.graph import ops
from ktc.model.kernels.kernel_library import Kernel, permitted_threads
from ktc.model.linears.gemv import Gemv
from ktc.model.linears.lora_linear import KTLinear
from ktc.model.linears.many_rows import ManyRows
from ktc.model.linears.plain import is_plain_linear
from ktc.model.linears.trained_linear import TrainedLinear
from ktc.model.targets.module_target import WrongModule


def linear_in_graph(graph: fx.GraphModule, node: fx.Node, fqn: str) -> KTLinear:
    """Return the module for a linear node, with the weights of the graph."""
    weight, bias = graph.get_parameter(f"{fqn}.weight"), ops.argument(node, "bias")
    with torch.device("meta"):
        linear = KTLinear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach())
    if bias is not None:
        linear.bias = nn.Parameter(graph.get_parameter(f"{fqn}.bias").detach())
    return linear


def linear_of_model(old: nn.Module, arguments: Mapping[str, Any], kernel: Kernel | None) -> KTLinear:
    """Return the module for a stock layer. Raises `WrongModule` for a module that is not an `nn.Linear` alone."""
    if not isinstance(old, nn.Linear) or not is_plain_linear(old):
        raise WrongModule(f"a `{type(old).__name__}`" + " with code of its own" * isinstance(old, nn.Linear))
    grid = Int4Grid.parse(str(arguments.get("grid", "")))
    if kernel is None:
        return KTLinear.from_linear(old, grid=grid)
    threads, few, many = arguments["threads"], arguments["few"], arguments["many"]
    decode = Gemv(kernel, threads) if few == "gemv" else None
    # The kernel of many rows multiplies bf16; without bf16 weights the product is PyTorch's.
    product = None
    if many != "torch" and kernel.dtype == "bf16":
        product = ManyRows(kernel, permitted_threads(threads), many)
    return KTLinear.from_linear(old, decode, product, grid)


def linear_on_grid(old: nn.Module, grid: str) -> KTLinear:
    """Return the module for a stock layer whose frozen weight is rounded. Raises as `linear_of_model` does."""
    return linear_of_model(old, {"grid": grid}, None)


def trained_linear_of_model(old: nn.Module, grid: str, masters: str, merged: str) -> TrainedLinear:
    """Return the module for a stock layer whose weight changes in training. Raises as `linear_of_model` does."""
    if not isinstance(old, nn.Linear) or not is_plain_linear(old):
        raise WrongModule(f"a `{type(old).__name__}`" + " with code of its own" * isinstance(old, nn.Linear))
    return TrainedLinear.from_linear(old, WeightTraining.parse(grid, masters, merged))

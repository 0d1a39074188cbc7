"""A block whose own code loops over experts, replaced by its captured graph: the step `graph_block` of the recipe.

In: the stock block and the file of OUT that holds the graph as Python. Out: the same module, with its children at their
names, running that code; its list of experts is one stack, for the step that follows to put a kernel there. Refused: a
file that is not such code, a list of other experts.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ktc.foundation.regular_files import read_regular
from ktc.model.experts.layouts.stock_layout import StockTensor, stock_tensors
from ktc.model.experts.own_module import ExpertStack
from ktc.model.hf.patching import Patch
from ktc.model.kernels.form import ExpertsForm, parse_form
from ktc.model.loading.python_files import module_of
from ktc.model.manifest.configs import GraphBlockConfig

Forward = Callable[..., Any]
_PREFIX = "ktc_block_"  # of the names of blocks' modules


def graph_block(block: nn.Module, config: GraphBlockConfig, folder: Path) -> nn.Module:
    """Return `block` itself, patched with its graph.

    Raises `ValueError` where the config is that of another block.
    """
    experts = block.get_submodule(config.experts)
    if not isinstance(experts, nn.ModuleList):
        raise ValueError(f"`{config.experts}` is a `{type(experts).__name__}`")
    sizes = (config.num_experts, config.hidden, config.intermediate)
    stacked = stacked_experts(experts, parse_form(config.form), config.parts, sizes)
    block.set_submodule(config.experts, ExpertStack(stacked))
    graph: type[Patch] = type("GraphBlock", (Patch,), {"forward": read_forward(folder / config.file)})
    return graph.put_on(block)


def stacked_experts(
    experts: nn.ModuleList, form: ExpertsForm, names: Mapping[str, str], sizes: tuple[int, int, int]
) -> dict[StockTensor, Tensor]:
    """Return the stock tensors of `form`, each stacked over all experts. `sizes` are the experts, H and I.

    Raises `ValueError` for a missing name, and experts of other sizes.
    """

    def piece(expert: nn.Module, name: str) -> Tensor:
        owner, _, leaf = names.get(name, "").rpartition(".")
        tensor = getattr(expert.get_submodule(owner), leaf, None)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"a `{type(expert).__name__}` has no `{names.get(name, name)}`")
        return tensor.detach()

    def matrices(part: str) -> Tensor:
        return torch.stack([piece(expert, part) for expert in experts])

    return stock_tensors(form, sizes, names.keys(), matrices)


@contextmanager
def modules_forgotten() -> Generator[None]:
    """Take the modules that `read_forward` makes inside the context out of the interpreter's list at its end."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(_PREFIX) and name not in before]:
            del sys.modules[name]


def read_forward(path: Path) -> Forward:
    """Return the function `forward` of a block's file. Raise `ValueError` for a file without one.

    The file becomes a module named after its contents, since `torch.compile` imports the modules of functions by name.
    """
    try:
        name = f"{_PREFIX}{hashlib.sha256(read_regular(path)).hexdigest()[:16]}"
        module = sys.modules[name] = module_of(path, name)
        return cast("Forward", module.forward)
    except (OSError, SyntaxError, AttributeError) as error:
        raise ValueError(f"`{path.name}` holds no block: {error}") from error

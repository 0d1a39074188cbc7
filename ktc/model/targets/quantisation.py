"""`Quantisation`: the part that `fake_quant` and `quantize` share, weights on a grid in linear layers and experts.

A linear layer becomes `KTLinear` or `TrainedLinear` at its FQN. Routed experts are quantised in the node of the target
that runs them. Where another rule gives a linear layer a kernel, the weights of that kernel's module are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ktc.model.targets.module_target import Arguments, ModuleTarget
from ktc.model.targets.settings import Bounds, Dtype, EnumName
from ktc.model.targets.target import NodeAction

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.kernels.kernel_library import Kernel


@dataclass(frozen=True, slots=True)
class Quantisation(ModuleTarget):
    """`group` weights along the contraction share a scale, -1: a row; `pack` is the layout that packed weights have.

    `scale_mode`: `scale_first` rounds the scale before the codes are chosen, as it is stored; `slime` keeps it in fp32
    for the codes and the product, as the trainer of that name does.
    """

    format: Annotated[Literal["int4", "int8", "fp8"], EnumName("quant")]
    group: Annotated[int, Bounds(-1, 4096)] = 32
    symmetric: bool = True
    scale: Dtype = "bf16"
    pack: Annotated[Literal["none", "int32x8", "gguf_q4_k"], EnumName("pack")] = "none"
    scale_mode: Annotated[Literal["scale_first", "slime"], EnumName("scale_mode")] = "scale_first"

    fills: ClassVar = "quant"
    accepts: ClassVar = ("linear", "experts", "moe", "mlp")
    inside: ClassVar = ("experts",)
    available: ClassVar = True
    built: ClassVar = {
        "format": ("int4",),
        "group": (32, 64, 128, -1),
        "symmetric": (True,),
        "scale": ("bf16",),
        "pack": ("none", "int32x8"),
    }
    arguments: ClassVar = {"grid": str, "masters": str, "merged": str}
    # Layouts of packed weights that hold one format only.
    packs: ClassVar[Mapping[str, str]] = {"int32x8": "int4", "gguf_q4_k": "int4"}

    @property
    def grid(self) -> str:
        """The grid as `Int4Grid` writes it."""
        return f"{self.format} {self.group} {self.scale_mode}"

    @property
    def is_built(self) -> bool:
        """Whether this version carries out all of its settings."""
        return all(self.settings[name] in values for name, values in self.built.items())

    @property
    def merges(self) -> bool:
        """Whether the adapter is added to the weights before they are rounded."""
        return False

    def put(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return `KTLinear` with the weights of the graph: rounding changes values, and no computation."""
        from ktc.model.targets.linear_module import linear_in_graph

        return linear_in_graph(graph, node, action.fqn)

    def recipe(self, action: NodeAction, node: fx.Node, host: Host) -> Arguments:
        """Return the grid, and how its weights train."""
        return action.weights.arguments

    @staticmethod
    def realise(old: nn.Module, arguments: Mapping[str, Any], kernel: Kernel | None) -> nn.Module:
        """Return the layer with its own weights, which the loader rounds once it has filled them."""
        from ktc.model.targets.linear_module import linear_on_grid, trained_linear_of_model

        if arguments["masters"] or arguments["merged"]:
            return trained_linear_of_model(old, arguments["grid"], arguments["masters"], arguments["merged"])
        return linear_on_grid(old, arguments["grid"])

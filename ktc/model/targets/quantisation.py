"""`Quantisation`: the part that `fake_quant` and `quantize` share, weights on a grid in linear layers and experts.

A linear layer becomes `FusedLinear` or `TrainedLinear` at its FQN. Routed experts are quantised in the node of the
target that runs them. Where another rule gives a linear layer a kernel, that kernel's module is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ktc.model.targets.module_target import ModuleTarget
from ktc.model.targets.settings import Bounds, EnumName
from ktc.model.targets.target import NodeAction, NodeLora

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.kernels.kernel_library import Kernel
    from ktc.model.targets.node_plan import CapturedNode, NodePlan


@dataclass(frozen=True, slots=True)
class RoundedConfig:
    """`grid` is an `Int4Grid` as text, `masters` the dtype of weights that train.

    `merged` adds an adapter to the weights before they are rounded.
    """

    grid: str
    masters: str | None
    merged: bool


@dataclass(frozen=True, slots=True)
class Quantisation(ModuleTarget):
    """`group` weights along the contraction share a scale, -1: a row; `pack` is the layout that packed weights have.

    `scale_mode`: `scale_first` rounds the scale before the codes are chosen, as it is stored; `slime` keeps it in fp32
    for the codes and the product, as the trainer of that name does.
    """

    format: Annotated[Literal["int4"], EnumName("quant")]
    group: Annotated[int, Bounds(-1, 4096)] = 32
    pack: Annotated[Literal["none", "int32x8"], EnumName("pack")] = "none"
    scale_mode: Annotated[Literal["scale_first", "slime"], EnumName("scale_mode")] = "scale_first"

    fixed_facet: ClassVar = "quant"
    accepts: ClassVar = ("linear", "experts", "moe", "mlp")
    default_captures: ClassVar = ("experts",)
    group_sizes: ClassVar = (32, 64, 128, -1)  # that kernels have, and codes in files
    config: ClassVar = RoundedConfig

    @property
    def grid(self) -> str:
        """The grid as `Int4Grid` writes it."""
        return f"{self.format} {self.group} {self.scale_mode}"

    @property
    def rounding(self) -> Quantisation:
        """The grid that weights are rounded to."""
        return self

    @property
    def merges(self) -> bool:
        """Whether the adapter is added to the weights before they are rounded."""
        return False

    def explain(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> tuple[str, ...]:
        """Return nothing: the plan explains all weights that are rounded or train together."""
        return ()

    def build_reference(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return `FusedLinear` with the weights of the graph: rounding changes values, and no computation."""
        from ktc.model.targets.linear_module import linear_in_graph

        return linear_in_graph(graph, node, action.fqn)

    def recipe(self, action: NodeAction, about: Mapping[str, Any], host: Host) -> RoundedConfig:
        """Return the grid, and how its weights train."""
        weights = action.weights
        return RoundedConfig(weights.grid, weights.masters or None, weights.merged)

    @staticmethod
    def realise(old: nn.Module, config: RoundedConfig, kernel: Kernel | None) -> nn.Module:
        """Return the layer with its own weights, which the loader rounds once it has filled them."""
        from ktc.model.experts.trained.weight_training import WeightTraining
        from ktc.model.targets.linear_module import linear_on_grid, trained_linear_of_model

        if config.masters or config.merged:
            training = WeightTraining.parse(config.grid, config.masters, merged=config.merged)
            return trained_linear_of_model(old, training)
        return linear_on_grid(old, config.grid)

"""`train`: the weights of a module train themselves, instead of an adapter beside them.

PEFT's `modules_to_save` names the module, so checkpoints, resuming and adapter folders hold it as they do everywhere.
A linear layer becomes `TrainedLinear`; routed experts train in the node that runs them; anything else is the stock
module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from ktc.model.targets.module_target import ModuleTarget
from ktc.model.targets.settings import EnumName
from ktc.model.targets.target import NodeAction, NodeLora

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.kernels.kernel_library import Kernel
    from ktc.model.targets.node_plan import CapturedNode, NodePlan


Masters = Annotated[Literal["fp32", "bf16"], EnumName("masters")]


@dataclass(frozen=True, slots=True)
class TrainedConfig:
    """The dtype of the weights that the optimizer changes."""

    masters: Masters


@dataclass(frozen=True, slots=True)
class Train(ModuleTarget):
    """`masters` is the dtype of the weights that the optimizer changes; unset, fp32 where the layer can keep it."""

    masters: Masters | None = None

    name: ClassVar = "train"
    fixed_facet: ClassVar = "adapter"
    accepts: ClassVar = ("*",)
    default_captures: ClassVar = ("experts",)
    module: ClassVar = "trained_linear"
    trains_weights: ClassVar = True
    config: ClassVar = TrainedConfig

    def explain(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> tuple[str, ...]:
        """Return nothing: the plan explains all weights that are rounded or train together."""
        return ()

    def build_reference(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return `FusedLinear` with the weights of the graph: proofs compare values, not optimizers."""
        from ktc.model.targets.linear_module import linear_in_graph

        return linear_in_graph(graph, node, action.fqn)

    def recipe(self, action: NodeAction, about: Mapping[str, Any], host: Host) -> TrainedConfig:
        """Return the dtype of the masters."""
        return TrainedConfig(cast("Masters", action.weights.masters))

    @staticmethod
    def realise(old: nn.Module, config: TrainedConfig, kernel: Kernel | None) -> nn.Module:
        """Return `TrainedLinear` with the layer's own weights."""
        from ktc.model.experts.trained.weight_training import WeightTraining
        from ktc.model.targets.linear_module import trained_linear_of_model

        return trained_linear_of_model(old, WeightTraining.parse(None, config.masters))

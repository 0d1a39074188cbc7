"""`lora_linear`: a linear layer takes LoRA. It becomes `FusedLinear`, which PEFT adapts as any `nn.Linear`.

Where another rule gives the layer a kernel, the adapter stands in that kernel's module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ktc.model.targets.module_target import ModuleTarget
from ktc.model.targets.settings import Alpha, Dropout, NoConfig, Rank
from ktc.model.targets.target import LoraBytes, NodeAction, NodeLora, NodeMemory, Unsuited

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.model.kernels.kernel_library import Kernel
    from ktc.model.targets.node_plan import CapturedNode, NodePlan


@dataclass(frozen=True, slots=True)
class LoraLinear(ModuleTarget):
    """Unset settings are those of the `lora` block."""

    rank: Rank | None = None
    alpha: Alpha | None = None
    dropout: Dropout | None = None

    name: ClassVar = "lora_linear"
    fixed_facet: ClassVar = "adapter"
    accepts: ClassVar = ("linear",)
    adapts: ClassVar = "linear"
    module: ClassVar = "lora_linear"

    def unsuited(self, seen: CapturedNode) -> Unsuited | None:
        """Return that PEFT refuses the layer: by its name, in models whose fused code reads the weight alone."""
        from ktc.model.hf.private_api import refused_by_peft

        name = self.module_of(seen.core).rpartition(".")[2]
        if not refused_by_peft(seen.model_type, name):
            return None
        reason = f"PEFT refuses an adapter on `{name}` in a `{seen.model_type}` model, whose kernels skip it"
        return Unsuited("M096", reason, "keeps that layer as it is", "the layer stays as it is")

    def explain(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> tuple[str, ...]:
        """Return that the layer takes LoRA."""
        return (f"takes LoRA, on {plan.device}",)

    def memory(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> NodeMemory:
        """Return the adapter. A GPU keeps a dropout mask as bytes, a CPU as numbers of the adapter's dtype."""
        assert lora is not None, "a program with an adapter has the plan of it"
        item = max(4, seen.dtype.itemsize)
        mask = 0 if not lora.dropout else 1 if plan.device != "cpu" else item
        return NodeMemory(lora=LoraBytes(lora.ranks[0], item, mask))

    def build_reference(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return `FusedLinear` without an adapter, which PEFT adds to the loaded model."""
        from ktc.model.targets.linear_module import linear_in_graph

        return linear_in_graph(graph, node, action.fqn)

    @staticmethod
    def realise(old: nn.Module, config: NoConfig, kernel: Kernel | None) -> nn.Module:
        """Return `FusedLinear` with the layer's own weights."""
        from ktc.model.targets.linear_module import linear_on_grid

        return linear_on_grid(old)

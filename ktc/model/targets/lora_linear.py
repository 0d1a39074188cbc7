"""`lora_linear`: a linear layer takes LoRA. It becomes `KTLinear` at its FQN, which PEFT adapts like any `nn.Linear`.

Where another rule gives the layer a kernel, the adapter stands in that kernel's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ktc.model.targets.module_target import ModuleTarget
from ktc.model.targets.settings import Alpha, Dropout, Dtype, Rank
from ktc.model.targets.target import NodeAction

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.model.kernels.kernel_library import Kernel


@dataclass(frozen=True, slots=True)
class LoraLinear(ModuleTarget):
    """Unset settings are those of the `lora` block."""

    rank: Rank | None = None
    alpha: Alpha | None = None
    dropout: Dropout | None = None
    dtype: Dtype | None = None

    name: ClassVar = "lora_linear"
    fills: ClassVar = "adapter"
    accepts: ClassVar = ("linear",)
    available: ClassVar = True
    built: ClassVar = {"dtype": (None,)}
    module: ClassVar = "lora_linear"

    def put(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return `KTLinear` without an adapter, which PEFT adds to the loaded model."""
        from ktc.model.targets.linear_module import linear_in_graph

        return linear_in_graph(graph, node, action.fqn)

    @staticmethod
    def realise(old: nn.Module, arguments: Mapping[str, Any], kernel: Kernel | None) -> nn.Module:
        """Return `KTLinear` with the layer's own weights."""
        from ktc.model.targets.linear_module import linear_of_model

        return linear_of_model(old, arguments, kernel)

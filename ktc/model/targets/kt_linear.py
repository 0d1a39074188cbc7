"""`kt_linear`: a linear layer is computed by the kernel that a rule names.

It becomes `KTLinear` at its FQN. With `gemv` few rows without gradients are the kernel's. With `prefill = packed` many
rows are, with gradients too; `auto` takes the faster of that and PyTorch's. All others are PyTorch's. Where the plan
leaves the weight in the blocks of a GGUF file, it becomes `StoredLinear`, and all products are the kernel's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from ktc.model.targets.module_target import Arguments, ModuleTarget
from ktc.model.targets.settings import EnumName
from ktc.model.targets.target import NodeAction

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.kernels.kernel_library import Kernel

LinearKernel = Annotated[Literal["torch", "gemv", "fp8", "q8", "w8a8"], EnumName("kernel")]
ManyRowsKernel = Annotated[
    Literal["torch", "gemv", "fp8", "q8", "w8a8", "packed", "auto"], EnumName("many_rows")
]  # `gemv` to `w8a8` are planned


STORED_LINEAR: Final = "stored_linear"  # the module of a layer whose weight stays in blocks


@dataclass(frozen=True, slots=True)
class KtLinear(ModuleTarget):
    """`prefill` is the kernel for many rows, of prompts and in training."""

    kernel: LinearKernel
    prefill: ManyRowsKernel | None = None

    name: ClassVar = "kt_linear"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("linear",)
    available: ClassVar = True
    built: ClassVar = {"kernel": ("torch", "gemv"), "prefill": (None, "torch", "packed", "auto")}
    without_backward: ClassVar = frozenset({"fp8", "q8", "w8a8"})
    module: ClassVar = "kt_linear"
    arguments: ClassVar = {"threads": int, "few": str, "many": str, "grid": str}

    def put(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return `KTLinear` with the weights of the graph."""
        from ktc.model.targets.linear_module import linear_in_graph

        return linear_in_graph(graph, node, action.fqn)

    def kernel_name(self, action: NodeAction) -> str:
        """Return the library's entry, or the word of the rule where PyTorch is the kernel."""
        return action.kernel.entry if action.kernel else self.kernel

    def placed(self, action: NodeAction) -> str:
        """Return `stored_linear` where the weight stays in the blocks of its file."""
        return STORED_LINEAR if stored_format(action) else self.module

    def recipe(self, action: NodeAction, node: fx.Node, host: Host) -> Arguments:
        """Return the same arguments for every layer with this kernel."""
        return self.module_arguments(action, host)

    def module_arguments(self, action: NodeAction, host: Host) -> Arguments:
        """Return the number of threads, which is the host's, and the format or the kernels for few and many rows."""
        if weight_format := stored_format(action):
            return {"threads": host.workers, "format": weight_format}
        return {
            "threads": host.workers,
            "few": self.kernel,
            "many": self.prefill or "torch",
            "grid": action.weights.grid,
        }

    @staticmethod
    def realise(old: nn.Module, arguments: Mapping[str, Any], kernel: Kernel | None) -> nn.Module:
        """Return `KTLinear` with the layer's own weights, and the kernels where the plan chose one."""
        from ktc.model.targets.linear_module import linear_of_model

        return linear_of_model(old, arguments, kernel)


def stored_format(action: NodeAction) -> str:
    """Return the format of the blocks that the action's kernel multiplies, "" for plain weights."""
    return str(getattr(action.kernel, "weight_format", ""))

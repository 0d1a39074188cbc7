"""`kt_linear`: a linear layer is computed by the kernel that a rule names.

It becomes `FusedLinear` at its FQN. With `gemv` few rows without gradients are the kernel's. With `prefill = packed`
many rows are, with gradients too; `auto` takes the faster of that and PyTorch's. All others are PyTorch's. Where the
plan leaves the weight in the blocks of a GGUF file, it becomes `StoredLinear`, and all products are the kernel's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.targets.module_target import ModuleTarget
from ktc.model.targets.settings import EnumName, PositiveInt
from ktc.model.targets.target import NodeAction, NodeLora, NodeMemory

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.kernels.kernel_library import Kernel
    from ktc.model.kernels.linear_spec import PackedLinearSpec
    from ktc.model.kernels.spec import Spec
    from ktc.model.targets.node_plan import CapturedNode, NodePlan


LinearKernel = Annotated[Literal["torch", "gemv", "auto"], EnumName("kernel")]
ManyRowsKernel = Annotated[Literal["torch", "packed", "auto"], EnumName("many_rows")]

STORED_LINEAR: Final = "stored_linear"  # the module of a layer whose weight stays in blocks


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """The kernels of few and of many rows. `grid` is an `Int4Grid` as text, None for weights that are not rounded."""

    threads: PositiveInt
    decode_kernel: LinearKernel
    prefill_kernel: ManyRowsKernel
    grid: str | None


@dataclass(frozen=True, slots=True)
class StoredLinearConfig:
    """The threads of the kernel, and the format of the blocks."""

    threads: PositiveInt
    format: str


@dataclass(frozen=True, slots=True)
class LinearTarget(ModuleTarget):
    """`kernel` is for few rows, where `auto` is `gemv` if it runs; `prefill` for many, of prompts and in training."""

    kernel: LinearKernel
    prefill: ManyRowsKernel | None = None

    name: ClassVar = "kt_linear"
    fixed_facet: ClassVar = "kernel"
    accepts: ClassVar = ("linear",)
    fixed_weights: ClassVar = True
    replaces_modules: ClassVar = True
    module: ClassVar = "kt_linear"
    config: ClassVar = LinearConfig

    @property
    def leaves_gpus_to_pytorch(self) -> bool:
        """Whether no word of the rule demands a kernel of the CPU."""
        return self.kernel == "auto" and self.prefill != "packed"

    def multiplies_stored_on_gpus(self, seen: CapturedNode) -> bool:
        """Return whether the weight is blocks that a GPU multiplies, and the program leaves the product to ktc."""
        from ktc.model.targets.linear_kernel import blocks_on_gpus

        return self.kernel == "auto" and self.prefill != "torch" and bool(blocks_on_gpus(seen))

    def choose(self, plan: NodePlan, seen: CapturedNode) -> Spec | None:
        """Return the kernel for the layer's dtype, or for the blocks that a GGUF file stores. Raises (M077).

        A layer outside the captured blocks must have no code of its own around the product.
        """
        from ktc.model.linears.plain import is_plain_linear
        from ktc.model.targets.linear_kernel import choose_linear

        spec = choose_linear(plan, seen, self.kernel, self.prefill)
        if seen.node is None and not is_plain_linear(seen.stock):
            stock = type(seen.stock).__name__
            message = f"`{self.name}` on `{plan.claim.path}`: it is a `{stock}` with code of its own"
            raise InputRefused(Diagnostic("M077", message, plan.claim.span, hint="narrow the rule"))
        return spec

    def explain(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> tuple[str, ...]:
        """Return the rows that each kernel computes."""
        spec = plan.spec
        if spec is None:
            return (f"is run by PyTorch, on {plan.device}",)
        if spec.op == "packed_linear":
            stored = cast("PackedLinearSpec", spec).weight_format
            if plan.device != "cpu":
                return (f"{stored} weights, kernels of the GPU for few and for many rows, on {plan.device}",)
            return (f"{stored} weights, {spec.isa} kernel for few and for many rows, on {plan.device}",)
        by = f"by the {spec.isa} kernel for {spec.dtype}"
        few = [f"few rows without gradients {by}"] * (self.kernel != "torch")
        faster = ", or by PyTorch if that is faster on this processor" * (self.prefill == "auto")
        many = [f"many rows {by}{faster}"] * (self.prefill in ("packed", "auto"))
        return (f"{', '.join((*few, *many, 'all others by PyTorch'))}, on {plan.device}",)

    def memory(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> NodeMemory:
        """Return the workspace of the product with many rows, where a kernel computes it."""
        from ktc.model.kernels.packed_size import packed_linear_bytes
        from ktc.model.kernels.working_memory import ProductRows
        from ktc.model.linears.coded_weight import DecodedCopy

        spec = plan.spec
        if spec is not None and spec.op == "packed_linear" and plan.device != "cpu":
            inputs, outputs = seen.linear_sizes
            packed = packed_linear_bytes(cast("PackedLinearSpec", spec), outputs, inputs)
            return NodeMemory(decoded=DecodedCopy(2 * outputs * inputs, packed))  # bf16
        if spec is None or plan.device != "cpu" or (spec.op == "linear" and self.prefill not in ("packed", "auto")):
            return NodeMemory()
        return NodeMemory(product=ProductRows(max(seen.linear_sizes), seen.host.workers))

    def build_reference(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return `FusedLinear` with the weights of the graph."""
        from ktc.model.targets.linear_module import linear_in_graph

        return linear_in_graph(graph, node, action.fqn)

    def kernel_name(self, action: NodeAction) -> str:
        """Return the library's entry, or the word of the rule where PyTorch is the kernel."""
        return action.kernel.entry if action.kernel else "torch"

    def module_name(self, action: NodeAction) -> str:
        """Return `stored_linear` where the weight stays in the blocks of its file."""
        return STORED_LINEAR if stored_format(action) else self.module

    def recipe(self, action: NodeAction, about: Mapping[str, Any], host: Host) -> LinearConfig | StoredLinearConfig:
        """Return the number of threads, which is the host's, and the format or the kernels."""
        if weight_format := stored_format(action):
            return StoredLinearConfig(host.workers, weight_format)
        few: LinearKernel = "gemv" if self.kernel == "auto" and action.kernel is not None else self.kernel
        few = "torch" if few == "auto" else few
        return LinearConfig(host.workers, few, self.prefill or "torch", action.weights.grid or None)

    @staticmethod
    def realise(old: nn.Module, config: LinearConfig, kernel: Kernel | None) -> nn.Module:
        """Return `FusedLinear` with the layer's own weights, and the kernels where the plan chose one."""
        from ktc.model.targets.linear_module import linear_of_model

        return linear_of_model(old, config, kernel)


def stored_format(action: NodeAction) -> str:
    """Return the format of the blocks that the action's kernel multiplies, "" for plain weights."""
    return str(getattr(action.kernel, "weight_format", ""))

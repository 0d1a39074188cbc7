"""A rewritten graph bound to the tensors of the block it replaces, so that a test can run it."""

from __future__ import annotations

from kernel_layers import experts_of
from torch import fx, nn

from ktc.model.experts.layouts.stock_layout import canonical_parts, stock_names
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.own_module import ExpertStack
from ktc.model.graph.typed import named_modules, owner_of
from ktc.model.loading.graph_block import stacked_experts
from ktc.model.targets.module_target import replaced
from ktc.stages.capture import ExpertList


def bind(graph: fx.GraphModule, original: nn.Module, experts: ExpertList | None = None) -> None:
    """Bind a rewritten graph to the tensors of the block it replaces: experts are loaded, everything else is shared."""
    for name, module in named_modules(graph):
        if isinstance(module, FusedMoe):
            sizes = (module.num_experts, module.hidden, module.intermediate, module.top_k)
            dtype = next(p.dtype for p in original.parameters() if p.is_floating_point())
            replacement = experts_of(*sizes, str(module.form), dtype=dtype)
            load_experts(replacement, replaced(original, name), experts)
            graph.set_submodule(name, replacement)
    tensors = {**dict(original.named_parameters()), **dict(original.named_buffers())}
    for name in [n for n, _ in [*graph.named_parameters(), *graph.named_buffers()] if n in tensors]:
        setattr(*owner_of(graph, name), tensors[name])


def load_experts(module: FusedMoe, experts: nn.Module, listed: ExpertList | None = None) -> None:
    """Load the weights of a stock experts module of the same form, or of the modules that `listed` describes."""
    if listed is not None and isinstance(experts, nn.ModuleList):
        sizes = (module.num_experts, module.hidden, module.intermediate)
        experts = ExpertStack(stacked_experts(experts, module.form, listed.parts, sizes))
    for name in stock_names(module.form):
        stacked = experts.get_parameter(name)
        for expert in range(module.num_experts):
            for part, tensor in canonical_parts(module.form, name, stacked[expert]):
                module.load_expert(expert, part, tensor)

"""The realisation recipe: which module is put at which FQN of the HF model, as the manifest records it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from ktc.capture import ExpertList
from ktc.graph import ops
from ktc.graph.typed import nodes_of
from ktc.host import Host
from ktc.model.manifest import Rewrite
from ktc.plan import NodeAction, Plan
from ktc.plan.kernel_spec import KernelSpec
from ktc.plan.kernels import thread_count
from ktc.rewrite.apply import RewrittenBlock


def recipe(blocks: tuple[RewrittenBlock, ...], plan: Plan) -> tuple[Rewrite, ...]:
    """Every rewritten module of the model, in the order of its sites."""
    rows: list[tuple[int, Rewrite]] = []
    for block in blocks:
        nodes = {str(n.target): n for n in nodes_of(block.graph) if n.op == "call_module"}
        for site in block.rewrite.sites:
            if block.experts is not None:
                rows.append((site.layer, _graph_block(block, block.experts, site.fqn)))
            for action in _one_of_each(block.rewrite.actions):
                fqn = f"{site.fqn}.{action.fqn}"
                device = block.rewrite.node_devices.get(action.node, block.rewrite.device)
                module, entry, args = _module(action, nodes[action.fqn], plan.host)
                rows.append((site.layer, Rewrite(fqn, module, entry, device, args, action.rule, str(action.span))))
    return tuple(row for _, row in sorted(rows, key=lambda pair: pair[0]))


def _one_of_each(actions: Sequence[NodeAction]) -> Iterator[NodeAction]:
    """One action per node: an adapter on a node with a kernel asks for no module of its own."""
    with_kernel = {action.node for action in actions if action.target == "kt_linear"}
    yield from (a for a in actions if a.target != "lora_linear" or a.node not in with_kernel)


def _module(action: NodeAction, node: fx.Node, host: Host) -> tuple[str, str | None, dict[str, int | str]]:
    """What the loader puts in the place of a node: the module, its kernel, its arguments."""
    if action.kernel is not None:
        return "fused_moe", action.kernel.entry, _kernel_args(action.kernel, node, action, host)
    if action.target != "kt_linear":
        return action.target, None, {}
    return action.target, action.linear and action.linear.entry, {"threads": thread_count({}, host)}


def block_file(block: RewrittenBlock) -> str:
    """Where OUT keeps the code of a rewritten block."""
    return f"blocks/{block.rewrite.key}.py"


def _graph_block(block: RewrittenBlock, experts: ExpertList, fqn: str) -> Rewrite:
    """The step before a block's others, where its own code loops over its experts."""
    action = next(action for action in block.rewrite.actions if action.target == "cpu_moe")
    args: dict[str, int | str] = {
        "file": block_file(block),
        "experts": experts.fqn,
        "num_experts": experts.count,
        "hidden": experts.hidden,
        "intermediate": experts.intermediate,
        "form": experts.form,
        "parts": " ".join(f"{part}={name}" for part, name in experts.parts.items()),
    }
    return Rewrite(fqn, "graph_block", None, block.rewrite.device, args, action.rule, str(action.span))


def _kernel_args(kernel: KernelSpec, node: fx.Node, action: NodeAction, host: Host) -> dict[str, int | str]:
    """What `FusedMoe` is built with when the model is loaded."""
    about = ops.attributes(node)
    return {
        "num_experts": int(about["num_experts"]),
        "hidden": int(about["hidden"]),
        "intermediate": int(about["inter"]),
        "top_k": int(kernel.top_k or 0),
        "form": str(about["form"]),
        "activations": str(action.settings["activations"]),
        "threads": thread_count(action.settings, host),
        "numa": str(action.settings["numa"]),
        "prefill": str(action.settings.get("prefill") or ""),
        "prefill_tokens": int(str(action.settings.get("prefill_tokens") or 1)),
        "format_gate_up": kernel.format_gate_up,
        "format_down": kernel.format_down,
    }

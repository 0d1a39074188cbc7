"""The realisation recipe: which module is put at which FQN of the HF model, as the manifest records it."""

from __future__ import annotations

from ktc.graph import ops
from ktc.plan import Plan
from ktc.rewrite.apply import RewrittenBlock
from ktc.runtime.manifest import Rewrite


def recipe(blocks: tuple[RewrittenBlock, ...], plan: Plan) -> tuple[Rewrite, ...]:
    """Every rewritten module of the model, in the order of its sites."""
    rows: list[tuple[int, Rewrite]] = []
    for block in blocks:
        nodes = {str(n.target): n for n in block.graph.graph.nodes if n.op == "call_module"}
        for site in block.rewrite.sites:
            for action in block.rewrite.actions:
                args: dict[str, int | str] = {}
                if action.kernel is not None:
                    about = ops.attributes(nodes[action.fqn])
                    args = {
                        "num_experts": int(about["num_experts"]), "hidden": int(about["hidden"]), "intermediate": int(about["inter"]),
                        "top_k": int(action.kernel.top_k or 0), "activation": str(about["act"]),
                        "activations": str(action.settings["activations"]), "threads": plan.threads,
                        "format_gate_up": action.kernel.format_gate_up, "format_down": action.kernel.format_down,
                    }  # fmt: skip
                kernel = action.kernel.entry if action.kernel else None
                module = "fused_moe" if action.kernel else "lora_linear"
                device = block.rewrite.node_devices.get(action.node, block.rewrite.device)
                fqn = f"{site.fqn}.{action.fqn}"
                rows.append((site.layer, Rewrite(fqn, module, kernel, device, args, action.rule, str(action.span))))
    return tuple(row for _, row in sorted(rows, key=lambda pair: pair[0]))

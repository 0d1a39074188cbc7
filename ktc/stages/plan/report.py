"""The plan as plain JSON values: what `--json`, the manifest's digest and the tables of the command line read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ktc.model.kernels.spec import Spec
from ktc.model.targets.target import NodeAction
from ktc.stages.plan.types import BlockRewrite, Plan


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return every decision of the plan; two plans that differ in one have different values."""
    return {
        "mode": plan.mode,
        "threads": plan.threads,
        "processes": plan.processes,
        "cuda_graph": "decode" if plan.cuda_graph else "never",
        "native_step": "decode" if plan.native_step else "never",
        "rewrites": [_rewrite(r) for r in plan.rewrites],
        "outside": [{**_action(linear.action), "device": linear.device} for linear in plan.uncaptured],
        "placements": [{"fqn": p.fqn, "device": p.device, "rule": p.rule} for p in plan.placements],
        "streams": [{"fqn": s.fqn, "device": s.device, "buffer": s.buffer, "rule": s.rule} for s in plan.streams],
        "kernels": [_spec(spec) for spec in plan.kernels if spec.op == "fused_moe"],
        "linears": [_spec(spec) for spec in plan.kernels if spec.op != "fused_moe"],
        "lora": None if plan.lora is None else asdict(plan.lora),
        "memory": asdict(plan.memory),
        "reasons": [asdict(reason) for reason in plan.reasons],
    }


def _spec(spec: Spec) -> dict[str, Any]:
    return {"entry": spec.entry, **asdict(spec)}


def _rewrite(rewrite: BlockRewrite) -> dict[str, Any]:
    return {
        "key": rewrite.key,
        "block": rewrite.block,
        "sites": [site.fqn for site in rewrite.sites],
        "device": rewrite.device,
        "actions": [
            {**_action(action), "device": rewrite.node_devices.get(action.node, rewrite.device)}
            for action in rewrite.actions
        ],
    }


def _action(action: NodeAction) -> dict[str, Any]:
    return {
        "node": action.node,
        "fqn": action.fqn,
        "target": action.target.name,
        "rule": action.rule,
        "settings": _settings(action),
        "kernel": action.kernel.entry if action.kernel else None,
    }


def _settings(action: NodeAction) -> dict[str, Any]:
    """Return the rule's settings, and those of another rule for calls with many tokens."""
    if (prefill := action.prefill) is None:
        return action.target.settings
    sent: dict[str, Any] = {"stream_buffer": prefill.buffer, "resident": prefill.resident}
    if prefill.kept is not None:
        sent |= {"kept": prefill.kept, "bus_share": prefill.share, "fixed_split": prefill.fixed_split}
        sent |= {"divided": prefill.divided, "crowded": prefill.crowded}
    return action.target.settings | {"prefill": list(prefill.devices), "prefill_tokens": prefill.tokens} | sent

"""The adapter that the rules request, in PEFT's terms. In: module names and settings. Out: the content of `lora.json`.

Layers that share a name with the projections of experts are named by their weights. PEFT interprets `gate_proj` and the
like in `target_modules` of a mixture-of-experts model as the routed experts, for every path before it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.stages.plan import LoraPlan

_NOTHING = "dummy-target-modules"  # peft.utils.constants.DUMMY_TARGET_MODULES: no layer has to match
_EXPERT_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def adapter_json(lora: LoraPlan, of_experts: Collection[str] = _EXPERT_NAMES) -> dict[str, Any]:
    """Return the arguments of `LoraConfig` for a planned adapter. PEFT interprets the names `of_experts` as experts.

    Raises `InputRefused` (I150) for a dropout on a layer that PEFT can only name by its weight.
    """
    by_weight = [fqn for fqn in lora.targets if fqn.rpartition(".")[2] in of_experts]
    if by_weight and lora.lora_dropout:
        message = f"`{by_weight[0]}` cannot have a LoRA dropout: PEFT adapts it by its weight, without one"
        raise InputRefused(Diagnostic("I150", message, hint="write `dropout = 0` in the `lora` block"))
    by_name = [fqn for fqn in lora.targets if fqn not in by_weight]
    renamed = {fqn: f"{fqn}.weight" for fqn in by_weight}
    return {
        "task_type": "CAUSAL_LM",
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": by_name if lora.targets or lora.parameters else _NOTHING,
        "target_parameters": [*renamed.values(), *lora.parameters] or None,
        "rank_pattern": {renamed.get(fqn, fqn): value for fqn, value in lora.rank_pattern.items()},
        "alpha_pattern": {renamed.get(fqn, fqn): value for fqn, value in lora.alpha_pattern.items()},
        **({"modules_to_save": list(lora.modules)} if lora.modules else {}),
    }

"""A compilation by hand: the package that a compiler would make of a small checkpoint, without compiling anything.

Tests of loading and linking use it, so that they say something about those two stages alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ktc.capture.weights import map_weights
from ktc.checkpoint import open_index
from ktc.link import Package, adapter_json
from ktc.runtime.manifest import Rewrite

ADAPTED = ("q_a_proj", "q_b_proj", "q_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def recipe(model: PreTrainedModel) -> tuple[Rewrite, ...]:
    """What the rules would ask for: LoRA on attention, routed experts as one module."""
    steps = [
        Rewrite(fqn, "lora_linear", None, "cpu", {}, "attention", "moe-lora.ktr:9:3")
        for fqn, _ in model.named_modules()
        if fqn.rpartition(".")[2] in ADAPTED
    ]
    for fqn, module in model.named_modules():
        if hasattr(module, "gate_up_proj"):
            experts, rows, hidden = module.gate_up_proj.shape
            args = {
                "num_experts": experts,
                "hidden": hidden,
                "intermediate": rows // 2,
                "top_k": model.config.num_experts_per_tok,
                "activation": "silu",
                "activations": "keep",
                "threads": 1,
            }
            steps.append(Rewrite(fqn, "fused_moe", None, "cpu", args, "experts", "moe-lora.ktr:5:3"))
    return tuple(steps)


def package(checkpoint: Path) -> Package:
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rewrites = recipe(model)
    targets = [step.fqn for step in rewrites if step.module == "lora_linear"]
    return Package(
        name=str(checkpoint),
        checkpoint=checkpoint,
        class_name=type(model).__name__,
        dtype="bfloat16",
        weights=map_weights(model, open_index(checkpoint)).sources,
        rules="moe-lora.ktr",
        settings={},
        rule_files={"moe-lora.ktr": "rule experts {}\n", "std/moe.ktr": "# patterns\n"},
        host={"isas": ["scalar"]},
        isa="scalar",
        plan={"threads": 1},
        kernels=(),
        bindings="",
        library=None,
        rewrites=rewrites,
        placement={"model": "cpu", "lm_head": "cpu"},
        lora=adapter_json(targets, 8, 32, 0.0, {}, {}),
        graphs={"captured": "{}"},
    )

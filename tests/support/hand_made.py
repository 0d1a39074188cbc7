"""A compilation by hand: the package that a compiler would make of a small checkpoint, without compiling anything.

Tests of loading and linking use it, so that they say something about those two stages alone.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from plain_experts import PLAIN_EXPERTS
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ktc.foundation import host
from ktc.model.checkpoint import open_index
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.manifest.manifest import Rewrite
from ktc.model.manifest.stock_facts import assumptions_of
from ktc.stages.capture.weights import map_weights
from ktc.stages.codegen.build import build
from ktc.stages.codegen.render import render
from ktc.stages.link import KernelFile, Package, adapter_json
from ktc.stages.plan import LoraPlan

ADAPTED = ("q_a_proj", "q_b_proj", "q_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
GPT_OSS = "silu(alpha=1.702, limit=7.0, up_offset=1.0) biased transposed interleaved"


def recipe(model: PreTrainedModel, kernel: str | None = None) -> tuple[Rewrite, ...]:
    """What the rules would ask for: LoRA on attention, routed experts as one module."""
    steps = [
        Rewrite(fqn, "lora_linear", None, "cpu", {}, "attention", "moe-lora.ktr:9:3")
        for fqn, _ in model.named_modules()
        if fqn.rpartition(".")[2] in ADAPTED
    ]
    for fqn, module in model.named_modules():
        if hasattr(module, "gate_up_proj"):
            of_gpt_oss = model.config.model_type == "gpt_oss"
            experts, rows, hidden = module.gate_up_proj.mT.shape if of_gpt_oss else module.gate_up_proj.shape
            args = {
                "num_experts": experts,
                "hidden": hidden,
                "intermediate": rows // 2,
                "top_k": model.config.num_experts_per_tok,
                "form": GPT_OSS if of_gpt_oss else "silu",
                "activations": "keep",
                "threads": 1,
                "numa": "shard",
                **PLAIN_EXPERTS,
            }
            steps.append(Rewrite(fqn, "fused_moe", kernel, "cpu", args, "experts", "moe-lora.ktr:5:3"))
    return tuple(steps)


def scalar_kernel() -> tuple[KernelFile, KernelLibrary]:
    """A kernel that every machine runs and that fits every model, from the cache or built now."""
    spec = FusedMoeSpec("fused_moe", None, None, None, None, "bf16", "bf16", "bf16", "scalar")
    source = render([spec], {spec: "moe-lora.ktr:5:3"})
    text = next(unit.text for unit in source.units if unit.name.startswith(spec.entry))
    library = build(source, host.detect())
    return KernelFile(spec.entry, asdict(spec), text, dict(library.builds)[spec.entry]), library


def package(checkpoint: Path, kernel: tuple[KernelFile, KernelLibrary] | None = None) -> Package:
    """The package of `checkpoint`, with its experts run by `kernel` or by their reference."""
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rewrites = recipe(model, kernel[0].entry if kernel else None)
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
        kernels=(kernel[0],) if kernel else (),
        bindings="",
        library=kernel[1].path if kernel else None,
        rewrites=rewrites,
        assumptions=assumptions_of(model, rewrites),
        placement={"model": "cpu", "lm_head": "cpu"},
        lora=adapter_json(LoraPlan(tuple(targets), (), 8, 32, 0.0, {}, {}, 0)),
        graphs={"captured": "{}"},
    )


def zeros(folder: Path) -> Path:
    """A Qwen3-MoE checkpoint of zeros, small but for its three layers of experts of 48 MiB each."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=512,
        moe_intermediate_size=512,
        num_experts=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
    )
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder

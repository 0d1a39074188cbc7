"""Planned activations promise to be near what autograd really saves."""

from __future__ import annotations

import pytest
import torch
from families import captured, config_of
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.model.targets.target import LoraBytes
from ktc.stages.plan.activations import footprint

BATCH, LENGTH = 2, 96
SIZES: dict[str, object] = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 256, "num_hidden_layers": 2}


def saved_bytes(model: nn.Module, block: nn.Module) -> int:
    """Bytes that autograd saves inside a call of `block`, parameters left out, shared storage counted once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() > LENGTH:
            kept.append(tensor)  # or its address would be used again
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    inner = block.forward

    def watched(*args: object, **kwargs: object) -> object:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return inner(*args, **kwargs)

    block.forward = watched
    model(input_ids=torch.ones(BATCH, LENGTH, dtype=torch.long))
    del block.forward
    return sum(storages.values())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "self_attn"), ("llama", "mlp"), ("deepseek_v3", "self_attn"), ("gpt_oss", "self_attn")],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_a_block_saves_is_estimated_within_a_quarter(family: str, name: str, dropout: float) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, **SIZES), dtype=torch.bfloat16)
    model.enable_input_require_grads()
    targets = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "self_attn" in n]
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=targets, lora_dropout=dropout)).train()
    block = model.model.layers[1].get_submodule(name)
    seen = captured(family, **SIZES)
    site = next(s for s in seen.sites if s.fqn == f"model.layers.1.{name}")
    graph = seen.block(site.block).graph
    assert graph is not None
    linears = [n.name for n in nodes_of(graph) if ops.operator(n) == "linear" and name == "self_attn"]
    mask = 4 if dropout else 0
    eager = model.config._attn_implementation == "eager"
    planned = footprint(graph, {n: LoraBytes(8, 4, mask) for n in linears}, 256, eager=eager)
    assert bool(planned.saved_pair) == eager
    assert planned.at(LENGTH)[0] * BATCH * LENGTH == pytest.approx(saved_bytes(adapted, block), rel=0.25)

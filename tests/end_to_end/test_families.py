"""Whole families compiled, where experts are not called as most are: logits, greedy tokens and LoRA equal stock."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktc

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]
# With the program for each: stock PEFT cannot name the weights of experts in a layout of the model's own.
FAMILIES = {
    "gemma4_text": "moe-experts-lora", "llama4_text": "moe-lora", "longcat_flash": "moe-lora", "dbrx": "moe-lora",
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    out = tmp_path_factory.mktemp("families") / f"e2e_{request.param}"
    ktc.compile(f"tiny:{request.param}", FAMILIES[request.param], out, settings={"format": "bf16"})
    sys.path.insert(0, str(out.parent))
    try:
        return importlib.import_module(out.name)
    finally:
        sys.path.remove(str(out.parent))


def stock(package: ModuleType, dtype: torch.dtype) -> PreTrainedModel:
    source = json.loads((Path(str(package.__file__)).parent / "ktc.json").read_text())["model"]["folder"]
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, experts_implementation="eager").eval()


def tokens(model: nn.Module, rows: int = 2, length: int = 40) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(model)).logits.float()


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def gradients(package: ModuleType, model: nn.Module) -> dict[str, Tensor]:
    """Of the program's adapters after a seeded start, in training mode."""
    config = package.lora_config()
    config.lora_dropout = 0.0
    adapted = get_peft_model(model, config).train()
    generator = torch.Generator().manual_seed(7)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    ids = tokens(adapted)
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in trained.items() if p.grad is not None}


def config_of(package: ModuleType) -> LoraConfig:
    return package.lora_config()


def test_the_reference_has_the_logits_and_the_greedy_tokens_of_stock_fp32(package: ModuleType) -> None:
    model, exact = package.load(reference=True), stock(package, torch.float32)
    assert relative(logits(model), logits(exact)) <= 1e-5
    prompt, mask = tokens(model, 3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(prompt, **settings), exact.generate(prompt, **settings))


def test_the_kernel_is_as_near_to_fp32_as_stock_bf16(package: ModuleType) -> None:
    model, exact = package.load(), stock(package, torch.float32)
    wanted = logits(exact)
    assert relative(logits(model), wanted) <= 1.5 * relative(logits(stock(package, torch.bfloat16)), wanted)


def test_the_gradients_of_adapters_are_those_of_stock_peft(package: ModuleType) -> None:
    found = gradients(package, package.load(reference=True))
    wanted = gradients(package, stock(package, torch.float32))
    assert found.keys() == wanted.keys()
    assert any(".experts." in name for name in found) == bool(config_of(package).target_parameters)
    for name, gradient in found.items():
        assert relative(gradient, wanted[name]) <= 2e-4, name

"""Experts tuned with LoRA: the compiled model beside stock Hugging Face and PEFT, and the adapter in either."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktc
from ktc.diagnostics import InputRefused

STEPS = 6
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("experts")
    settings = {"rank": "5", "alpha": "10", "format": "bf16"}
    out = ktc.compile("tiny:qwen3_moe", "moe-experts-lora", folder / "e2e_lora_experts", settings=settings)
    sys.path.insert(0, str(out.parent))
    try:
        return importlib.import_module(out.name)
    finally:
        sys.path.remove(str(out.parent))


def stock(package: ModuleType, dtype: torch.dtype) -> PreTrainedModel:
    source = json.loads((Path(str(package.__file__)).parent / "ktc.json").read_text())["model"]["folder"]
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()


def tokens(model: nn.Module, rows: int = 2, length: int = 40) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(model)).logits.float()


def adapted(package: ModuleType, model: nn.Module) -> PeftModel:
    torch.manual_seed(7)
    found = get_peft_model(model, package.lora_config())  # type: ignore[arg-type]
    assert isinstance(found, PeftModel)
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(input_ids=tokens(model), labels=tokens(model)).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def tune(package: ModuleType, model: nn.Module) -> tuple[PeftModel, list[float]]:
    tuned = adapted(package, model).train()
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=2e-3)
    ids, losses = tokens(tuned), list[float]()
    for _ in range(STEPS):
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuned.eval(), losses


def test_the_adapter_is_the_one_that_stock_peft_makes(package: ModuleType) -> None:
    ours, theirs = (adapted(package, model) for model in (package.load(), stock(package, torch.bfloat16)))
    trained = {name: (tuple(p.shape), p.dtype) for name, p in ours.named_parameters() if p.requires_grad}
    assert trained == {name: (tuple(p.shape), p.dtype) for name, p in theirs.named_parameters() if p.requires_grad}
    assert sum(".mlp.experts." in name for name in trained) == 2 * 4
    config = ours.config
    a_of_down = "base_model.model.model.layers.0.mlp.experts.lora_A.default.weight"
    assert trained[a_of_down] == ((5 * config.num_experts, config.moe_intermediate_size), torch.float32)


def test_in_reference_mode_losses_and_gradients_are_those_of_stock_peft(package: ModuleType, tmp_path: Path) -> None:
    ours, losses = tune(package, package.load(reference=True))
    theirs, expected = tune(package, stock(package, torch.float32))
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-5
    assert losses[-1] < losses[0] - 0.05
    found, wanted = gradients(ours), gradients(theirs)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-3, atol=1e-5), name
    ours.save_pretrained(str(tmp_path / "adapter"))
    torch.save({"ids": tokens(ours), "logits": logits(ours)}, tmp_path / "expected.pt")
    # A process of its own, in which ktc cannot be imported.
    program = """
import sys, torch, json
sys.modules["ktc"] = None
from peft import PeftModel
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
base = json.load(open(folder + "/adapter/adapter_config.json"))["base_model_name_or_path"]
stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
model = PeftModel.from_pretrained(stock, folder + "/adapter").eval()
expected = torch.load(folder + "/expected.pt", weights_only=True)
with torch.no_grad():
    found = model(input_ids=expected["ids"]).logits
print(float((found - expected["logits"]).abs().max()), float(expected["logits"].abs().max()))
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    difference, scale = map(float, done.stdout.split())
    assert difference <= 1e-5 * max(1.0, scale)


def test_with_the_kernel_losses_follow_stock_peft(package: ModuleType) -> None:
    ours, losses = tune(package, package.load())
    theirs, expected = tune(package, stock(package, torch.bfloat16))
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 0.03
    assert losses[-1] < losses[0] - 0.05
    exact, rounded = gradients(tune(package, stock(package, torch.float32))[0]), gradients(theirs)
    for name, gradient in gradients(ours).items():
        if ".mlp.experts." in name:
            assert gradient.dtype == torch.float32
            # the whole model rounds, after steps of training: by how much differs from processor to processor
            own = (rounded[name] - exact[name]).norm()
            assert (gradient - exact[name]).norm() <= 1.5 * own, name


def test_an_adapter_comes_back_and_others_stand_beside_it(package: ModuleType, tmp_path: Path) -> None:
    tuned, _ = tune(package, package.load())
    wanted, base = logits(tuned), logits(package.load())
    tuned.save_pretrained(str(tmp_path / "adapter"))
    model = PeftModel.from_pretrained(package.load(), str(tmp_path / "adapter"), adapter_name="first")
    assert torch.equal(logits(model), wanted)
    model.add_adapter("second", package.lora_config())
    model.set_adapter("second")
    assert torch.equal(logits(model), base)  # B begins as zeros
    model.set_adapter("first")
    assert torch.equal(logits(model), wanted)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)


def test_dropout_is_drawn_in_training_alone_and_repeatable_for_a_seed(package: ModuleType, tmp_path: Path) -> None:
    config = package.lora_config()
    config.lora_dropout = 0.5
    torch.manual_seed(7)
    model = get_peft_model(package.load(), config)
    for name, values in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(values, std=0.1)
    wanted = logits(model.eval())
    assert torch.equal(logits(model), wanted)

    def in_training(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return logits(model.train())

    assert torch.equal(in_training(1), in_training(1))
    assert not torch.equal(in_training(1), in_training(2))
    torch.manual_seed(1)
    checkpointed = gradients(model.train())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    torch.manual_seed(1)
    assert all(torch.equal(gradient, checkpointed[name]) for name, gradient in gradients(model).items())
    model.save_pretrained(str(tmp_path / "adapter"))
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["lora_dropout"] == 0.5
    assert torch.equal(logits(PeftModel.from_pretrained(package.load(), str(tmp_path / "adapter"))), wanted)


def test_several_active_adapters_drop_nothing_together(package: ModuleType) -> None:
    config = package.lora_config()
    config.lora_dropout = 0.5
    model = get_peft_model(package.load(), config, "first")
    model.add_adapter("second", config)
    model.base_model.set_adapter(["first", "second"])
    logits(model.eval())
    with pytest.raises(InputRefused, match=r"L432: several active adapters"):
        logits(model.train())


def test_what_packed_experts_cannot_do_is_refused(package: ModuleType) -> None:
    weights = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for settings in ({"r": 129}, {"init_lora_weights": "pissa"}):
        with pytest.raises(InputRefused, match="L432"):
            get_peft_model(package.load(), LoraConfig(target_modules=[], target_parameters=weights, **settings))  # type: ignore[arg-type]
    with pytest.raises(InputRefused, match="L433"):
        adapted(package, package.load()).merge_and_unload()

"""The main job: a checkpoint compiled, imported, compared with stock Hugging Face, tuned with PEFT, and generating."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import ktc
from ktc.diagnostics import KtcError

STEPS = 10
pytestmark = pytest.mark.usefixtures("one_thread")

RULES = {"deepseek_v2": "moe-lora", "qwen3_moe": "moe-lora"}


@pytest.fixture(scope="module", params=["deepseek_v2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def package(request: pytest.FixtureRequest, compiled_twin: Callable[..., Path]) -> ModuleType:
    out = compiled_twin(f"tiny:{request.param}", RULES[request.param])
    sys.path.insert(0, str(out.parent))
    try:
        return importlib.import_module(out.name)
    finally:
        sys.path.remove(str(out.parent))


def folder_of(package: ModuleType) -> Path:
    return Path(str(package.__file__)).parent


def stock(package: ModuleType, dtype: torch.dtype) -> PreTrainedModel:
    source = json.loads((folder_of(package) / "ktc.json").read_text())["model"]["folder"]
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()


def tokens(model: nn.Module, rows: int = 2, length: int = 48) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_logits_are_as_near_to_fp32_as_those_of_stock_bf16(package: ModuleType) -> None:
    model, exact = package.load(), stock(package, torch.float32)
    ids = tokens(model)
    wanted = logits(exact, ids)
    assert relative(logits(model, ids), wanted) <= 1.5 * relative(logits(stock(package, torch.bfloat16), ids), wanted)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"use_cache": False}], ids=["greedy", "beams", "no_cache"])
def test_reference_mode_generates_the_tokens_of_stock_fp32(package: ModuleType, how: dict[str, Any]) -> None:
    model, exact = package.load(reference=True), stock(package, torch.float32)
    prompt, mask = tokens(model, 3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, **how}
    assert torch.equal(model.generate(prompt, **settings), exact.generate(prompt, **settings))


def test_the_kernel_generates_with_cache_padding_and_beams(package: ModuleType) -> None:
    model = package.load()
    prompt, mask = tokens(model, 2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    for how in ({}, {"num_beams": 2}):
        assert model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, **how).shape[1] >= 8


def tune(package: ModuleType, model: nn.Module) -> tuple[nn.Module, list[float]]:
    """Ten LoRA steps of the program's own adapter, without dropout."""
    torch.manual_seed(7)
    config = package.lora_config()
    assert (config.r, config.lora_alpha) == (8, 32)
    config.lora_dropout = 0.0
    adapted = get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-3)
    ids, losses = tokens(model), list[float]()
    for _ in range(STEPS):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return adapted.eval(), losses


def test_losses_of_lora_steps_follow_the_stock_model(package: ModuleType) -> None:
    _, ours = tune(package, package.load())
    _, theirs = tune(package, stock(package, torch.bfloat16))
    assert ours[-1] < ours[0] - 0.1
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 0.03


def test_in_reference_mode_losses_equal_and_the_adapter_works_in_the_stock_model(
    package: ModuleType, tmp_path: Path
) -> None:
    adapted, ours = tune(package, package.load(reference=True))
    _, theirs = tune(package, stock(package, torch.float32))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1e-5
    adapted.save_pretrained(tmp_path / "adapter")
    ids = tokens(adapted)
    torch.save({"ids": ids, "logits": logits(adapted, ids)}, tmp_path / "expected.pt")
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


def test_the_trainer_takes_the_folder_as_a_hugging_face_model(package: ModuleType, tmp_path: Path) -> None:
    settings = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[], logging_steps=1, learning_rate=2e-3, use_cpu=True, gradient_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip

    def losses(model: PreTrainedModel) -> list[float]:
        config = package.lora_config()
        config.lora_dropout = 0.0
        torch.manual_seed(7)
        rows = [{"input_ids": row, "labels": row} for row in tokens(model, 4, 24)]
        trainer = Trainer(model=get_peft_model(model, config), args=settings, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    ours = losses(AutoModelForCausalLM.from_pretrained(folder_of(package), trust_remote_code=True))
    assert len(ours) == 3
    assert ours == pytest.approx(losses(stock(package, torch.bfloat16)), abs=0.03)


def test_the_base_refuses_to_be_saved_and_says_what_to_use(package: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(KtcError) as refused:
        package.load().save_pretrained(tmp_path / "base")
    assert "adapter" in refused.value.diagnostics[0].hint
    assert not (tmp_path / "base").exists()


@pytest.mark.usefixtures("own_captures")
def test_a_compilation_is_repeatable(package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder_of(package)
    monkeypatch.delitem(sys.modules, first.name)
    family = next(f for f in RULES if f in first.name)
    second = ktc.compile(f"tiny:{family}", RULES[family], tmp_path / first.name, settings={"device": "cpu"})
    for path in sorted(first.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes(), path.name


@pytest.mark.usefixtures("own_captures")
def test_a_model_object_stands_for_the_folder_it_came_from(package: ModuleType, tmp_path: Path) -> None:
    model = stock(package, torch.bfloat16)
    family = next(f for f in RULES if f in folder_of(package).name)
    out = ktc.compile(model, RULES[family], tmp_path / "from_object", settings={"device": "cpu"})
    record, first = (json.loads((folder / "ktc.json").read_text()) for folder in (out, folder_of(package)))
    assert record["model"] == first["model"]


def test_out_holds_the_proof_of_every_rewrite(package: ModuleType) -> None:
    proofs = json.loads((folder_of(package) / "proofs.json").read_text())
    assert len(proofs) == 2
    assert all(proof["holds"] and proof["gradients"] for proof in proofs)

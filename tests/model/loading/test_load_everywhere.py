"""A compiled model where people use models: imported, in the Trainer, with PEFT; and its adapter on the stock model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV2ForCausalLM, PreTrainedModel

from ktc.model.loading.compiled_model import CompiledModel

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ("The router scores all of them, keeps the best,", "Question: how many legs has a spider? Answer: eight.")


@pytest.fixture
def on_path(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.syspath_prepend(str(compiled.parent))
    yield compiled.name
    sys.modules.pop(compiled.name, None)


def stock(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


def batch(folder: Path) -> dict[str, torch.Tensor]:
    inputs = AutoTokenizer.from_pretrained(folder)(list(TEXTS), return_tensors="pt", padding=True)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return {**inputs, "labels": labels}


def tuned(
    model: PreTrainedModel, config: LoraConfig, inputs: dict[str, Any], steps: int = 10
) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    adapted = get_peft_model(model, config)
    adapted.train()
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=5e-3)
    losses = []
    for _ in range(steps):
        loss = adapted(**inputs).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return adapted.eval(), losses


FRESH = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
import json
torch.set_num_threads(1)
base = json.load(open(sys.argv[1] + "/adapter_config.json"))["base_model_name_or_path"]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, experts_implementation="eager")
model = PeftModel.from_pretrained(model, sys.argv[1]).eval()
torch.save(model(**torch.load(sys.argv[2])).logits, sys.argv[3])
assert "ktc" not in sys.modules
"""


def in_a_fresh_process(adapter: Path, inputs: dict[str, torch.Tensor], folder: Path) -> torch.Tensor:
    torch.save(inputs, folder / "inputs.pt")
    command = [sys.executable, "-c", FRESH, str(adapter), str(folder / "inputs.pt"), str(folder / "logits.pt")]
    subprocess.run(command, check=True, capture_output=True)
    return torch.load(folder / "logits.pt")


def test_an_imported_model_tunes_like_the_stock_one_and_its_adapter_runs_there(
    on_path: str, checkpoint: Path, tmp_path: Path
) -> None:
    out = import_module(on_path)
    config = out.lora_config()
    assert (config.r, config.lora_alpha, config.task_type) == (8, 32, "CAUSAL_LM")
    inputs = batch(checkpoint)
    ours, losses = tuned(out.load(reference=True), config, inputs)
    _, stock_losses = tuned(stock(checkpoint), out.lora_config(), inputs)
    assert losses == pytest.approx(stock_losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.5
    ours.save_pretrained(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(checkpoint)
    logits = ours(**inputs).logits
    assert torch.allclose(in_a_fresh_process(tmp_path / "adapter", inputs, tmp_path), logits, atol=2e-6)


@pytest.mark.slow
def test_an_adapter_on_shared_experts_and_dense_layers_runs_on_the_stock_model_too(
    on_path: str, checkpoint: Path, tmp_path: Path
) -> None:
    from ktc.stages.link import adapter_json
    from ktc.stages.plan import LoraPlan

    targets = (
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.shared_experts.gate_proj",
        "model.layers.2.self_attn.o_proj",
    )
    config = LoraConfig(**adapter_json(LoraPlan(targets, (), 4, 16, 0.0, {}, {}, 0)))
    inputs = batch(checkpoint)
    plain = import_module(on_path).load(reference=True)
    before = plain(**inputs).logits
    ours, _ = tuned(plain, config, inputs, steps=3)
    trained = {name.split(".lora_")[0] for name, p in ours.named_parameters() if p.requires_grad}
    assert len(trained) == 3
    ours.save_pretrained(tmp_path / "adapter")
    logits = ours(**inputs).logits
    assert (logits - before).abs().max() > 0.05
    assert torch.allclose(in_a_fresh_process(tmp_path / "adapter", inputs, tmp_path), logits, atol=2e-6)


def test_auto_model_gives_the_same_model(compiled: Path, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(compiled, trust_remote_code=True, device_map="auto", dtype="auto")
    assert isinstance(model, CompiledModel)
    assert issubclass(type(model), DeepseekV2ForCausalLM)
    assert (model.dtype, model.name_or_path) == (torch.bfloat16, str(checkpoint))
    options = {"trust_remote_code": True, "reference": True, "attn_implementation": "eager"}
    eager = AutoModelForCausalLM.from_pretrained(compiled, **options)
    assert eager.config._attn_implementation == "eager"
    inputs = batch(checkpoint)
    assert torch.allclose(eager(**inputs).logits, stock(checkpoint)(**inputs).logits, atol=2e-5)


def test_the_trainer_tunes_it_with_an_adapter_and_gradient_checkpointing(
    compiled: Path, checkpoint: Path, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    row = {name: values[1] for name, values in batch(checkpoint).items()}
    losses = {}
    for name, options in (("compiled", {"trust_remote_code": True, "reference": True}), ("stock", {})):
        folder = compiled if name == "compiled" else checkpoint
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        torch.manual_seed(0)
        adapted = get_peft_model(
            model, LoraConfig(r=8, lora_alpha=32, target_modules=["o_proj"], task_type="CAUSAL_LM")
        )
        arguments = TrainingArguments(
            output_dir=str(tmp_path / name),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=5e-3,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_steps=1,
            save_steps=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=adapted, args=arguments, train_dataset=[row] * 8)
        trainer.train()
        losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses["compiled"] == pytest.approx(losses["stock"], abs=1e-4)
    assert losses["compiled"][-1] < losses["compiled"][0]
    assert (tmp_path / "compiled" / "checkpoint-4" / "adapter_model.safetensors").is_file()


def test_the_folder_may_move(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = tmp_path / "moved_twin"
    shutil.copytree(compiled, moved)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_module("moved_twin").load().name_or_path


def test_the_folder_holds_what_its_users_look_for(compiled: Path) -> None:
    names = {
        str(path.relative_to(compiled))
        for path in compiled.rglob("*")
        if "__pycache__" not in path.parts and path.is_file()
    }
    assert names == {
        "__init__.py",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "graph/captured.json",
        "ktc.json",
        "lora.json",
        "modeling_ktc.py",
        "proofs.json",
        "rules/moe-lora.ktr",
        "rules/std/moe.ktr",
        "tokenizer.json",
        "tokenizer_config.json",
        "weights.json",
    }
    config = json.loads((compiled / "config.json").read_text())
    assert config["model_type"] == "deepseek_v2"
    assert config["auto_map"] == {"AutoModelForCausalLM": "modeling_ktc.KtcDeepseekV2ForCausalLM"}
    assert len(AutoTokenizer.from_pretrained(compiled)) == config["vocab_size"]

"""INT4 training as a user meets it: compile, train with the Trainer, save, resume, load again, in stock PEFT too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, TrainingArguments

import ktc
from ktc.adapters.adapter import attach
from ktc.adapters.export import export
from ktc.adapters.merge import merge
from ktc.diagnostics import InputRefused
from ktc.inference.quantize.checkpoint import quantize
from ktc.inference.quantize.scheme import SCHEMES
from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.loading import peft_glue
from ktc.model.loading.trained_beside import RECORD, rounded_modules
from ktc.training import KTrainer

HEAD = 'import "std/moe.ktr"\nimport "std/attention.ktr" as attn\n'
FULL = """
rule experts { match moe.block as m => cpu_moe() => fake_quant(int4) on m.experts => train on m.experts }
rule q       { match attn.gqa as a => train on a.q => fake_quant(int4, group = -1) on a.q }
rule router  { match module at "model.layers.*.mlp.gate", "model.norm" => train }
"""
WHOLE = """
rule experts { match moe.block => cpu_moe() }
rule layer   { match moe.block as m where m.layer == 1 => train on m.experts }
rule ends    { match module at "model.embed_tokens", "model.norm", "lm_head" => train }
rule parts   { match module at "model.layers.0.self_attn", "model.layers.1.mlp.gate" => train }
"""
IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    sizes: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 4,
        "num_hidden_layers": 2, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def compiled(checkpoint: Path, rules: str, folder: Path, **settings: str) -> Path:
    if rules.startswith("\n"):
        (folder / "program.ktr").write_text(HEAD + rules)
        rules = str(folder / "program.ktr")
    return ktc.compile(checkpoint, rules, folder / "out", settings=settings)


def adapted(out: Path) -> PeftModel:
    torch.manual_seed(3)
    return get_peft_model(ktc.load(out), peft_glue.read_lora_config(out))  # type: ignore[return-value]


def trained(model: PeftModel, folder: Path, resume: str | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 96, (16, 12), generator=generator)]
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-2,
        save_steps=2, report_to="none", use_cpu=True, bf16=True, disable_tqdm=True, logging_steps=100,
    )  # fmt: skip
    trainer = KTrainer(model=model, args=args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_trained_experts_and_layers_resume_to_the_bit_and_load_in_stock_peft(checkpoint: Path, tmp_path: Path) -> None:
    out = compiled(checkpoint, FULL, tmp_path)
    model = adapted(out)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    found = trained(model, tmp_path / "run")
    assert len(found) == 2 * 2 + 2 + 2 + 1
    assert not any(torch.equal(found[name], before[name]) for name in found)
    again = trained(adapted(out), tmp_path / "run", str(tmp_path / "run" / "checkpoint-2"))
    assert all(torch.equal(found[name], again[name]) for name in found)

    model.save_pretrained(tmp_path / "adapter")
    expected = model.eval()(IDS).logits.detach()
    reloaded = PeftModel.from_pretrained(ktc.load(out), tmp_path / "adapter").eval()
    assert torch.equal(reloaded(IDS).logits, expected)
    stock = stock_of(checkpoint)
    tuned = PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()
    with torch.no_grad():  # what the compiled model rounds, rounded here by the reference
        for name, parameter in tuned.named_parameters():
            if "modules_to_save" in name and (".experts." in name or ".q_proj." in name):
                grid = Int4Grid(32 if ".experts." in name else -1)
                parameter.copy_(grid.rounded(parameter.bfloat16()))
        error = (tuned(IDS).logits - expected).norm() / expected.norm()
    assert error < 1e-2

    merge(tmp_path / "adapter", tmp_path / "merged", checkpoint)
    merged = stock_of(tmp_path / "merged")
    by_peft = PeftModel.from_pretrained(stock_of(checkpoint), tmp_path / "adapter").merge_and_unload()
    wanted = by_peft.bfloat16().state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in merged.state_dict().items())
    generated = attach(ktc.load(out), tmp_path / "adapter", alone=True)
    assert torch.equal(generated(IDS).logits, expected)


def stock_of(checkpoint: Path, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, **settings)


def test_gradients_of_trained_modules_are_those_of_stock(checkpoint: Path, tmp_path: Path) -> None:
    out = compiled(checkpoint, WHOLE, tmp_path)
    model = get_peft_model(ktc.load(out, reference=True), peft_glue.read_lora_config(out)).train()
    stock = stock_of(checkpoint, torch.float32).train()
    for each in (model, stock):
        each(input_ids=IDS, labels=IDS).loss.backward()
    wanted = dict(stock.named_parameters())
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(found) == 1 + 6 + 1 + 2 + 1 + 1  # embeddings, attention, a router, experts, norm, head
    for name, parameter in found.items():
        grad = wanted[name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")].grad
        assert (parameter.grad - grad).norm() <= 1e-5 * grad.norm(), name


def test_trained_experts_are_exported_as_the_int4_that_they_were_trained_as(checkpoint: Path, tmp_path: Path) -> None:
    out = compiled(checkpoint, FULL.replace("group = -1", "group = 32"), tmp_path)
    model = adapted(out)
    trained(model, tmp_path / "run")
    adapter = tmp_path / "run" / "checkpoint-4"
    layers = [f"model.layers.{layer}" for layer in range(2)]
    modules = [f"{layer}.{name}" for layer in layers for name in ("self_attn.q_proj", "mlp.experts")]
    assert rounded_modules(adapter) == dict.fromkeys(modules, "int4 32 scale_first, trained")
    for asked in ("experts", "linears"):
        with pytest.raises(InputRefused, match="Q506"):
            quantize(checkpoint, tmp_path / "int4", SCHEMES["int4-g32"], asked, adapter=adapter)
    done = quantize(checkpoint, tmp_path / "int4", SCHEMES["int4-g32"], "trained", adapter=adapter)
    projection = model.get_base_model().model.layers[1].self_attn.q_proj.modules_to_save["default"]  # type: ignore[attr-defined]
    exported = stock_of(done.path, quantization_config=CompressedTensorsConfig(dequantize=True)).state_dict()
    assert torch.equal(projection.rounded(torch.bfloat16), exported["model.layers.1.self_attn.q_proj.weight"])
    experts = model.get_base_model().model.layers[0].mlp.experts.modules_to_save["default"]  # type: ignore[attr-defined]
    served = stock_of(done.path).model.layers[0].mlp.experts
    packed = experts.weights.current()
    for expert in range(4):
        gate, up = served.gate_up_proj[expert].chunk(2)
        for part, weight in (("gate", gate), ("up", up), ("down", served.down_proj[expert])):
            assert torch.equal(packed.unpack(expert, part, tuple(weight.shape)), weight)


def test_a_tuned_model_is_copied_with_its_adapter_and_trained_copies(checkpoint: Path, tmp_path: Path) -> None:
    model = adapted(compiled(checkpoint, FULL, tmp_path)).eval()
    copied = copy.deepcopy(model)
    assert type(copied) is type(model)
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    before = model(IDS).logits
    assert torch.equal(copied(IDS).logits, before)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if name.endswith("experts.modules_to_save.default.down_proj"):
                parameter.mul_(2)
    assert not torch.equal(copied(IDS).logits, before)
    assert torch.equal(model(IDS).logits, before)
    with pytest.raises(InputRefused, match="trains a copy of its weights"):
        model.get_base_model().restore_weights()  # type: ignore[operator]


def test_trained_modules_load_without_a_copy_in_memory(checkpoint: Path, tmp_path: Path) -> None:
    out = compiled(checkpoint, FULL, tmp_path)
    model = adapted(out)
    trained(model, tmp_path / "run")
    expected = model.eval()(IDS).logits
    for low in (False, True):
        loaded: Any = PeftModel.from_pretrained(
            ktc.load(out), str(tmp_path / "run" / "checkpoint-4"), low_cpu_mem_usage=low
        )
        assert torch.equal(loaded.eval()(IDS).logits, expected)


@pytest.mark.parametrize("weights", ["base", "merged"])
def test_adapters_on_int4_train_in_the_mode_that_serves(checkpoint: Path, weights: str, tmp_path: Path) -> None:
    out = compiled(checkpoint, "moe-qat", tmp_path, rank="4", weights=weights, device="cpu")
    model = adapted(out)
    found = trained(model, tmp_path / "run")
    assert len(found) == 2 * (2 * 2 + 4 * 2)
    again = trained(adapted(out), tmp_path / "run", str(tmp_path / "run" / "checkpoint-2"))
    assert all(torch.equal(found[name], again[name]) for name in found)
    reference = get_peft_model(ktc.load(out, reference=True), peft_glue.read_lora_config(out))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in found:
                parameter.copy_(found[name])
        expected = reference.eval()(IDS).logits
        error = (model.eval()(IDS).logits - expected).norm() / expected.norm()
    assert error < 2e-2


def test_an_adapter_says_which_experts_it_was_trained_beside(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told(out: Path, **how: bool) -> list[str]:
        caplog.clear()
        attach(ktc.load(out, **how), adapter, alone=True)
        return [each.getMessage() for each in caplog.records if each.name == "ktc.adapters.adapter"]

    out = compiled(checkpoint, "moe-qat", tmp_path, rank="4", device="cpu")
    trained(adapted(out), tmp_path / "run")
    adapter = tmp_path / "run" / "checkpoint-4"
    assert told(out) == []
    assert told(out, reference=True) == []
    experts = {f"model.layers.{layer}.mlp.experts": "int4 32 scale_first" for layer in range(2)}
    assert rounded_modules(adapter) == experts
    with pytest.raises(InputRefused, match="Q505"):
        quantize(checkpoint, tmp_path / "int4", SCHEMES["int4-g32"], adapter=adapter)
    for rules, here in (("moe-experts-lora", "full precision"), ("moe-qat", "merged with the adapter")):
        settings = {"weights": "merged"} if rules == "moe-qat" else {}
        (tmp_path / rules).mkdir()
        (said,) = told(compiled(checkpoint, rules, tmp_path / rules, device="cpu", **settings))
        assert "A612" in said
        assert "was trained beside experts in int4 32 scale_first" in said
        assert here in said
    exported = export(adapter, "per-expert", tmp_path / "exported", checkpoint).path
    assert (exported / RECORD).read_bytes() == (adapter / RECORD).read_bytes()


def test_the_base_in_int4_is_the_checkpoint_that_quantize_writes(checkpoint: Path, tmp_path: Path) -> None:
    out = compiled(checkpoint, "moe-qat", tmp_path, device="cpu")
    quantised = quantize(checkpoint, tmp_path / "exported", SCHEMES["int4-g32"], "experts").path
    stock = stock_of(quantised)
    experts = ktc.load(out).model.layers[1].mlp.experts  # type: ignore[attr-defined]
    wanted = stock.model.layers[1].mlp.experts.gate_up_proj[2].chunk(2)  # type: ignore[attr-defined]
    assert torch.equal(experts.expert(2, "gate"), wanted[0])
    assert torch.equal(experts.expert(2, "up"), wanted[1])

"""Adapter folders: what is read of them, what is refused by name, and that what is attached is the whole of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktc
from ktc.adapters.adapter import attach, attach_several, detach, exporting, read_adapter
from ktc.adapters.own_weights import as_before
from ktc.diagnostics import InputRefused
from ktc.foundation import versions
from ktc.model.loading.peft_glue import read_lora_config
from ktc.model.manifest.manifest import read_manifest

SINCE_0_19 = versions.release(versions.installed("peft") or "0") >= (0, 19)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def compiled_model(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-experts-lora")


def tuned(folder: Path, config: LoraConfig | None = None) -> PeftModel:
    """The compiled model with an adapter whose every factor is random."""
    model = get_peft_model(ktc.load(folder, reference=True), config or read_lora_config(folder))
    assert isinstance(model, PeftModel)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    return model.eval()


def stock(folder: Path) -> PreTrainedModel:
    """The original of a compiled model in fp32, its experts one after the other as the reference has them."""
    source = read_manifest(folder).model.folder
    made = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager")
    return cast("PreTrainedModel", made).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 35).reshape(2, 16)).logits


@pytest.fixture(scope="module")
def saved(compiled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """An adapter folder, and the logits of the model that saved it."""
    model = tuned(compiled_model)
    folder = tmp_path_factory.mktemp("adapters") / "first"
    model.save_pretrained(str(folder))
    return folder, logits(model)


@pytest.fixture
def adapter(saved: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    """A copy of the adapter, to be harmed."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in saved[0].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def codes(call: Callable[[], Any]) -> tuple[str, ...]:
    with pytest.raises(InputRefused) as refusal:
        call()
    return tuple(diagnostic.code for diagnostic in refusal.value.diagnostics)


def change(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


HOSTILE = "((a|[a-z._0-9])*)*Q"  # takes years on a name of thirty characters


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_pattern_that_never_ends_is_refused(field: str, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktc.adapters.adapter import require_quick_patterns

    monkeypatch.setattr("ktc.foundation.timed_search.MAX_SECONDS", 0.2)
    names = ["model.layers.0.self_attn.q_proj"]
    rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
    change(adapter, **{field: {HOSTILE: rank} if field.endswith("pattern") else HOSTILE})
    assert codes(lambda: require_quick_patterns(read_adapter(adapter), names)) == ("A602",)
    change(adapter, **{field: {"(": rank} if field.endswith("pattern") else "("})
    assert codes(lambda: require_quick_patterns(read_adapter(adapter), names)) == ("A602",)
    change(adapter, **{field: {r".*\.(q|v)_proj": rank} if field.endswith("pattern") else r"(?i).*\.(q|v)_proj"})
    require_quick_patterns(read_adapter(adapter), names)


def test_an_adapter_is_read_without_its_values(adapter: Path) -> None:
    found = read_adapter(adapter)
    assert found.r == 8 and found.lora_alpha == 32
    assert Path(found.base).is_dir()
    assert {entry.name for entry in found.tensors} == load_file(adapter / "adapter_model.safetensors").keys()


def test_what_was_trained_comes_back(compiled_model: Path, saved: tuple[Path, torch.Tensor]) -> None:
    model = attach(ktc.load(compiled_model, reference=True), saved[0], alone=True)
    assert torch.equal(logits(model), saved[1])
    assert not any(p.requires_grad for p in model.parameters())


def test_attention_adapters_give_the_stock_model_the_very_same_logits(compiled_model: Path, tmp_path: Path) -> None:
    attention = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = tuned(compiled_model, attention)
    model.save_pretrained(str(tmp_path / "adapter"))
    found = PeftModel.from_pretrained(stock(compiled_model), str(tmp_path / "adapter")).eval()
    assert torch.equal(logits(found), logits(model))
    assert not torch.equal(logits(found), logits(stock(compiled_model)))


def test_adapters_of_experts_give_the_stock_model_the_same_logits(
    compiled_model: Path, saved: tuple[Path, torch.Tensor]
) -> None:
    """PEFT computes (W + s B A) x, the compiled model W x + s B (A x)."""
    found = logits(PeftModel.from_pretrained(stock(compiled_model), str(saved[0])).eval())
    effect = (found - logits(stock(compiled_model))).abs().max()
    assert (found - saved[1]).abs().max() <= 1e-6 * max(found.abs().max(), effect)


def test_it_can_be_trained_on(compiled_model: Path, saved: tuple[Path, torch.Tensor]) -> None:
    model = attach(ktc.load(compiled_model, reference=True), saved[0], trainable=True, alone=True)
    assert all(p.requires_grad for name, p in model.named_parameters() if ".lora_" in name)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    assert codes(lambda: read_adapter(tmp_path)) == ("A601",)
    assert codes(lambda: read_adapter(tmp_path / "nowhere")) == ("A601",)


def test_half_written_adapters_are_refused(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert codes(lambda: read_adapter(adapter)) == ("A602",)
    weights.unlink()
    assert codes(lambda: read_adapter(adapter)) == ("A602",)
    weights.write_bytes(b"")
    (adapter / "adapter_config.json").write_text("{")
    assert codes(lambda: read_adapter(adapter)) == ("A602", "A602")


def test_pickled_weights_are_not_read(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(InputRefused, match=r"A602: .*pickle"):
        read_adapter(adapter)


def test_a_factor_without_its_other_half_is_refused(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, weights)
    with pytest.raises(InputRefused, match="one factor of two"):
        read_adapter(adapter)


def test_other_kinds_and_senseless_values_are_refused(adapter: Path) -> None:
    change(adapter, peft_type="IA3")
    assert codes(lambda: read_adapter(adapter)) == ("A604",)
    change(adapter, peft_type="LORA", r="eight", lora_alpha=None)
    assert codes(lambda: read_adapter(adapter)) == ("A602", "A602")


def test_an_adapter_of_another_model_is_refused_with_both_names(compiled_model: Path, adapter: Path) -> None:
    model = ktc.load(compiled_model, reference=True)
    change(adapter, base_model_name_or_path="somebody/another-model")
    with pytest.raises(InputRefused) as refusal:
        attach(model, adapter, alone=True)
    assert "A603" in str(refusal.value)
    assert "somebody/another-model" in str(refusal.value) and str(model.name_or_path) in str(refusal.value)


def test_sizes_and_layers_of_another_model_are_refused(compiled_model: Path, adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, weights)
    with pytest.raises(InputRefused, match=r"A603: .*q_proj` is .*lora_A is"):
        attach(ktc.load(compiled_model, reference=True), adapter, alone=True)
    save_file({key.replace("layers.1.", "layers.71."): tensor for key, tensor in tensors.items()}, weights)
    with pytest.raises(InputRefused, match=r"A603: .*no layer `model.layers.71"):
        attach(ktc.load(compiled_model, reference=True), adapter, alone=True)


def test_layers_that_peft_would_leave_out_are_noticed(compiled_model: Path, adapter: Path) -> None:
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    change(adapter, target_modules=[name for name in targets if "q_proj" not in name])
    assert codes(lambda: attach(ktc.load(compiled_model, reference=True), adapter, alone=True)) == ("A605",)


@pytest.mark.skipif(not SINCE_0_19, reason="peft 0.18 reads these names as the shared experts' layers")
def test_shared_experts_that_peft_takes_for_routed_ones_are_noticed(compiled: Path, tmp_path: Path) -> None:
    """As an old peft saves them: a newer one reads the names as the routed experts, without an error."""
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(stock(compiled), LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(str(tmp_path))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for name, linear in stock(compiled).named_modules():
        if isinstance(linear, torch.nn.Linear) and name.rpartition(".")[2] in names[1:]:
            prefix = f"base_model.model.{name}.lora"
            tensors |= {f"{prefix}_A.weight": torch.randn(4, linear.in_features)}
            tensors |= {f"{prefix}_B.weight": torch.randn(linear.out_features, 4)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    change(tmp_path, target_modules=names)
    with pytest.raises(InputRefused, match=r"A605: .*left out `base_model.model.model.layers.\d.mlp.") as refusal:
        attach(ktc.load(compiled, reference=True), tmp_path, alone=True)
    assert "proj.lora_" in str(refusal.value)


def test_factors_that_the_file_lacks_are_noticed(compiled_model: Path, adapter: Path) -> None:
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    change(adapter, target_modules=[*targets, "lm_head"])
    with pytest.raises(InputRefused, match=r"A605: .*the file lacks"):
        attach(ktc.load(compiled_model, reference=True), adapter, alone=True)


def head_adapter(out: Path, folder: Path, **settings: Any) -> Path:
    model = get_peft_model(stock(out), LoraConfig(**{"r": 4, "target_modules": ["q_proj", "lm_head"], **settings}))
    model.save_pretrained(str(folder))
    return folder


def test_a_head_that_the_file_would_replace_is_refused_and_stays(compiled: Path, tmp_path: Path) -> None:
    weights = head_adapter(compiled, tmp_path) / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("lm_head.base_layer.weight"))
    save_file({**tensors, name: tensors[name] + 1}, weights)
    model = ktc.load(compiled, reference=True)
    before = logits(model)
    with pytest.raises(InputRefused, match=r"A603: .*other values of `lm_head.weight`"):
        attach(model, tmp_path, alone=True)
    assert torch.equal(logits(detach(model)), before)


def test_one_that_changes_the_model_is_attached_alone(compiled: Path, tmp_path: Path) -> None:
    folders = {name: head_adapter(compiled, tmp_path / name) for name in ("one", "two")}
    folders["three"] = head_adapter(compiled, tmp_path / "three", target_modules=["q_proj"], init_lora_weights="pissa")
    model = ktc.load(compiled, reference=True)
    before = logits(model)
    with pytest.raises(InputRefused, match=r"A603: .*changes `model.layers.0.self_attn.q_proj.weight`"):
        attach_several(model, folders)
    assert torch.equal(logits(detach(model)), before)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_weights_that_an_initialisation_changes_are_put_back(init: str, compiled: Path, tmp_path: Path) -> None:
    """OLoRA subtracts in place, PiSSA gives the weight a new storage."""
    one = head_adapter(compiled, tmp_path / "one", target_modules=["q_proj"], init_lora_weights=init)
    model: Any = ktc.load(compiled, reference=True)
    before, inner = logits(model), model.model.layers[0].self_attn.q_proj
    address = inner.weight.data_ptr()
    with pytest.raises(InputRefused, match=r"A603: .*changes `model.layers.0.self_attn.q_proj.weight`"):
        attach(model, one, alone=False)
    assert torch.equal(logits(detach(model)), before)
    assert inner.weight.data_ptr() == address
    attached = attach_several(model, {"one": one}, alone=True)
    tuned = logits(attached)
    with attached.disable_adapter():
        assert not torch.equal(logits(attached), before)
        with as_before(model):
            assert torch.equal(logits(attached), before)
    assert torch.equal(logits(attached), tuned)
    assert torch.equal(logits(detach(model)), before)


def test_an_adapter_that_is_loaded_twice_is_subtracted_once(compiled: Path, tmp_path: Path) -> None:
    folder = head_adapter(compiled, tmp_path / "one", target_modules=["q_proj"], init_lora_weights="pissa")
    first = attach(ktc.load(compiled, reference=True), folder, alone=True)
    found = logits(first)
    assert torch.equal(logits(attach(cast("Any", first).unload(), folder, alone=True)), found)


def test_hints_of_other_layouts_are_for_adapters_that_have_one(compiled_model: Path, adapter: Path) -> None:
    """`ktc export` refuses other kinds than LoRA, and adapters with whole modules."""
    found, model = read_adapter(adapter), stock(compiled_model)
    assert exporting(found, model).startswith(f"`ktc export {adapter} --layout per-expert`")
    for other in ({"peft_type": "LOHA"}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}):
        assert not exporting(replace(found, config={**found.config, **other}), model)


def test_several_are_of_one_kind_and_an_export_reads_lora(compiled: Path, tmp_path: Path) -> None:
    from peft import IA3Config

    from ktc.adapters.export import open_adapter

    other = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    get_peft_model(stock(compiled), other).save_pretrained(str(tmp_path / "other"))
    folders = {"one": head_adapter(compiled, tmp_path / "one"), "two": tmp_path / "other"}
    assert codes(lambda: attach_several(ktc.load(compiled, reference=True), folders)) == ("A604",)
    assert codes(lambda: open_adapter(folders["two"])) == ("A604",)


def test_numbers_that_allocate_are_refused_for_every_kind(compiled: Path, tmp_path: Path) -> None:
    from peft import LoHaConfig

    made = LoHaConfig(r=4, target_modules=["q_proj"])
    get_peft_model(stock(compiled), made).save_pretrained(str(tmp_path))
    for values in ({"r": 1 << 30}, {"alpha": 1e400}, {"target_modules": "q" * 20_000}):
        change(tmp_path, **{"r": 4, "alpha": 8, "target_modules": ["q_proj"], **values})
        assert codes(lambda: read_adapter(tmp_path)) == ("A602",)

"""Loading a compiled model: it computes what the stock model computes, and refuses what it was not compiled for."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DeepseekV2ForCausalLM, PreTrainedModel

import ktc
from ktc.diagnostics import InputRefused
from ktc.model import twin
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.module import FusedMoe
from ktc.model.linears.lora_linear import FusedLinear
from ktc.model.loading.compiled_model import compiled_class
from ktc.model.loading.load import load
from ktc.model.loading.realise import realise
from ktc.stages.link import Package, link


def stock(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")


def tokens(folder: Path, *texts: str) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return dict(tokenizer(list(texts), return_tensors="pt", padding=True))


pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ("The router scores all of them,", "Question: how many legs has a spider?")


def test_the_reference_is_the_stock_model_in_fp32(compiled: Path, checkpoint: Path) -> None:
    ours, theirs = load(compiled, reference=True), stock(checkpoint, torch.float32)
    inputs = tokens(checkpoint, *TEXTS)
    assert torch.allclose(ours(**inputs).logits, theirs(**inputs).logits, atol=2e-6)
    for options in ({}, {"num_beams": 3}):
        generated = ours.generate(**inputs, max_new_tokens=24, **options)
        assert torch.equal(generated, theirs.generate(**inputs, max_new_tokens=24, **options))


def test_bf16_is_as_close_to_fp32_as_the_stock_model(compiled: Path, checkpoint: Path) -> None:
    inputs = tokens(checkpoint, *TEXTS)
    exact = stock(checkpoint, torch.float32)(**inputs).logits
    ours = load(compiled)
    assert ours.dtype is torch.bfloat16
    theirs = stock(checkpoint, torch.bfloat16)(**inputs).logits
    assert (ours(**inputs).logits - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean()


def test_the_module_tree_is_the_stock_one_with_the_recipe_in_it(compiled: Path, checkpoint: Path) -> None:
    model = load(compiled)
    assert not model.training
    assert isinstance(model.model.layers[1].mlp.experts, FusedMoe)
    assert isinstance(model.model.layers[0].self_attn.q_proj, FusedLinear)
    theirs = stock(checkpoint, torch.bfloat16)
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in theirs.named_modules() if not name.endswith("mlp.experts.act_fn")
    ]
    assert model.num_parameters() == theirs.num_parameters()
    assert model.config._attn_implementation == theirs.config._attn_implementation
    assert model.generation_config.eos_token_id == theirs.generation_config.eos_token_id
    assert model.name_or_path == str(checkpoint)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_other_families_load_the_same_way(hand_made: ModuleType, family: str, tmp_path: Path) -> None:
    folder = twin.write(family, tmp_path)
    out = link(hand_made.package(folder), tmp_path / "other_twin")
    inputs = tokens(folder, *TEXTS)
    ours, theirs = load(out, reference=True), stock(folder, torch.float32)
    assert torch.allclose(ours(**inputs).logits, theirs(**inputs).logits, atol=2e-6)
    half, half_stock = load(out).state_dict(), stock(folder, torch.bfloat16).state_dict()
    assert all(tensor.dtype == half_stock[name].dtype for name, tensor in half.items()), "what stays fp32 stays fp32"


def test_fused_names_and_unrewritten_experts_load_too(hand_made: ModuleType, checkpoint: Path, tmp_path: Path) -> None:
    model = stock(checkpoint, torch.bfloat16)
    folder = tmp_path / "fused"
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    whole = hand_made.package(folder)
    without = [step for step in whole.rewrites if step.fqn != "model.layers.2.mlp.experts"]
    for name, rewrites in (("all_of_it", whole.rewrites), ("some_of_it", tuple(without))):
        out = link(Package(**{**fields(whole), "rewrites": rewrites}), tmp_path / name)
        assert torch.equal(weights_of(load(out), "lm_head.weight"), model.lm_head.weight)
        inputs = tokens(checkpoint, *TEXTS)
        exact = stock(checkpoint, torch.float32)(**inputs).logits
        assert torch.allclose(load(out, reference=True)(**inputs).logits, exact, atol=2e-6)


def fields(made: Package) -> dict[str, Any]:
    return {name: getattr(made, name) for name in made.__slots__}


def weights_of(model: PreTrainedModel, name: str) -> torch.Tensor:
    return dict(model.named_parameters())[name]


def test_tied_embeddings_are_tied_after_loading(hand_made: ModuleType, tmp_path: Path) -> None:
    config = twin.shrink(AutoConfig.for_model("qwen3_moe", tie_word_embeddings=True))
    theirs = twin.build(config, seed=5)
    theirs.save_pretrained(tmp_path / "tied")
    model = load(link(hand_made.package(tmp_path / "tied"), tmp_path / "tied_out"), reference=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(3, 40)[None]
    assert torch.allclose(model(ids).logits, theirs(ids).logits, atol=2e-6)


def test_realising_a_model_with_weights_moves_them(hand_made: ModuleType, checkpoint: Path) -> None:
    theirs, ours = stock(checkpoint, torch.float32), stock(checkpoint, torch.float32)
    realise(ours, hand_made.recipe(theirs), None)
    ids = torch.arange(3, 150)[None]
    assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=2e-6)
    assert ours.model.layers[0].self_attn.o_proj.weight.requires_grad


def test_a_base_model_is_not_saved(compiled: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="its experts are packed") as refused:
        load(compiled).save_pretrained(tmp_path / "out")
    assert "PeftModel.save_pretrained" in refused.value.diagnostics[0].hint
    assert not (tmp_path / "out").exists()


def test_adapters_on_routed_experts_as_one_layer_are_refused(compiled: Path) -> None:
    with pytest.raises(InputRefused, match="L430"):
        get_peft_model(load(compiled), LoraConfig(r=4, target_modules=["experts"]))


# What a load refuses


def edited(
    compiled: Path,
    folder: Path,
    change: Callable[[Any], object],
    file: str = "ktc.json",
    reseal: bool = False,
) -> Path:
    for path in compiled.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = folder / path.relative_to(compiled)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    if reseal:
        manifest = json.loads((folder / "ktc.json").read_text())
        manifest["files"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        (folder / "ktc.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("L401", lambda m: m.update(schema=0)),
        ("L402", lambda m: m.pop("rewrites")),
        ("L402", lambda m: m["rewrites"][0].pop("fqn")),
        ("L403", lambda m: m["versions"].update(ktc="99.1.0")),
        ("L403", lambda m: m["versions"].update(transformers="4.57.0")),
        ("L403", lambda m: m["model"].update(class_name="NoSuchForCausalLM")),
        ("L403", lambda m: m["model"].update(class_name="logging")),
        ("L403", lambda m: m["model"].update(class_name="PreTrainedModel")),
        ("L402", lambda m: m["versions"].update(torch=2)),
        ("L402", lambda m: m["model"].update(dtype="Tensor")),
        ("L402", lambda m: m.update(isa="sse9")),
        ("L402", lambda m: m.update(placement=[])),
        ("L402", lambda m: m.update(placement={"model": "meta"})),
        ("L402", lambda m: m.update(rewrites=[1])),
        ("L402", lambda m: m["rewrites"][0].update(module="evil")),
        ("L402", lambda m: m["rewrites"][0].update(kernel="evil")),
        ("L402", lambda m: m["rewrites"][-1]["args"].pop("hidden")),
        ("L402", lambda m: m["rewrites"][-1]["args"].update(threads="1")),
        ("L402", lambda m: m["files"].pop("lora.json")),
        ("L402", lambda m: m.update(library={"file": "../x.so", "sha256": "0"})),
        ("L420", lambda m: m["rewrites"][-1]["args"].update(hidden=8)),
        ("L420", lambda m: m["rewrites"][-1]["args"].update(form="sine")),
        ("L405", lambda m: m["model"].update(folder="/nowhere")),
        ("L405", lambda m: m["model"].update(config_sha256="0")),
        ("L420", lambda m: m["rewrites"][0].update(fqn="model.layers.9.x")),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    compiled: Path, tmp_path: Path, code: str, change: Callable[[dict[str, Any]], object]
) -> None:
    with pytest.raises(InputRefused) as refused:
        load(edited(compiled, tmp_path / "edited", change))
    assert [d.code for d in refused.value.diagnostics] == [code]
    assert refused.value.diagnostics[0].hint


def test_a_checkpoint_that_was_given_is_not_one_that_has_moved(compiled: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=r"L405: the model's checkpoint is not at `.*/nothing`: it has no `config"):
        load(compiled, weights=tmp_path / "nothing")


def test_another_patch_release_is_accepted(compiled: Path, tmp_path: Path) -> None:
    def patch(manifest: dict[str, Any]) -> None:
        major, minor = manifest["versions"]["torch"].split(".")[:2]
        manifest["versions"]["torch"] = f"{major}.{minor}.99+other"

    load(edited(compiled, tmp_path / "edited", patch))


@pytest.mark.parametrize(
    "row",
    [
        {"file": "../x.safetensors"},
        {"shape": [1]},
        {"shape": "1"},
        {"source_key": "none"},
        {"source_key": None},
        {"target": "model.nowhere.weight"},
        {"target": "model.norm.nothing"},
        {"target": "forward"},
        {"dtype": "f11"},
        {"expert": 0},
        {"expert": 0, "part": "down"},
        {"transform": "per_expert"},
        {"part": "middle"},
    ],
)
def test_weights_json_is_not_believed(compiled: Path, tmp_path: Path, row: dict[str, Any]) -> None:
    folder = edited(compiled, tmp_path / "edited", lambda rows: rows[0].update(row), "weights.json", reseal=True)
    with pytest.raises(InputRefused, match=r"L40[268]"):
        load(folder)


def swap_targets(rows: list[dict[str, Any]]) -> None:
    first, second = (row for row in rows if re.search(r"layers\.[01]\.self_attn\.o_proj", row["target"]))
    first["target"], second["target"] = second["target"], first["target"]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("weights.json", swap_targets),
        ("config.json", lambda config: config.update(rope_theta=1.0)),
        ("lora.json", lambda lora: lora.update(r=1)),
    ],
)
def test_an_altered_file_is_refused(compiled: Path, tmp_path: Path, file: str, change: Callable[[Any], object]) -> None:
    folder = edited(compiled, tmp_path / "edited", change, file)
    with pytest.raises(InputRefused, match=f"L404.*{file}"):
        load(folder)


def test_altered_or_absent_code_is_refused(compiled: Path, tmp_path: Path) -> None:
    folder = edited(compiled, tmp_path / "edited", lambda _: None)
    (folder / "modeling_ktc.py").write_text("")
    (folder / "__init__.py").unlink()
    with pytest.raises(InputRefused) as refused:
        load(folder)
    assert [d.code for d in refused.value.diagnostics] == ["L404", "L404"]


def test_a_parameter_that_nothing_fills_is_named(compiled: Path, tmp_path: Path) -> None:
    folder = edited(compiled, tmp_path / "edited", lambda rows: rows.pop(), "weights.json", reseal=True)
    with pytest.raises(InputRefused, match="L408"):
        load(folder)


def test_a_name_without_a_folder_is_told_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "my_model").mkdir()
    (tmp_path / "my_model" / "ktc.json").write_text("{}")
    for name, hint in (("my_modle", "did you mean `.*my_model`"), ("other", "hub id `owner/name`")):
        with pytest.raises(InputRefused, match=f"L400: there is no folder `.*{name}`\\n.*{hint}"):
            load(tmp_path / name)


def test_a_folder_that_was_not_compiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="L400"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"])
def test_values_that_are_not_finite_are_refused_by_name(
    compiled: Path, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in checkpoint.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
        if path.suffix == ".safetensors" and name in load_file(path):
            tensors = load_file(path)
            tensors[name].view(-1)[-1] = float("nan")
            save_file(tensors, moved / path.name, metadata={"format": "pt"})
    with pytest.raises(InputRefused, match=f"L407: tensor `{name}`"):
        load(compiled, weights=moved)
    model = load(compiled, weights=moved, allow_nonfinite=True)
    assert model.name_or_path == str(moved)


def test_a_moved_checkpoint_is_the_base_by_its_absolute_path(
    compiled: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    model = load(compiled, weights=checkpoint.name)
    assert model.name_or_path == model.config.name_or_path == str(checkpoint)


def test_a_pickled_model_is_refused_with_a_hint_unless_it_is_the_reference(compiled: Path) -> None:
    model = load(compiled, reference=True)
    assert type(load(compiled)) is type(model)
    again = pickle.loads(pickle.dumps(model))
    ids = torch.arange(3, 40)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    packed = object.__new__(PackedExperts)
    model.model.layers[1].mlp.experts._experts = packed
    with pytest.raises(InputRefused, match="L435") as refused:
        pickle.dumps(model)
    assert "save the adapter" in refused.value.diagnostics[0].hint


def test_experts_that_no_rule_replaced_run_as_stock_runs_them(compiled: Path, checkpoint: Path) -> None:
    chosen = AutoModelForCausalLM.from_pretrained(checkpoint).config._experts_implementation
    assert load(compiled, reference=True).config._experts_implementation == chosen
    assert load(compiled).config._experts_implementation == chosen


def test_options_that_nobody_knows_are_refused_and_decided_ones_are_told(
    compiled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_class = compiled_class(DeepseekV2ForCausalLM)
    with pytest.raises(InputRefused, match=r"L424.*`refrence`") as refused:
        model_class.from_pretrained(compiled, refrence=True)
    assert refused.value.diagnostics[0].hint == "did you mean `reference`?"
    config = AutoConfig.from_pretrained(compiled)
    before = config.to_dict()
    model = model_class.from_pretrained(
        compiled, config=config, device_map="auto", dtype="float32", token=None, low_cpu_mem_usage=True,
        experts_implementation="batched_mm",
    )  # fmt: skip
    assert config.to_dict() == before
    assert model.config is not config
    (line,) = [record.message for record in caplog.records if record.name.startswith("ktc.")]
    assert line.endswith(
        "ignored: device_map, low_cpu_mem_usage, experts_implementation of compiled experts, dtype torch.float32"
    )
    assert model.config._experts_implementation == "batched_mm", "experts that no rule replaced run by it"


def test_the_public_function_is_this_one() -> None:
    assert ktc.load is load

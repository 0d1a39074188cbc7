"""Settings that a library refuses: a user's mistake that is told before anything is written, never a bug of ktc."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

import ktc
from ktc.adapters.adapter import attach
from ktc.diagnostics import Diagnostic, InputRefused, KtcError
from ktc.training.trainers.library_refusals import refusal_in
from ktc.training.tune.prepare import prepare
from ktc.training.tune.rehearsal import rehearse
from ktc.training.tune.settings import TrainSettings
from ktc.training.tune.types import RunPaths

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-lora")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"a line of text, number {number}"}) + "\n" for number in range(4)))
    return path


def test_a_setting_that_trl_refuses_is_named_with_its_words(out: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(InputRefused) as refused:
        ktc.train(out, data, output=run, trace=tmp_path / "trace.json", targets=("q_proj", "lm_head"), max_steps=1)
    (found,) = refused.value.diagnostics
    assert found.code == "T508" and "--targets" in str(found.hint)
    assert found.message.startswith("TRL refuses `targets` = q_proj,lm_head: ") and "lm_head.weight" in found.message
    assert not [*tmp_path.iterdir()]


def test_what_the_twin_accepts_and_a_library_refuses_leaves_nothing_either(
    out: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktc.training.tune.training_run.rehearse", lambda *_: None)
    with pytest.raises(InputRefused, match=r"T508: TRL refuses the settings: .*lm_head"):
        ktc.train(out, data, output=tmp_path / "run", targets=("lm_head",), max_steps=1)
    assert not [*tmp_path.iterdir()]


def test_a_bug_of_ours_stays_one(out: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def arguments(*_: Any, **__: Any) -> None:
        raise ValueError("of ktc itself")

    monkeypatch.setattr("ktc.training.tune.training_run.rehearse", lambda *_: None)
    monkeypatch.setattr("ktc.training.tune.training_run.arguments", arguments)
    with pytest.raises(ValueError, match="of ktc itself"):
        ktc.train(out, data, output=tmp_path / "run", max_steps=1)


def test_a_fault_of_loading_is_no_setting(
    out: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        AutoConfig.for_model("nothing")  # transformers' own ValueError

    monkeypatch.setattr("ktc.training.tune.training_run.rehearse", lambda *_: None)
    monkeypatch.setattr("ktc.training.tune.training_run.load", load)
    with pytest.raises(ValueError, match="nothing") as raised:
        ktc.train(out, data, output=tmp_path / "run", max_steps=1)
    assert not isinstance(raised.value, KtcError)


@pytest.mark.parametrize("where", ["torch.nn.functional", "torch.optim.adamw"])
def test_only_the_parts_of_torch_that_take_settings_refuse_them(where: str) -> None:
    scope: dict[str, Any] = {"__name__": where}
    exec("def call(): raise ValueError('Invalid learning rate: -1')", scope)
    with pytest.raises(ValueError, match="Invalid") as raised:
        scope["call"]()
    refusal = refusal_in(raised.value)
    assert (refusal is not None and refusal.library == "PyTorch") == where.startswith("torch.optim")


def rehearsed(out: Path, data: Path, output: Path, **settings: Any) -> None:
    paths, chosen = RunPaths(out, output), TrainSettings(data=(str(data),), length=64, **settings)
    rehearse(paths, chosen, prepare(paths, chosen))


def test_a_twin_that_cannot_be_built_refuses_nothing(
    out: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_config(*_: Any, **__: Any) -> None:
        AutoConfig.for_model("nothing")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    rehearsed(out, data, tmp_path / "run", targets=("q_proj", "lm_head"))


@pytest.mark.parametrize("settings", [
    {"target_modules": r".*layers\.40\.self_attn\.q_proj"},
    {"target_modules": ["q_proj"], "layers_to_transform": [40]},
    {"target_modules": ["q_proj"], "layers_to_transform": [40], "layers_pattern": "layers"},
    {"target_modules": ["model.layers.40.self_attn.q_proj"], "rank_pattern": {r".*layers\.40\..*": 2}},
    {"target_modules": ["q_proj"], "rank_pattern": {r".*layers\.40\..*": 2}},
    {"target_modules": r".*layers\.(1|40)\.self_attn\.q_proj"},
])  # fmt: skip
def test_layers_that_the_twin_does_not_have_are_not_refused(
    settings: dict[str, Any], out: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
    monkeypatch.setattr("ktc.training.tune.rehearsal.lora_config", lambda *_: config)
    rehearsed(out, data, tmp_path / "run")


def test_all_linear_beside_other_names_is_named_as_such(out: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="T526: `all-linear` excludes other names"):
        ktc.train(out, data, output=tmp_path / "a" / "new" / "run", targets=("all-linear", "q_proj"), max_steps=1)
    assert not [*tmp_path.iterdir()]


def test_the_folders_above_a_refused_run_do_not_stay(
    out: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(*_: Any, **settings: Any) -> None:
        Path(settings["args"].output_dir).mkdir(parents=True)
        AutoConfig.for_model("nothing")

    monkeypatch.setattr("ktc.training.tune.training_run.rehearse", lambda *_: None)
    monkeypatch.setattr("ktc.training.tune.methods.KTSFTTrainer", trainer)
    with pytest.raises(InputRefused, match="T508"):
        ktc.train(out, data, output=tmp_path / "a" / "new" / "run", max_steps=1)
    assert not [*tmp_path.iterdir()]


def test_warnings_without_a_hint_have_no_empty_brackets() -> None:
    from ktc.training.tune.train import _warn

    with pytest.warns(UserWarning, match="^of a kind$"):
        _warn("adapter", (Diagnostic("A613", "of a kind"),))


@pytest.mark.slow
def test_all_linear_layers_are_trained_and_load_on_the_stock_model(out: Path, data: Path, tmp_path: Path) -> None:
    ktc.train(
        out, data, output=tmp_path / "run", targets=("all-linear",), max_steps=1, accumulation=1, length=64,
        precision="fp32", learning_rate=1e-2, scheduler="constant", warmup=0.0,
    )  # fmt: skip
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert {"q_proj", "o_proj"} <= set(config["target_modules"]) and not str(config).count("experts")
    source = json.loads((out / "ktc.json").read_text())["model"]["folder"]
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager").eval()
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(stock, tmp_path / "run").eval()(input_ids=ids).logits
        assert torch.equal(
            attach(ktc.load(out, reference=True), tmp_path / "run", alone=True)(input_ids=ids).logits, theirs
        )


VALUES: dict[str, tuple[Any, ...]] = {
    "data": ("nowhere.jsonl",),
    "format": ("csv",),
    "template": ("none",),
    "eval_data": ("nowhere.jsonl",),
    "eval_split": (1.0, 0.999),
    "length": (2, 10**9),
    "truncate": ("yes",),
    "packing": (True,),
    "train_on_prompt": (1,),
    "rank": (0, 4096),
    "alpha": (0.0, float("inf")),
    "dropout": (0.999, 1.0),
    "rslora": (True,),
    "targets": (("lm_head",), ("embed_tokens",), ("gate",), ("nothing",), ("all-linear", "q_proj"), ("",), (".*",)),
    "learning_rate": (0.0, 1e308, float("nan")),
    "scheduler": ("polynomial", "constant_with_warmup"),
    "warmup": (0.5, 1e9),
    "weight_decay": (1e308,),
    "max_grad_norm": (0.0, 1e308),
    "epochs": (0.0, 1e-9),
    "max_steps": (0, 1),
    "batch": (0, 10_000),
    "accumulation": (0, 10_000),
    "precision": ("fp16", "fp32"),
    "gradient_checkpointing": (True,),
    "stack": ("always", "on"),
    "router_aux_loss": (1e9, -1.0),
    "seed": (2**32, 0),
    "logging_steps": (0, 10**9),
    "eval_steps": (1,),
    "save_steps": (0, 10**9),
    "save_total_limit": (0, 1),
    "early_stopping": (0, 1),
    "tensorboard": (True,),
    "streaming": (True,),
    "method": ("dpo", "rl"),
    "beta": (0.1, -1.0),
    "report_to": (("nowhere",), ("tensorboard",)),
    "column": (("",), ("nowhere",), ("prompt=nowhere",)),
    "processes": (0, -1, 1, 1000),
}


def test_every_setting_has_values_at_its_borders() -> None:
    assert VALUES.keys() == {each.name for each in fields(TrainSettings)}


@pytest.mark.slow
def test_no_setting_is_a_bug_of_ktc(out: Path, data: Path, tmp_path: Path) -> None:
    """Every setting at its borders and beyond: the run ends, or is refused and leaves nothing (`-s` prints which)."""
    plain: dict[str, Any] = {"max_steps": 1, "accumulation": 1, "length": 64}
    for number, (name, value) in enumerate((name, value) for name, values in VALUES.items() for value in values):
        run, settings = tmp_path / str(number), {**plain, name: value}
        rows = settings.pop("data", data)
        try:
            ktc.train(out, rows, output=run, **settings)
            found = "runs"
        except KtcError as refused:
            found = str(refused)
            assert not run.exists(), (name, value, found)
        print(f"{name} = {value}: {found[:120]}")

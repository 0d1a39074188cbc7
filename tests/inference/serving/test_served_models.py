"""Several adapters are loaded at once, each under its name, and a busy batch of one does not see another's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_answers import Answers
from peft import LoraConfig
from recorded_steps import eager_graphs
from strong_adapters import save_strong_adapter

from ktc.diagnostics import InputRefused
from ktc.inference.generate.answers import Sampling, answer
from ktc.inference.generate.language_model import LanguageModel, open_language_model
from ktc.inference.generate.prompts import render
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.models import LoadedAdapters, ServedModels, named_adapters, open_served_models
from ktc.inference.serving.request import Limits, Request
from ktc.model.decode_steps.cuda_graph import DecodeGraphs

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ("Hello", "Rain falls on the hills", "def add(a, b):")


@pytest.fixture(scope="module")
def on_experts(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on the routed experts, of a rank that the other adapter does not have."""
    config = LoraConfig(r=3, target_modules=["o_proj"], target_parameters=[
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    ])  # fmt: skip
    return save_strong_adapter(compiled, config, tmp_path_factory.mktemp("adapter") / "experts", 2)


@pytest.fixture(scope="module")
def models(compiled: Path, adapter: Path, on_experts: Path) -> ServedModels:
    return open_served_models(compiled, [f"tuned={adapter}", f"on/experts-1.0={on_experts}"], reference=True)


def answered(opened: LanguageModel, tokens: list[int]) -> str:
    return opened.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("graphs", [None, eager_graphs()], ids=["eager", "graphs"])
def test_each_name_answers_as_its_adapter_alone(
    models: ServedModels, compiled: Path, adapter: Path, on_experts: Path, graphs: DecodeGraphs | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(models.default.opened.model.get_base_model(), "decode_graphs", graphs)
    folders = dict(zip(models.names, (None, adapter, on_experts), strict=True))
    answers = Answers()
    model = models.default.opened.model
    engine = Engine(ModelRunner(model), Limits(), answers, LoadedAdapters(model))
    engine.start()
    for name, served in models.names.items():
        for text in TEXTS:
            tokens = render(served.opened, text).input_ids
            config = served.opened.model.generation_config
            engine.submit(Request(f"{name} {text}", tokens, 10, config, adapter=served.adapter))
    found = {
        (name, text): answered(served.opened, answers.wait(f"{name} {text}")[0])
        for name, served in models.names.items()
        for text in TEXTS
    }
    kept = [batch for batch in engine._worker.batches.values() if batch.is_kept]
    assert len(kept) == (3 if graphs is not None else 0)
    engine.stop()
    for name, folder in folders.items():
        opened = open_language_model(compiled, adapter=folder, reference=True)
        for text in TEXTS:
            assert found[name, text] == answer(opened, render(opened, text), Sampling(10))[0].text
    assert len({found[name, TEXTS[0]] for name in models.names}) == 3


def test_a_plain_adapter_answers_under_the_name_of_the_model(compiled: Path, adapter: Path) -> None:
    models = open_served_models(compiled, [str(adapter)], reference=True)
    assert list(models.names) == [compiled.name]
    assert (models.default.adapter, models.default.opened.adapter) == ("default", str(adapter))


@pytest.mark.parametrize("given", [["a", "b"], ["x=a", "x=b"], ["=a"], ["x="]])
def test_adapters_need_different_names(given: list[str]) -> None:
    with pytest.raises(InputRefused) as refused:
        named_adapters(given)
    assert [found.code for found in refused.value.diagnostics] == ["G723"]


def test_an_adapter_that_does_not_fit_is_refused_by_name(compiled: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refused:
        open_served_models(compiled, [str(adapter), f"other={tmp_path}"], reference=True)
    assert [found.code for found in refused.value.diagnostics] == ["A601"]
    with pytest.raises(InputRefused) as refused:
        open_served_models(compiled, [f"{compiled.name}={adapter}"], reference=True)
    assert [found.code for found in refused.value.diagnostics] == ["G723"]


@pytest.fixture(scope="module")
def changing(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that subtracts its first factors from the weights whenever it is loaded."""
    config = LoraConfig(r=3, target_modules=["o_proj"], init_lora_weights="pissa")
    return save_strong_adapter(compiled, config, tmp_path_factory.mktemp("adapter") / "pissa", 3)


def test_one_that_changes_the_model_is_served_where_nothing_else_answers(compiled: Path, changing: Path) -> None:
    served = open_served_models(compiled, [str(changing)], reference=True).default.opened
    alone = open_language_model(compiled, adapter=changing, reference=True)
    wanted = answer(alone, render(alone, TEXTS[0]), Sampling(10))[0].text
    assert answer(served, render(served, TEXTS[0]), Sampling(10))[0].text == wanted
    for given, updates in ([str(changing)], True), ([f"tuned={changing}"], False):
        with pytest.raises(InputRefused, match=r"(?s)A603: .*changes `.*o_proj.weight`.*without updates"):
            open_served_models(compiled, given, reference=True, updates=updates)


def test_the_first_adapter_that_a_running_server_loads_leaves_the_model_as_it_is(
    compiled: Path, changing: Path
) -> None:
    opened = open_language_model(compiled, reference=True)
    before = answer(opened, render(opened, TEXTS[0]), Sampling(10))[0].text
    weight = opened.model.get_submodule("model.layers.0.self_attn.o_proj").weight
    values = weight.detach().clone()
    with pytest.raises(InputRefused, match="A603"):
        LoadedAdapters(opened.model).load("late", changing)
    assert torch.equal(weight, values)
    assert answer(opened, render(opened, TEXTS[0]), Sampling(10))[0].text == before

"""Decoding steps on the CPU as native programs: those of the model, and told where there are none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ktc
from ktc.model.decode_steps.cuda_graph import DecodeGraphs

# Grouped-query attention, latents, windows with sinks.
FAMILIES = ("olmoe", "deepseek_v2", pytest.param("gpt_oss", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def compiled_for_inference(inference_twin: Callable[[str], Path]) -> Callable[[str], Any]:
    return lambda family: ktc.load(inference_twin(family))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, compiled_for_inference: Callable[[str], Any]) -> Any:
    return compiled_for_inference(request.param)


def generated(model: Any, rows: int = 2, tokens: int = 20, **options: Any) -> Any:
    ids = torch.randint(3, model.config.vocab_size, (rows, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1:, :2] = 0
    given = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True, **options}
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **given)


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that programs compute from now on."""
    steps: list[int] = []
    recorder = model.decode_graphs.recorder

    def record(*given: Any) -> Any:
        output, run = recorder.record(*given)
        return output, lambda: (steps.append(1), run())[1]

    from dataclasses import replace

    monkeypatch.setattr(model, "decode_graphs", DecodeGraphs(replace(recorder, record=record)))
    return steps


def told(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if "L453" in record.getMessage())


@pytest.mark.parametrize("rows", [1, 3])
def test_generate_takes_its_steps_from_programs(
    model: Any, rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = counted(model, monkeypatch)
    found = generated(model, rows)
    assert len(steps) == 19
    assert not told(caplog)
    monkeypatch.setattr(model, "decode_graphs", None)
    wanted = generated(model, rows)
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(difference(a, b) < 0.02 for a, b in zip(found.logits, wanted.logits, strict=True))


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_no_operation_of_a_layer_is_left_to_pytorch(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="ktc.model.decode_steps.native_step")
    model.decode_graphs = copy.deepcopy(model.decode_graphs)
    generated(model, tokens=3)
    lines = {record.getMessage() for record in caplog.records if record.name == "ktc.model.decode_steps.native_step"}
    left = {name for line in lines for name in line.partition(": ")[2].split(", ")}
    assert left <= {"aten.polar.default", "aten.max.dim"}  # once per step


def test_a_cache_that_outgrows_its_capacity_goes_on(
    compiled_for_inference: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compiled_for_inference("olmoe")
    steps = counted(model, monkeypatch)
    found = generated(model, tokens=260)
    assert len(steps) == 259
    monkeypatch.setattr(model, "decode_graphs", None)
    assert torch.equal(found.sequences, generated(model, tokens=260).sequences)


def test_other_calls_are_the_models_own_and_told(
    compiled_for_inference: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = compiled_for_inference("olmoe")
    steps = counted(model, monkeypatch)
    assert generated(model, num_beams=2).sequences.shape[1] <= 29
    assert generated(model, tokens=4, output_hidden_states=True).hidden_states
    assert not steps
    assert "`output_hidden_states`" in told(caplog)


def test_steps_whose_program_is_another_are_the_models_own(
    compiled_for_inference: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ktc.model.steps.program import StepProgram

    model = compiled_for_inference("olmoe")
    wanted = generated(model).sequences
    monkeypatch.setattr(model, "decode_graphs", copy.deepcopy(model.decode_graphs))
    monkeypatch.setattr("ktc.model.decode_steps.native_step.StepProgram.run", lambda _: None, raising=True)
    assert StepProgram.run is not None
    assert torch.equal(generated(model).sequences, wanted)
    assert "other tokens" in told(caplog) or "other values" in told(caplog)


def test_an_adapter_is_part_of_the_state(
    compiled_for_inference: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(
        compiled_for_inference("olmoe"), LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    ).eval()
    base = tuned.get_base_model()
    steps = counted(base, monkeypatch)
    with_adapter = generated(tuned).sequences
    with tuned.disable_adapter():
        without = generated(tuned).sequences
    assert len(steps) == 38
    monkeypatch.setattr(base, "decode_graphs", None)
    assert torch.equal(generated(tuned).sequences, with_adapter)
    with tuned.disable_adapter():
        assert torch.equal(generated(tuned).sequences, without)

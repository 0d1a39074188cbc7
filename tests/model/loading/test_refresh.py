"""New weights in the place of old ones: the model that a load would give, or the old one, bit for bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from other_weights import Tensors, rewritten
from peft import LoraConfig, get_peft_model
from refresh_cycle import assert_awaits
from torch import Tensor

import ktc
from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation.host import find_compiler
from ktc.model.experts.load_state import LoadState
from ktc.model.experts.module import FusedMoe
from ktc.model.steps.program import StepProgram
from ktc.stages.link import link

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module", params=["reference", pytest.param("kernel", marks=needs_compiler)])
def out(
    request: pytest.FixtureRequest, compiled: Path, checkpoint: Path, hand_made: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:  # fmt: skip
    if request.param == "reference":
        return compiled
    return link(hand_made.package(checkpoint, hand_made.scalar_kernel()), tmp_path_factory.mktemp("build") / "v2_twin")


@pytest.fixture
def model(out: Path) -> Any:
    return ktc.load(out)


@pytest.fixture(scope="module")
def other(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewritten(checkpoint, tmp_path_factory.mktemp("other") / checkpoint.name)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


def addresses(model: Any) -> Iterator[int]:
    yield from (tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
    for module in model.modules():
        if isinstance(module, FusedMoe):
            packed = module.weights.packed
            yield from [packed.packed.data_ptr()] if packed else map(Tensor.data_ptr, module.weights.stock.values())


def refused(code: str, call: Callable[[], object]) -> str:
    with pytest.raises((InputRefused, HostLacks)) as error:
        call()
    assert [found.code for found in error.value.diagnostics] == [code]
    return error.value.diagnostics[0].message


def test_a_cycle_with_the_same_weights_changes_no_bit_and_no_address(model: Any, checkpoint: Path) -> None:
    before, places = logits(model), list(addresses(model))
    model.process_weights()
    assert_awaits(lambda: model.load_weights(checkpoint), "over those")
    model.restore_weights()
    assert_awaits(lambda: logits(model), f"`{EXPERTS}` is awaiting a load")
    assert_awaits(model.process_weights, "not loaded")
    model.load_weights(checkpoint)
    assert model.get_submodule(EXPERTS).weights.loads.state is LoadState.PACKED_CANONICAL
    assert_awaits(lambda: logits(model), f"`{EXPERTS}` is loaded, and not processed")
    model.process_weights()
    model.process_weights()
    assert torch.equal(logits(model), before)
    assert list(addresses(model)) == places


@pytest.mark.parametrize("how", ["at once", "in place"])
def test_other_weights_are_those_of_a_load(out: Path, model: Any, other: Path, how: str) -> None:
    before, places = logits(model), list(addresses(model))
    if how == "at once":
        model.refresh(other)
    else:
        model.restore_weights()
        model.load_weights(other)
        model.process_weights()
    wanted = logits(ktc.load(out, weights=other))
    assert torch.equal(logits(model), wanted)
    assert not torch.equal(before, wanted)
    assert list(addresses(model)) == places
    assert model.name_or_path == model.config.name_or_path == str(other)


def test_adapters_stay_on_the_new_weights(out: Path, other: Path, adapter: Path) -> None:
    from ktc.adapters.adapter import attach

    tuned: Any = attach(ktc.load(out), adapter, alone=True)
    tuned.refresh(other)
    wanted: Any = attach(ktc.load(out, weights=other), adapter, alone=True)
    assert torch.equal(logits(tuned), logits(wanted))
    with tuned.disable_adapter(), wanted.disable_adapter():
        assert torch.equal(logits(tuned), logits(wanted))


def first(tensors: Tensors, words: str) -> str:
    return next((name for name in tensors if words in name), "")


def with_nan(tensors: Tensors) -> None:
    if name := first(tensors, "layers.2.mlp.experts.0.down_proj"):
        tensors[name][0, 0] = torch.nan


def lacking(tensors: Tensors) -> None:
    if name := first(tensors, "layers.2.mlp.experts.0.down_proj"):
        del tensors[name]


def misshapen(tensors: Tensors) -> None:
    if name := first(tensors, "model.norm"):
        tensors[name] = tensors[name][:-1].clone()


def cut_short(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-64])


def other_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))


def no_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": "many"')


FAULTS: dict[str, tuple[str, Any, Any]] = {
    "NaN": ("L407", with_nan, None), "a missing tensor": ("I115", lacking, None),
    "another shape": ("L406", misshapen, None), "a truncated file": ("I112", None, cut_short),
    "another config": ("L405", None, other_config), "no config": ("L405", None, no_config),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_checkpoint_leaves_the_old_weights(model: Any, checkpoint: Path, tmp_path: Path, fault: str) -> None:
    code, change, break_folder = FAULTS[fault]
    folder = rewritten(checkpoint, tmp_path / "model", change or (lambda tensors: None))
    if break_folder is not None:
        break_folder(folder)
    before, places = logits(model), list(addresses(model))
    refused(code, lambda: model.refresh(folder))
    assert torch.equal(logits(model), before)
    assert list(addresses(model)) == places


def test_a_fault_while_loading_in_place_leaves_the_model_waiting(model: Any, checkpoint: Path, tmp_path: Path) -> None:
    before = logits(model)
    model.restore_weights()
    refused("L407", lambda: model.load_weights(rewritten(checkpoint, tmp_path / "model", with_nan)))
    assert_awaits(model.process_weights)
    assert_awaits(lambda: logits(model))
    model.load_weights(checkpoint)
    model.process_weights()
    assert torch.equal(logits(model), before)


def test_models_whose_weights_are_not_their_own_are_refused(
    model: Any, checkpoint: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = copy.deepcopy(model)
    model.refresh(other)
    if model.get_submodule(EXPERTS).weights.packed is not None:
        assert_awaits(lambda: logits(copied), "shares with a copy")
    monkeypatch.setattr("ktc.foundation.host.available_memory", lambda: 1000)
    assert "beside the model" in refused("L462", lambda: model.refresh(checkpoint))
    tuned: Any = get_peft_model(model, LoraConfig(target_modules=["o_proj"]))
    tuned.merge_adapter()
    assert "merged" in refused("L461", model.restore_weights)
    tuned.unmerge_adapter()
    monkeypatch.setattr(model, "loaded_from", None)
    assert "compiled folder" in refused("L461", lambda: model.refresh(checkpoint))


@needs_compiler
def test_mapped_experts_are_refused(checkpoint: Path, hand_made: ModuleType, tmp_path: Path) -> None:
    folder = link(hand_made.package(checkpoint, hand_made.scalar_kernel()), tmp_path / "v2_twin")
    ktc.pack(folder)
    assert "mapped read-only" in refused("L461", ktc.load(folder, map=True).restore_weights)


@pytest.mark.slow
@needs_compiler
def test_programs_of_steps_read_new_weights_where_the_old_ones_were(
    inference_twin: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = inference_twin("olmoe")
    model: Any = ktc.load(out)
    programs, run = list[StepProgram](), StepProgram.run
    monkeypatch.setattr(StepProgram, "run", lambda self: (programs.append(self), run(self)))

    def generated() -> list[int]:
        ids = torch.arange(5, 12)[None]
        return model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()

    before, source = generated(), Path(model.config.name_or_path)
    recorded = programs[-1]
    found = next(each for each in _written(recorded) if each.shape[-1:] == (model.config.vocab_size,))
    last = found.clone()
    model.refresh(source)
    recorded.run()
    assert torch.equal(found, last)  # the step that was recorded before, at the addresses of before
    assert generated() == before
    model.refresh(other := rewritten(source, tmp_path / "model"))
    del programs[:]
    changed = generated()
    assert programs and recorded not in programs
    model = ktc.load(out, weights=other)
    assert changed == generated() != before


def _written(program: StepProgram) -> list[Tensor]:
    """The tensors of a program, the last one first."""
    (_, arena, _, _) = program.kept
    return list(reversed(arena._placed.values()))

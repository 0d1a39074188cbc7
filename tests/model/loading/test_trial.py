"""A linked folder is loaded and used before it is put in place; what fails is refused, and nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.model.loading import load_as, trial, trial_steps
from ktc.model.loading.compiled_model import CompiledModel
from ktc.model.loading.trial import try_out
from ktc.stages.link import link


def test_a_trial_generates_trains_and_keeps_the_adapter(compiled: Path) -> None:
    state = torch.get_rng_state()
    found = try_out(compiled)
    assert found.kernels == "built"
    assert found.layers == found.all_layers > 0
    assert [step.split()[0] for step in found.ran] == ["generating", "attaching", "a", "generating", "saving"]
    assert found.notes == ()
    assert torch.equal(state, torch.get_rng_state())


def test_a_step_that_only_the_compiled_model_fails_is_refused(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = trial_steps._generate

    def failing(model: Any, tokens: torch.Tensor) -> None:
        if isinstance(model, CompiledModel):
            raise KeyError("no such cache")
        stock(model, tokens)

    monkeypatch.setattr(trial_steps, "_generate", failing)
    with pytest.raises(InputRefused, match=r"I147: .*generating 4 tokens: it raises KeyError: 'no such cache' \("):
        try_out(compiled)


def test_a_step_that_the_stock_model_fails_too_is_a_note(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(model: Any, tokens: torch.Tensor) -> None:
        raise KeyError("no such cache")

    monkeypatch.setattr(trial_steps, "_generate", failing)
    found = try_out(compiled)
    assert [step.split()[0] for step in found.ran] == ["attaching", "a", "saving"]  # the others are tried
    assert found.notes[0].startswith("generating 4 tokens: the stock model raises KeyError: 'no such cache'")


def test_another_fault_in_a_step_that_the_stock_model_fails_too_is_refused(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: Any, tokens: torch.Tensor) -> None:
        raise KeyError("of ktc") if isinstance(model, CompiledModel) else RuntimeError("of stock")

    monkeypatch.setattr(trial_steps, "_generate", failing)
    with pytest.raises(InputRefused, match=r"I147: .*it raises KeyError: 'of ktc'"):
        try_out(compiled)


def test_a_large_model_is_tried_by_its_first_layers(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WHOLE", 0)
    monkeypatch.setattr(trial, "RANDOM", 0)  # all weights are zeros
    found = try_out(compiled)
    assert 2 <= found.layers <= found.all_layers
    assert len(found.ran) == 5


def test_what_fails_for_the_first_layers_alone_is_not_said_of_the_stock_model(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "WHOLE", 0)
    monkeypatch.setattr(trial_steps, "_generate", lambda model, tokens: [][2])
    notes = try_out(compiled).notes
    assert notes[0].startswith("generating 4 tokens: the stock model's first 2 layers alone raise IndexError")


def test_what_was_built_for_another_machine_is_tried_by_its_references(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = load_as.check_fit

    def lacking(manifest: Any, folder: Path, checkpoint: Path, reference: bool) -> Any:
        if not reference:
            raise HostLacks(Diagnostic("H201", "this machine lacks amx"))
        return stock(manifest, folder, checkpoint, reference)

    monkeypatch.setattr(load_as, "check_fit", lacking)
    found = try_out(compiled)
    assert found.kernels == "references"
    assert found.notes == ("what was built for another machine was not run: this machine lacks amx",)


def test_a_machine_without_memory_for_the_trial_compiles(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise MemoryError("cannot allocate 24,000,000,000 bytes for weights")

    monkeypatch.setattr(trial, "fill_within", lacking)
    found = try_out(compiled)
    assert found.ran == ()
    assert found.notes[0].startswith("not tried: ")


def test_rows_that_leave_a_tensor_empty_are_refused(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = load_as.read_rows(compiled, load_as.read_manifest(compiled))
    left = tuple(row for row in rows if "layers.1." not in row.target or "down_proj" not in row.target)
    monkeypatch.setattr(load_as, "read_rows", lambda folder, manifest: left)
    with pytest.raises(InputRefused, match=r"(?s)I147.*L408: nothing .* fills `model.layers.1.*down_proj"):
        try_out(compiled)


def test_a_failed_trial_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    import hand_made

    def failing(folder: Path) -> None:
        assert (folder / "ktc.json").is_file()
        raise InputRefused(Diagnostic("I147", "it would not work"))

    with pytest.raises(InputRefused, match="I147"):
        link(hand_made.package(checkpoint), tmp_path / "inner" / "tried", trial=failing)
    assert list(tmp_path.iterdir()) == []

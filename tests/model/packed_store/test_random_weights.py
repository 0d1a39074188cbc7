"""Random weights instead of a checkpoint: config.json alone compiles, loads and trains, the same for the same seed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ktc
from ktc.diagnostics import InputRefused
from ktc.model.experts.module import FusedMoe
from ktc.model.packed_store.random_weights import fill_random


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    experts = {
        f"{name}.{expert}": module.expert(expert, "down")
        for name, module in model.named_modules()
        if isinstance(module, FusedMoe)
        for expert in range(module.num_experts)
    }
    return {**model.state_dict(), **experts}


def test_a_compiled_model_loads_with_random_weights(compiled: Path) -> None:
    reported: list[tuple[int, int]] = []
    model = ktc.load(compiled, random_weights=7, progress=lambda done, total: reported.append((done, total)))
    first, again, other = (
        values(each) for each in (model, ktc.load(compiled, random_weights=7), ktc.load(compiled, random_weights=8))
    )
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    for name, tensor in first.items():
        assert bool(tensor.isfinite().all()), name
        if tensor.dim() == 2 and tensor.numel() > 64:
            assert 0.015 < float(tensor.float().std()) < 0.025, name
            assert not torch.equal(tensor, other[name]), name
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all()), name
    assert reported
    assert max(done for done, _ in reported) <= reported[-1][1]
    ids = torch.arange(20).view(1, -1)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert float(loss) == pytest.approx(torch.tensor(float(model.config.vocab_size)).log().item(), rel=0.05)


def test_random_weights_cannot_be_mapped(compiled: Path) -> None:
    with pytest.raises(InputRefused, match="L443"):
        ktc.load(compiled, random_weights=7, map=True)


def test_a_config_alone_is_compiled_for_random_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktc.compiler.proven", lambda analysis, observe: (analysis, ()))  # which needs no checkpoint
    folder = tmp_path / "config_only"
    folder.mkdir()
    shutil.copy(checkpoint / "config.json", folder)
    with pytest.raises(InputRefused, match="I106"):
        ktc.compile(folder, "moe-lora", tmp_path / "tuned", settings={"device": "cpu"})
    out = ktc.compile(folder, "moe-lora", tmp_path / "tuned", settings={"device": "cpu"}, random_weights=True)
    with pytest.raises(InputRefused, match="I111"):
        ktc.load(out)
    model = ktc.load(out, random_weights=0)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_integers_are_refused() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
        model.register_buffer("table", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputRefused, match="L446: `table` has integers"):
        fill_random(model, {}, 0)

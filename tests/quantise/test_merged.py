"""An adapter merged into INT4 is what merging and quantising give, and never rounds twice unasked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_twins import adapted, stock
from safetensors.torch import load_file, save_file
from torch import Tensor

from ktc import twin
from ktc.adapters.base_model import read_base
from ktc.adapters.merge import merge
from ktc.checkpoint.full_precision import FullPrecision
from ktc.checkpoint.index import open_index
from ktc.checkpoint.int4 import fake_quantised, quantised
from ktc.checkpoint.reader import TensorReader
from ktc.cli.app import main
from ktc.diagnostics import InputRefused
from ktc.quantise import original
from ktc.quantise.checkpoint import quantize
from ktc.quantise.scheme import SCHEMES

pytestmark = pytest.mark.usefixtures("one_thread")
G32 = SCHEMES["int4-g32"]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """The checkpoint of a twin with rows of whole groups, and an adapter on it."""
    config = twin.shrink(twin.default_config("qwen3_moe"))
    vars(config).update({"hidden_size": 64, "moe_intermediate_size": 96})
    base = tmp_path / "model"
    twin.build(config, seed=5, dtype=torch.bfloat16).save_pretrained(base, max_shard_size="60KB")
    adapted(stock(base, torch.bfloat16)).save_pretrained(str(tmp_path / "adapter"))
    return base, tmp_path / "adapter"


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


def assert_same(found: Path, expected: Path) -> None:
    values, wanted = stored(found), stored(expected)
    assert values.keys() == wanted.keys()
    assert all(torch.equal(values[name], wanted[name]) for name in wanted)


def code(call: Callable[[], Any]) -> str:
    with pytest.raises(InputRefused) as refusal:
        call()
    return refusal.value.diagnostics[0].code


def test_it_is_what_merging_and_quantising_give(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = saved
    merge(adapter, tmp_path / "merged", base)
    two_steps = quantize(tmp_path / "merged", tmp_path / "two-steps", G32)
    assert main(["merge", str(base), str(adapter), "-o", str(tmp_path / "one-step"), "--int4"]) == 0
    found, expected = stored(tmp_path / "one-step"), stored(two_steps.path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    config = json.loads((tmp_path / "one-step" / "config.json").read_text())
    assert config == json.loads((two_steps.path / "config.json").read_text())
    dense, loaded = stock(tmp_path / "merged", torch.bfloat16), stock(tmp_path / "one-step", torch.bfloat16)
    name = "model.layers.0.mlp.experts.down_proj"
    wanted = quantised(dense.state_dict()[name].flatten(0, 1), 32).weight(torch.bfloat16)
    assert torch.equal(loaded.state_dict()[name].flatten(0, 1), wanted)


def test_merging_beside_rounded_weights_has_to_be_asked_for(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = saved
    rounded = quantize(base, tmp_path / "int4", G32).path
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(rounded)}))
    assert code(lambda: quantize(rounded, tmp_path / "out", G32, adapter=adapter)) == "Q505"
    assert not (tmp_path / "out").exists()
    done = quantize(rounded, tmp_path / "again", G32, adapter=adapter, requantise=True)
    assert done.drift is not None
    assert 0.01 < done.drift < 100
    assert 0.03 < done.rounding_error < 0.2
    dense = tmp_path / "dense"
    shutil.copytree(base, dense)
    for path in dense.glob("*.safetensors"):
        tensors = {
            name: each if ".experts." not in name else fake_quantised(each, 32)
            for name, each in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(dense)}))
    merge(adapter, tmp_path / "merged", dense)
    expected, found = stored(quantize(tmp_path / "merged", tmp_path / "reference", G32).path), stored(done.path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_grid_of_training_decides(
    saved: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = saved
    arguments = {"grid": "int4 32 scale_first", "merged": ""}
    rewrite = SimpleNamespace(fqn="model.layers.0.mlp", rule="experts", args=arguments)
    compiled = tmp_path / "compiled"
    compiled.mkdir()
    (compiled / "ktc.json").write_text("{}")
    monkeypatch.setattr(original.compiled, "read_manifest", lambda folder: SimpleNamespace(rewrites=(rewrite,)))
    monkeypatch.setattr(original, "find_base", lambda opened, model: read_base(base))
    assert code(lambda: quantize(compiled, tmp_path / "out", G32, adapter=adapter)) == "Q505"
    assert code(lambda: original.trained_grid(compiled)) == "Q505"
    again = quantize(compiled, tmp_path / "again", G32, adapter=adapter, requantise=True)
    trained = tmp_path / "trained"  # the base as training had it
    shutil.copytree(base, trained)
    for path in trained.glob("*.safetensors"):
        tensors = load_file(path).items()
        rounded = {name: fake_quantised(each, 32) if ".experts." in name else each for name, each in tensors}
        save_file(rounded, path, metadata={"format": "pt"})
    monkeypatch.setattr(original, "find_base", lambda opened, model: read_base(trained))
    assert_same(again.path, quantize(trained, tmp_path / "wanted", G32, adapter=adapter).path)
    monkeypatch.setattr(original, "find_base", lambda opened, model: read_base(base))
    arguments["masters"] = "float32"
    assert original.trained_grid(compiled) == G32.grid
    arguments["masters"], arguments["merged"] = "", "merged"
    assert code(lambda: quantize(compiled, tmp_path / "out", SCHEMES["int4-channel"], adapter=adapter)) == "Q506"
    assert quantize(compiled, tmp_path / "out", G32, adapter=adapter).drift is not None


def test_weights_are_read_as_they_are_loaded(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = saved
    rounded = quantize(base, tmp_path / "int4", SCHEMES["int4-channel"], "linears").path
    config = json.loads((rounded / "config.json").read_text())["quantization_config"]
    weights = FullPrecision(open_index(rounded), config)
    expected = stored(base)
    assert weights.index.tensors.keys() == expected.keys()
    with TensorReader(rounded) as stored_reader:
        reader = weights.reader(stored_reader)
        for name, entry in weights.index.tensors.items():
            whole = reader.read(entry)
            assert whole.shape == expected[name].shape
            if name in weights.coded:
                assert torch.equal(whole, quantised(expected[name], -1).weight(torch.bfloat16))
                assert torch.equal(reader.read(entry, slice(3, 9)), whole[3:9])

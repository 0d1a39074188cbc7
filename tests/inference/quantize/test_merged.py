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

from ktc.adapters.base_model import read_base
from ktc.adapters.merge import merge
from ktc.cli.app import main
from ktc.diagnostics import InputRefused
from ktc.inference.quantize import original, trained_grids
from ktc.inference.quantize.checkpoint import quantize
from ktc.inference.quantize.gguf_model import write_gguf_model
from ktc.inference.quantize.scheme import SCHEMES
from ktc.inference.quantize.trained_grids import merged_grid, rounded_in_training
from ktc.model import twin
from ktc.model.checkpoint.full_precision import FullPrecision
from ktc.model.checkpoint.index import open_index
from ktc.model.checkpoint.int4 import fake_quantised, quantised
from ktc.model.checkpoint.reader import TensorReader

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


def rounding(base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The arguments of a program that rounds the experts of `base`, compiled into `folder`."""
    arguments = {"grid": G32.grid, "merged": "", "masters": ""}
    fqns = (f"model.layers.{layer}.mlp.experts" for layer in range(read_base(base).config.num_hidden_layers))
    rewrites = tuple(SimpleNamespace(fqn=fqn, rule="experts", args=arguments) for fqn in fqns)
    folder.mkdir()
    (folder / "ktc.json").write_text("{}")
    monkeypatch.setattr(trained_grids.compiled, "read_manifest", lambda folder: SimpleNamespace(rewrites=rewrites))
    monkeypatch.setattr(original, "find_base", lambda opened, model: read_base(base))
    return arguments


def test_the_grid_of_training_decides(
    saved: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = saved
    compiled = tmp_path / "compiled"
    arguments = rounding(base, compiled, monkeypatch)
    assert code(lambda: quantize(compiled, tmp_path / "out", G32, adapter=adapter)) == "Q505"
    assert code(lambda: write_gguf_model(compiled, tmp_path / "out", adapter=adapter)) == "Q505"
    again = quantize(compiled, tmp_path / "again", G32, adapter=adapter, requantise=True)
    trained = tmp_path / "trained"  # the base as training had it
    shutil.copytree(base, trained)
    for path in trained.glob("*.safetensors"):
        tensors = load_file(path).items()
        rounded = {name: fake_quantised(each, 32) if ".experts." in name else each for name, each in tensors}
        save_file(rounded, path, metadata={"format": "pt"})
    monkeypatch.setattr(original, "find_base", lambda opened, model: read_base(trained))
    wanted = quantize(trained, tmp_path / "wanted", G32, adapter=adapter)
    assert_same(again.path, wanted.path)
    monkeypatch.setattr(original, "find_base", lambda opened, model: read_base(base))
    arguments["masters"] = "float32"
    assert merged_grid(rounded_in_training(compiled, adapter)) == G32.grid
    arguments["masters"], arguments["merged"] = "", "merged"
    assert code(lambda: quantize(compiled, tmp_path / "out", SCHEMES["int4-channel"], adapter=adapter)) == "Q506"
    assert quantize(compiled, tmp_path / "out", G32, adapter=adapter).drift is not None


def record(adapter: Path, words: str, *modules: str) -> None:
    found = {"experts": [words], "rounded": dict.fromkeys(modules, words)}
    (adapter / "adapter_ktc.json").write_text(json.dumps(found))


EXPERTS = tuple(f"model.layers.{layer}.mlp.experts" for layer in range(2))
Q_PROJ = tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))


def test_an_adapter_that_was_trained_beside_int4_is_not_merged_whatever_model_is_named(
    saved: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, adapter = saved
    record(adapter, G32.grid, *EXPERTS)
    out, named = str(tmp_path / "out"), (str(base), str(adapter))
    for command in (["merge", *named, "--int4"], ["merge", *named], ["export", str(adapter), "--int4"]):
        assert main([*command, "-o", out]) == 2
        assert "Q505" in capfd.readouterr().err
    assert main(["export", str(adapter), "--gguf", "--merged", "-o", out]) == 2
    assert "each with `--gguf`" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["merge", *named, "--int4", "--requantize-merged", "-o", out]) == 0
    (adapter / "adapter_ktc.json").write_text("{")
    assert main(["merge", *named, "--int4", "-o", str(tmp_path / "other")]) == 2
    assert "A602" in capfd.readouterr().err


def test_a_merge_rounds_the_modules_that_training_rounded(
    saved: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, adapter = saved
    named = (str(base), str(adapter), "--int4", "-o", str(tmp_path / "out"))
    record(adapter, f"{G32.grid}, merged with the adapter", *EXPERTS, *Q_PROJ)
    for modules, message in (("experts", "rounded `model.layers.0.self_attn.q_proj`"), ("linears", "did not round")):
        assert main(["merge", *named, "--modules", modules]) == 2
        assert message in capfd.readouterr().err
    assert main(["merge", *named, "--scheme", "int4-channel", "--modules", "trained"]) == 2
    assert "Q506" in capfd.readouterr().err
    assert main(["merge", *named, "--modules", "trained"]) == 0
    packed = {name.removesuffix(".weight_packed") for name in stored(tmp_path / "out") if name.endswith("_packed")}
    assert {name for name in packed if ".experts." not in name} == set(Q_PROJ)
    assert main(["verify", str(tmp_path / "out"), "--source"]) == 0
    (adapter / "adapter_ktc.json").unlink()
    assert main(["merge", *named[:3], "-o", str(tmp_path / "other"), "--modules", "trained"]) == 2
    assert "nothing says that training rounded" in capfd.readouterr().err


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

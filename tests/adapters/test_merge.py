"""`ktc merge`: what it writes is what peft would merge, rounded once, in bounded memory, and nothing is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_twins import adapted, checkpoint, stock
from safetensors.torch import load_file, save_file
from torch import Tensor

from ktc.adapters import merge as merging
from ktc.adapters.export import export
from ktc.adapters.merge import merge
from ktc.adapters.save import require_new
from ktc.cli.app import main
from ktc.cli.early_checks import require_original
from ktc.diagnostics import InputRefused
from ktc.model.checkpoint.reader import TensorReader

pytestmark = pytest.mark.usefixtures("one_thread")


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """The checkpoint of a twin and the folder of an adapter on it."""
    base = checkpoint(family, folder, dtype)
    adapted(stock(base, torch.float32)).save_pretrained(str(folder / "adapter"))
    return base, folder / "adapter"


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def code(call: Callable[[], Any]) -> str:
    with pytest.raises(InputRefused) as refusal:
        call()
    return refusal.value.diagnostics[0].code


@pytest.fixture
def bands(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small bands, and the bytes of each read."""
    monkeypatch.setattr(merging, "_ADDED", 512)
    sizes: list[int] = []
    read = TensorReader.read

    def counted(self: TensorReader, *arguments: Any) -> Tensor:
        found = read(self, *arguments)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(TensorReader, "read", counted)
    return sizes


@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss"])
def test_it_is_what_peft_merges(family: str, tmp_path: Path, bands: list[int]) -> None:
    base, adapter = saved(family, tmp_path)
    done = merge(adapter, tmp_path / "merged")
    assert max(bands) <= 512, "no more than a band of a tensor is held"
    wanted = adapted(stock(base)).merge_and_unload().state_dict()
    found = stock(tmp_path / "merged").state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= 1e-6 * tensor.norm(), name
    original, merged = stored(base), stored(tmp_path / "merged")
    changed = [name for name in original if not torch.equal(original[name], merged[name])]
    assert len(changed) == done.changed < done.tensors == len(original)
    names = {"ktc_conversion.json", *(path.name for path in base.iterdir())}
    assert names == {path.name for path in (tmp_path / "merged").iterdir()}
    require_new(tmp_path / "merged", force=True)


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    base, adapter = saved("qwen3_moe", tmp_path, torch.bfloat16)
    merge(adapter, tmp_path / "merged")
    name = "model.layers.0.self_attn.q_proj"
    factors = load_file(adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{name}.lora_{side}.weight"].float() for side in "AB")
    weight = stored(base)[f"{name}.weight"]
    assert torch.equal(stored(tmp_path / "merged")[f"{name}.weight"], (weight.float() + 3 * (b @ a)).bfloat16())
    again = export(adapter, "per-expert", tmp_path / "one-by-one").path
    assert main(["merge", str(base), str(again), "-o", str(tmp_path / "again"), "-q"]) == 0
    for key, tensor in stored(tmp_path / "merged").items():
        assert torch.equal(tensor, stored(tmp_path / "again")[key]), key


@pytest.mark.parametrize("left_out", ["layers.1.mlp.experts.3.up_proj", "layers.1.self_attn.q_proj"])
def test_what_would_be_left_out_stops_it(left_out: str, tmp_path: Path) -> None:
    base, adapter = saved("qwen3_moe", tmp_path)
    index = json.loads((base / "model.safetensors.index.json").read_text())
    lost = next(name for name in index["weight_map"] if left_out in name)
    shard = base / index["weight_map"].pop(lost)
    tensors = load_file(shard)
    tensors.pop(lost)
    save_file(tensors, shard, metadata={"format": "pt"})
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputRefused, match=r"A611: .*layers.1.(mlp.experts.gate_up_proj|self_attn.q_proj)"):
        merge(adapter, tmp_path / "merged")
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", base.name}


def test_originals_and_places_that_cannot_be_are_refused(tmp_path: Path) -> None:
    base, adapter = saved("qwen3_moe", tmp_path)
    assert code(lambda: merge(adapter, base)) == "A609"
    with pytest.raises(InputRefused, match=r"A603: `.*` is an adapter\nhelp: name its model first"):
        require_original(adapter)
    config = json.loads((base / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "fp8"}}
    (base / "config.json").write_text(json.dumps(quantised))
    assert code(lambda: merge(adapter, tmp_path / "merged")) == "A610"
    (base / "config.json").write_text(json.dumps(config | {"hidden_size": config["hidden_size"] * 2}))
    assert code(lambda: merge(adapter, tmp_path / "merged")) == "A603"
    assert not (tmp_path / "merged").exists()

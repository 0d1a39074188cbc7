"""Adapters in every layout: what is written means what was read, stock peft computes the same, and traps are caught."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_twins import adapted, checkpoint, logits, stock
from peft import PeftModel
from places import ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor

from ktc.adapters.export import export, open_adapter
from ktc.adapters.export_check import check
from ktc.adapters.save import require_new
from ktc.cli.app import main
from ktc.diagnostics import InputRefused
from ktc.foundation import versions

pytestmark = pytest.mark.usefixtures("one_thread")
SINCE_0_19 = versions.release(versions.installed("peft") or "0") >= (0, 19)
SAVED = "peft-fused" if SINCE_0_19 else "peft-fused-018"  # the layout in which the installed peft saves
READ = ("per-expert", "peft-fused") if SINCE_0_19 else ("peft-fused-018",)  # those that it reads
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of an adapter of a family's twin, made once; the twin's checkpoint lies beside it."""
    made: dict[str, Path] = {}

    def adapter(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            model = adapted(stock(checkpoint(family, folder)))
            made[family] = folder / "adapter"
            model.save_pretrained(str(made[family]))
            torch.save(logits(model), folder / "logits.pt")
        return made[family]

    return adapter


def deltas(path: Path, model: Path | None = None) -> Mapping[str, Tensor]:
    """What the adapter adds to each weight."""
    factors = open_adapter(path, model).factors
    return {
        f.target.name: torch.stack([f.delta(e) for e in range(f.target.experts)]) if f.target.experts else f.delta()
        for f in factors
    }


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-8) for name in wanted
    )


def code(call: Callable[[], Any]) -> str:
    with pytest.raises(InputRefused) as refusal:
        call()
    return refusal.value.diagnostics[0].code


def change(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def old_release(a: Tensor, b: Tensor, experts: int) -> Tensor:
    """What peft before 0.19 adds to (E, first, second): A of the first dimension, B of the second."""
    a = a.reshape(experts, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, experts)
    return torch.einsum("ore,eri->eio", b, a) * 3  # alpha 12, rank 4


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "mixtral"])
@pytest.mark.parametrize("layout", ["per-expert", "peft-fused", "peft-fused-018", "gguf"])
def test_every_layout_keeps_what_is_added(saved: Saved, tmp_path: Path, family: str, layout: Any) -> None:
    source = saved(family)
    done = export(source, layout, tmp_path / ("adapter.gguf" if layout == "gguf" else "adapter"))
    require_new(done.path, force=True)
    assert done.found == SAVED and done.tensors > 0
    model = source.parent / f"{family}-float32"
    assert same(deltas(done.path, model), deltas(source))
    back = export(done.path, "peft-fused", tmp_path / "back", model)
    assert back.found == layout
    assert same(deltas(back.path), deltas(source))


@pytest.mark.skipif(not SINCE_0_19, reason="peft stacks experts that come one by one since 0.19")
def test_experts_one_by_one_are_read_by_stock_peft(saved: Saved, tmp_path: Path) -> None:
    source = saved("deepseek_v2")
    done = export(source, "per-expert", tmp_path / "adapter")
    names = load_file(done.path / "adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.1.mlp.experts.7.gate_proj.lora_A.weight" in names
    model = PeftModel.from_pretrained(stock(source.parent / "deepseek_v2-float32"), str(done.path))
    wanted = torch.load(source.parent / "logits.pt", weights_only=True)
    assert (logits(model) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    config = json.loads((done.path / "adapter_config.json").read_text())
    assert {"o_proj", "gate_proj", "up_proj", "down_proj"} <= set(config["target_modules"])
    assert "model.layers.0.mlp.down_proj.weight" in config["target_parameters"]
    assert any("shared_experts" in name for name in config["target_parameters"])


@pytest.mark.skipif(not SINCE_0_19, reason="peft stacks experts that come one by one since 0.19")
def test_experts_one_by_one_have_names_that_stock_peft_takes(saved: Saved, tmp_path: Path) -> None:
    """It knows the names of single experts in some families; in others their stacks are named, and files are alike."""
    source = saved("phimoe")
    done = export(source, "per-expert", tmp_path / "adapter")
    names = load_file(done.path / "adapter_model.safetensors").keys()
    assert any(name.endswith("experts.0.w1.lora_A.weight") for name in names)
    model = PeftModel.from_pretrained(stock(source.parent / "phimoe-float32"), str(done.path))
    wanted = torch.load(source.parent / "logits.pt", weights_only=True)
    assert (logits(model) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert same(deltas(done.path), deltas(source))


def test_what_older_releases_saved_is_written_one_by_one(saved: Saved, tmp_path: Path) -> None:
    source = saved("qwen3_moe")
    old = export(source, "peft-fused-018", tmp_path / "old").path
    done = export(old, "per-expert", tmp_path / "one-by-one")
    assert done.found == "peft-fused-018"
    assert same(deltas(done.path), deltas(source))


def test_the_layout_of_older_releases_is_theirs(saved: Saved, tmp_path: Path) -> None:
    source = saved("qwen3_moe")
    done = export(source, "peft-fused-018", tmp_path / "adapter")
    tensors, wanted = load_file(done.path / "adapter_model.safetensors"), deltas(source)
    name = "model.layers.0.mlp.experts"
    experts = wanted[f"{name}.down_proj"].shape[0]
    for inner, leaf in ((".base_layer", "gate_up_proj"), ("", "down_proj")):
        a, b = (tensors[f"base_model.model.{name}{inner}.lora_{side}.weight"] for side in "AB")
        assert torch.allclose(old_release(a, b, experts), wanted[f"{name}.{leaf}"], atol=1e-7)
    assert open_adapter(done.path).layout == "peft-fused-018"


def test_experts_that_lie_transposed_and_interleaved_go_to_gguf_and_back(saved: Saved, tmp_path: Path) -> None:
    source = saved("gpt_oss")
    model = source.parent / "gpt_oss-float32"
    done = export(source, "gguf", tmp_path / "adapter.gguf")
    assert same(deltas(done.path, model), deltas(source))
    import gguf

    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(done.path).tensors}
    a, b = (torch.tensor(tensors[f"blk.0.ffn_up_exps.weight.lora_{side}"]) for side in "ab")
    added = deltas(source)["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.allclose(3 * b @ a, added[:, 1::2], atol=1e-6)
    assert code(lambda: export(source, "per-expert", tmp_path / "one-by-one")) == "A606"


def test_rows_of_q_are_ordered_as_the_converter_of_llama_does(saved: Saved, tmp_path: Path) -> None:
    import gguf

    source = saved("mixtral")
    done = export(source, "gguf", tmp_path / "adapter.gguf")
    file = gguf.GGUFReader(done.path)
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in file.tensors}
    added = tensors["blk.0.attn_q.weight.lora_b"] @ tensors["blk.0.attn_q.weight.lora_a"] * 3
    heads = open_adapter(source).base.config.num_attention_heads
    wanted = deltas(source)["model.layers.0.self_attn.q_proj.weight"]
    rows = wanted.reshape(heads, 2, wanted.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(wanted.shape)
    assert torch.allclose(added, rows, atol=1e-6)
    told = {name: file.fields[name].contents() for name in ("general.type", "adapter.type", "adapter.lora.alpha")}
    assert told == {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 12.0}


def test_gate_and_up_of_their_own_get_twice_the_rank(saved: Saved, tmp_path: Path) -> None:
    source = export(saved("qwen3_moe"), "per-expert", tmp_path / "one").path
    weights = source / "adapter_model.safetensors"
    tensors = load_file(weights)
    for name in [name for name in tensors if ".up_proj.lora_A" in name]:
        tensors[name] = tensors[name] + 0.01
    save_file(tensors, weights)
    done = export(source, "peft-fused", tmp_path / "fused")
    assert same(deltas(done.path), deltas(source))
    ranks = json.loads((done.path / "adapter_config.json").read_text())["rank_pattern"]
    assert ranks["model.layers.0.mlp.experts.gate_up_proj"] == 8


def test_ranks_and_scalings_of_their_own_are_kept(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"gate_up_proj": 2, "q_proj": 3}, "alpha_pattern": {"o_proj": 5}, "use_rslora": True}
    model = adapted(stock(checkpoint("qwen3_moe", tmp_path)), **patterns)
    model.save_pretrained(str(tmp_path / "adapter"))
    for layout in READ:
        done = export(tmp_path / "adapter", layout, tmp_path / layout)
        assert same(deltas(done.path), deltas(tmp_path / "adapter"))
        reread = PeftModel.from_pretrained(stock(tmp_path / "qwen3_moe-float32"), str(done.path))
        assert (logits(reread) - logits(model)).abs().max() <= 1e-4
    assert "rank 4" in " ".join(export(tmp_path / "adapter", "per-expert", tmp_path / "again").notes)


def test_layers_without_an_adapter_get_zeros_one_by_one(tmp_path: Path) -> None:
    stacks = ["layers.0.mlp.experts.down_proj", "layers.0.mlp.experts.gate_up_proj"]
    model = adapted(stock(checkpoint("qwen3_moe", tmp_path)), target_parameters=stacks)
    model.save_pretrained(str(tmp_path / "adapter"))
    done = export(tmp_path / "adapter", "per-expert", tmp_path / "one")
    assert any("zeros" in note for note in done.notes)
    if "per-expert" not in READ:
        return
    reread = PeftModel.from_pretrained(stock(tmp_path / "qwen3_moe-float32"), str(done.path))
    assert (logits(reread) - logits(model)).abs().max() <= 1e-4


def test_a_layout_that_nothing_tells_is_refused(tmp_path: Path) -> None:
    from ktc.model import twin

    config = twin.shrink(twin.default_config("qwen3_moe"))
    config.moe_intermediate_size = config.hidden_size // 2
    twin.build(config, seed=3).save_pretrained(tmp_path / "base")
    stacks = ["experts.gate_up_proj"]
    adapted(stock(tmp_path / "base"), target_parameters=stacks).save_pretrained(str(tmp_path / "adapter"))
    assert open_adapter(tmp_path / "adapter").layout == SAVED
    change(tmp_path / "adapter", peft_version="0.19.0")
    assert open_adapter(tmp_path / "adapter").layout == "peft-fused"
    change(tmp_path / "adapter", peft_version="0.18.1")
    assert open_adapter(tmp_path / "adapter").layout == "peft-fused-018"
    change(tmp_path / "adapter", peft_version=None)
    assert code(lambda: open_adapter(tmp_path / "adapter")) == "A607"


def test_more_than_a_plain_lora_is_refused(saved: Saved, tmp_path: Path) -> None:
    copy = export(saved("qwen3_moe"), "peft-fused", tmp_path / "copy").path
    for variant in ({"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"init_lora_weights": "pissa"}):
        change(copy, **variant)
        assert code(lambda: export(copy, "per-expert", tmp_path / "out")) == "A604"
        change(copy, use_dora=False, modules_to_save=None, init_lora_weights=True)
    change(copy, r=5)
    assert code(lambda: export(copy, "per-expert", tmp_path / "out")) == "A602"
    assert not (tmp_path / "out").exists()


def test_what_gguf_cannot_hold_and_what_is_there_already_is_refused(tmp_path: Path) -> None:
    base = checkpoint("deepseek_v2", tmp_path)
    model = adapted(stock(base), target_modules=["kv_b_proj"], target_parameters=None)
    model.save_pretrained(str(tmp_path / "adapter"))
    assert code(lambda: export(tmp_path / "adapter", "gguf")) == "A606"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", base.name]
    assert code(lambda: export(tmp_path / "adapter", "peft-fused", base)) == "A609"


@pytest.mark.slow
@pytest.mark.skipif(not SINCE_0_19, reason="before 0.19 peft takes such names for what they are, and loses nothing")
def test_an_export_that_loses_layers_is_caught(tmp_path: Path) -> None:
    """Shared experts among target_modules: peft 0.19 and newer takes them for the routed ones, without an error."""
    base, source = checkpoint("deepseek_v2", tmp_path), tmp_path / "adapter"
    shared = ["shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"]
    adapted(stock(base), target_parameters=shared).save_pretrained(str(source))
    done = export(source, "per-expert", tmp_path / "exported")
    config = json.loads((done.path / "adapter_config.json").read_text())
    modules = [name.removesuffix(".weight") for name in config["target_parameters"]]
    change(done.path, target_parameters=None, target_modules=[*config["target_modules"], *modules])
    found = check(source, done)
    assert not found.passed
    assert found.found == "stock peft loads it without an error and leaves a part of it out"


@pytest.mark.slow
def test_the_command_exports_and_checks(saved: Saved, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = saved("deepseek_v2")
    assert main(["export", str(source), "--check", "-o", str(tmp_path / "one"), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["layout"] == "per-expert" and result["found"] == "peft-fused"
    assert result["check"]["passed"] and result["check"]["relative"] < 1e-4
    assert main(["export", str(source), "--layout", "gguf", "--check", "-o", str(tmp_path / "a.gguf")]) == 0
    assert "the same read back" in capfd.readouterr().out
    old = ["export", str(source), "--layout", "peft-fused-018", "-o", str(tmp_path / "old"), "--check"]
    assert main(old) == 3
    assert "A608" in capfd.readouterr().err


@pytest.mark.full
def test_old_and_new_peft_read_each_other_s_adapters(saved: Saved, tmp_path: Path) -> None:
    """With `make versions`' environment of the oldest releases."""
    folder = Path(os.environ.get("KTC_OLDEST", ROOT / "build" / "versions" / "oldest"))
    if not (folder / "bin" / "python").exists():
        pytest.skip("`make versions` has made no environment of the oldest releases")
    source = saved("qwen3_moe")
    done = export(source, "peft-fused-018", tmp_path / "old")
    found = check(source, done, python=str(folder / "bin" / "python"))
    assert found.peft.startswith("0.18.")
    assert found.passed, found.found
    wrong = export(source, "peft-fused", tmp_path / "new")
    assert not check(source, wrong, python=str(folder / "bin" / "python")).passed

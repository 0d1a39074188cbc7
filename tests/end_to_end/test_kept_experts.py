"""Models whose decoding steps read experts that a GPU keeps: answers, exchanges between steps, files of counts.

Without a GPU, Triton's interpreter runs the kernels on the CPU, and steps are computed again instead of replayed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recorded_steps import eager_graphs
from torch import Tensor

import ktc
from ktc.diagnostics import InputRefused
from ktc.inference.serving.metrics import Metrics
from ktc.model.experts.backends.backend import Kept, Offload
from ktc.model.experts.kept import kept_experts
from ktc.model.experts.module import FusedMoe
from ktc.model.loading.kept import add_counts, begin_with, keep_experts, kept_layers, kept_stores

ON_GPU = torch.cuda.is_available()
PROGRAM = """
import "std/moe.ktr"
rule experts { match moe.block => cpu_moe() }
"""
PLACES = """
rule many { match moe.opaque as m => place(cpu, prefill = cuda:0) on m.experts }
rule all  { match module at "model", "lm_head" => place(cuda:0) }
plan { mode = infer  cuda_graph = decode }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled model."""
    made = tmp_path_factory.mktemp("kept")
    rules = made / "rules.ktr"
    rules.write_text(PROGRAM + PLACES * ON_GPU)
    return ktc.compile("tiny:deepseek_v2", rules, made / "out")


def loaded(folder: Path, places: int, *, fixed: bool = False) -> Any:
    """Return the model, with room for that many experts of each layer."""
    model: Any = ktc.load(folder)
    device = torch.device("cuda:0" if ON_GPU else "cpu")
    for module in model.modules():
        if isinstance(module, FusedMoe):
            module.kept, kept = None, Kept(places, 0.5, fixed)
            given = module.offload or Offload((device,), 1024)
            module.offload = replace(given, kept=kept)
    keep_experts(model)
    if not ON_GPU:
        model.decode_graphs = eager_graphs()
    return model


def generated(model: Any, new: int = 5, **options: Any) -> Tensor:
    ids = torch.randint(3, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(4))
    ids = ids.to(model.device)
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return torch.stack(answer.logits)


@pytest.mark.parametrize("places", [0, 2])
def test_steps_with_kept_experts_are_those_of_the_model(
    folder: Path, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lead_of", "least_of"):
        monkeypatch.setattr(kept_experts, name, lambda *_: 0.0)  # so small experts would all go over the bus
    model = loaded(folder, places)
    ours, eager = generated(model), generated(model, disable_compile=True)
    same = (ours.argmax(-1) == eager.argmax(-1)).all(-1).long().cumprod(0).bool()
    assert int(same.sum()) >= 4
    assert float((ours[same] - eager[same]).norm() / eager[same].norm()) <= 0.02
    (store,) = kept_stores(model)
    read = store.figures().experts
    assert read["bus"] and read["cpu"] and bool(read["gpu"]) == bool(places)


def test_fixed_tables_give_the_same_bits_and_counts_move_experts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(folder, 2, fixed=True)
    first, counts = generated(model), tmp_path / "counts.json"
    assert torch.equal(first, generated(model))
    begin_with(model, counts)
    add_counts(model, counts)
    written = json.loads(counts.read_text())
    assert set(written["layers"]) == set(kept_layers(model))
    again = loaded(folder, 2)
    (store,) = kept_stores(again)
    table = store.table.clone()
    begin_with(again, counts)
    assert not torch.equal(store.table != 0, table != 0)
    monkeypatch.setattr(kept_experts, "PERIOD", 2)
    assert torch.equal(generated(again).argmax(-1)[:4], first.argmax(-1)[:4])


@pytest.mark.parametrize(
    ("change", "told"),
    [({"schema": 9}, "schema 9"), ({"config_sha256": "0"}, "another config"), ({"layers": {}}, "lacks"),
     ({"layers": 3}, "`.layers`")],
)  # fmt: skip
def test_counts_of_another_model_are_refused(folder: Path, tmp_path: Path, change: dict[str, Any], told: str) -> None:
    model, counts = loaded(folder, 2), tmp_path / "counts.json"
    add_counts(model, counts)
    counts.write_text(json.dumps(json.loads(counts.read_text()) | change))
    with pytest.raises(InputRefused, match=told) as refused:
        begin_with(model, counts)
    assert refused.value.diagnostics[0].code == "L457"


def test_a_count_of_no_run_and_a_place_that_cannot_be_written_are_refused(folder: Path, tmp_path: Path) -> None:
    model, counts = loaded(folder, 2), tmp_path / "counts.json"
    add_counts(model, counts)
    layers: dict[str, list[int]] = json.loads(counts.read_text())["layers"]
    for of_layer in layers.values():
        of_layer[3] = 2**53 + 1
    counts.write_text(json.dumps(json.loads(counts.read_text()) | {"layers": layers}))
    with pytest.raises(InputRefused, match=r"L457.*above 2\*\*53 at .*\[3\]"):
        begin_with(model, counts)
    with pytest.raises(InputRefused, match="U003"):
        add_counts(model, counts / "no_folder.json")


def test_counts_are_found_with_adapters_on_experts(folder: Path, tmp_path: Path) -> None:
    model, counts = loaded(folder, 2), tmp_path / "counts.json"
    add_counts(model, counts)
    names = list(kept_layers(model))
    config = LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=["experts.gate_up_proj"])
    adapted: Any = get_peft_model(model, config)
    assert list(kept_layers(adapted.get_base_model())) == names
    begin_with(adapted, counts)


def test_a_device_without_places_is_told(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(folder, 0)
    begin_with(model, tmp_path / "counts.json")
    assert "L458" in caplog.text and "places no experts" in caplog.text
    add_counts(model, tmp_path / "counts.json")


@pytest.mark.skipif(ON_GPU, reason="there a GPU keeps experts")
def test_counts_of_a_model_that_keeps_no_experts_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused) as refused:
        begin_with(ktc.load(folder), tmp_path / "counts.json")
    assert refused.value.diagnostics[0].code == "L458"


def test_a_server_has_experts_and_bytes_by_engine(folder: Path) -> None:
    metrics, model = Metrics(), loaded(folder, 2)
    metrics.watch_experts(model)
    generated(model, 2)
    (store,) = kept_stores(model)
    read, text = store.figures(), metrics.text().decode()
    for engine, number in read.experts.items():
        assert f'ktc_experts_read{{engine="{engine}"}} {float(number)}' in text
    assert f'ktc_expert_bytes_read{{engine="gpu"}} {float(read.nbytes["gpu"])}' in text

"""`ktc prove`: a clean compiled model is green, and each kind of damage to its weights is red where it was done."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ktc
from ktc.cli import app as cli
from ktc.diagnostics import InputRefused
from ktc.foundation.host import find_compiler
from ktc.inference.prove.layers import chosen_layers
from ktc.inference.prove.report import FILE, LayerReport, Report, read_report, write_report
from ktc.inference.prove.run import Request, prove_model
from ktc.model.checkpoint import read_sources, write_sources
from ktc.model.experts.module import FusedMoe
from ktc.model.packed_store import packed_file, packed_store
from ktc.stages.link import link

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]
EXPERTS = "model.layers.1.mlp.experts"
Damage = Callable[[FusedMoe], None]


@pytest.fixture(scope="module")
def clean(checkpoint: Path, hand_made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a compiled model with a packed store; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("clean")
    out = link(hand_made.package(checkpoint, hand_made.scalar_kernel()), folder / "clean_twin")
    ktc.pack(out)
    return out


@pytest.fixture
def out(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "copied_twin"))


@pytest.fixture(scope="module")
def report(clean: Path) -> Report:
    return prove_model(Request(clean, count=96, carry=True))


def red_rows(report: Report) -> list[tuple[int, str]]:
    return [(layer.index, row.what) for layer in report.layers for row in layer.rows if row.red]


def repack(folder: Path, damage: Damage, fqn: str = EXPERTS) -> None:
    """Put other bytes into a layer's file of the store. Only `ktc verify` reads digests of contents."""
    experts = ktc.load(folder).get_submodule(fqn)
    damage(experts)
    path = folder / "packed" / packed_store.file_name(fqn)
    with path.open("r+b") as file:
        file.seek(packed_file.DATA)
        file.write(experts.weights.packed_storage)


def change_rows(folder: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    """Write another `weights.json` and seal it, as a wrong compiler would. The store is then not of these rows."""
    path, manifest = folder / "weights.json", folder / "ktc.json"
    path.write_text(write_sources(change(list(read_sources(path.read_bytes())))))
    content = json.loads(manifest.read_text())
    content["files"]["weights.json"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(content))
    shutil.rmtree(folder / "packed")


def exchanged(rows: list[Any], one: str, other: str) -> list[Any]:
    """Rows in which two tensors of the checkpoint go to each other's places."""
    from dataclasses import replace

    names = {one: other, other: one}
    found = {row.source_key: row for row in rows}
    assert {one, other} <= found.keys()
    return [
        row if row.source_key not in names else replace(row, source_key=names[row.source_key],
                                                        file=found[names[row.source_key]].file)
        for row in rows
    ]  # fmt: skip


# A clean model


def test_a_clean_model_is_green_with_an_error_of_stocks_own_size(report: Report) -> None:
    assert not report.red
    assert [layer.index for layer in report.layers] == [0, 1, 2]
    for layer in report.layers:
        assert [row.kind for row in layer.rows][:3] == ["layer", "block", "block"]
        for row in layer.rows:
            assert row.ktc is not None
            assert row.ratio is not None
            assert 1e-3 < row.ktc < 2e-2
            assert row.ratio < 1.5
    assert report.stock_read == "transformers"


def test_experts_and_their_router_have_rows_where_they_are(report: Report) -> None:
    dense, sparse = report.layers[0], report.layers[1]
    assert [row.what for row in dense.rows] == ["", "self_attn", "mlp"]
    assert [row.what for row in sparse.rows] == ["", "self_attn", "mlp", "mlp.experts"]
    block = sparse.rows[2]
    assert block.agreement == block.stock_agreement is not None
    assert block.agreement > 0.9
    assert dense.rows[2].agreement is None
    assert len(block.worst) == 3


def test_whole_passes_and_the_head_are_compared_at_the_end(report: Report) -> None:
    assert report.final is not None
    assert report.final.row.kind == "logits"
    assert report.final.whole is not None
    assert report.final.whole.next_token > 0.8
    assert all(layer.carried is not None for layer in report.layers)


def test_stock_errors_are_those_of_the_stock_model_itself(clean: Path, checkpoint: Path) -> None:
    """Compare stock's own error with that of transformers alone on whole models."""
    from transformers import AutoModelForCausalLM

    found = prove_model(Request(clean, count=40, seed=3, carry=True))
    ids = torch.randint(512, (1, 40), generator=torch.Generator().manual_seed(3))
    logits = [
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, experts_implementation="eager")(ids).logits[0]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    wanted, own = (each.detach().double() for each in logits)
    error = ((own - wanted).norm(dim=1) / wanted.norm(dim=1)).square().mean().sqrt()
    assert found.final is not None
    assert found.final.whole is not None
    assert found.final.whole.errors.stock == pytest.approx(float(error), rel=1e-4)


def test_chosen_layers_are_compared_on_the_same_hidden_states(clean: Path, report: Report) -> None:
    some = prove_model(Request(clean, count=96, layers="1-2"))
    assert [layer.rows for layer in some.layers] == [layer.rows for layer in report.layers[1:]]
    assert some.final is None
    assert all(layer.carried is None for layer in some.layers)


def test_a_text_gives_the_tokens_and_their_pieces(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("the capital of France is Paris")
    found = prove_model(Request(clean, text=tmp_path / "some.txt", layers="0"))
    worst = found.layers[0].rows[0].worst[0]
    assert found.num_tokens < 20
    assert worst.piece
    assert worst.piece in "the capital of France is Paris"


# Damage


def swap_two_experts(experts: FusedMoe) -> None:
    for part in ("gate", "up", "down"):
        one, other = experts.expert(3, part), experts.expert(5, part)
        experts.load_expert(3, part, other)
        experts.load_expert(5, part, one)


def swap_gate_and_up(experts: FusedMoe) -> None:
    gate, up = experts.expert(7, "gate"), experts.expert(7, "up")
    experts.load_expert(7, "gate", up)
    experts.load_expert(7, "up", gate)


def permute_rows(experts: FusedMoe) -> None:
    """Inner neurons in another order in gate and up and not in down."""
    for part in ("gate", "up"):
        experts.load_expert(2, part, experts.expert(2, part).roll(1, 0))


def permute_outputs(experts: FusedMoe) -> None:
    experts.load_expert(2, "down", experts.expert(2, "down").roll(16, 0))


def scale_one(experts: FusedMoe) -> None:
    experts.load_expert(4, "down", experts.expert(4, "down") * 1.02)


def repeat_an_expert(experts: FusedMoe) -> None:
    for part in ("gate", "up", "down"):
        experts.load_expert(6, part, experts.expert(0, part))


def lose_a_row(experts: FusedMoe) -> None:
    gate = experts.expert(1, "gate")
    gate[10] = 0
    experts.load_expert(1, "gate", gate)


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (swap_two_experts, {3, 5}),
        (swap_gate_and_up, {7}),
        (permute_rows, {2}),
        (permute_outputs, {2}),
        (scale_one, {4}),
        (repeat_an_expert, {6}),
        (lose_a_row, {1}),
    ],
)
def test_wrong_packed_experts_are_red_by_number(out: Path, damage: Damage, wrong: set[int]) -> None:
    repack(out, damage)
    found = prove_model(Request(out, count=96, layers="1-2"))
    assert found.red
    (experts,) = (row for row in found.layers[0].rows if row.kind == "experts")
    assert {worst.index for worst in experts.worst} == wrong
    assert {layer for layer, _ in red_rows(found)} == {1}, "the layer after the damaged one is clean"


def test_an_expert_that_no_token_chooses_is_compared_too(out: Path) -> None:
    repack(out, scale_one)
    assert red_rows(prove_model(Request(out, count=1, layers="1"))) == [(1, "mlp.experts")]


def test_values_that_are_not_finite_are_red(out: Path) -> None:
    def damage(experts: FusedMoe) -> None:
        experts.load_expert(0, "down", torch.full_like(experts.expert(0, "down"), torch.nan))

    repack(out, damage)
    found = prove_model(Request(out, layers="1"))
    (experts,) = (row for row in found.layers[0].rows if row.kind == "experts")
    assert experts.ktc is None
    assert "not finite" in experts.red
    assert json.dumps(found.to_json(), allow_nan=False)


LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ("mlp.experts.3.gate_proj.weight", "mlp.experts.5.gate_proj.weight", "mlp.experts"),
        ("mlp.experts.3.gate_proj.weight", "mlp.experts.3.up_proj.weight", "mlp.experts"),
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight", "mlp"),
        ("input_layernorm.weight", "post_attention_layernorm.weight", ""),
    ],
)
def test_wrong_rows_of_weights_json_are_red_where_they_lead(out: Path, one: str, other: str, where: str) -> None:
    change_rows(out, lambda rows: exchanged(rows, f"{LAYER}.{one}", f"{LAYER}.{other}"))
    assert (1, where) in red_rows(prove_model(Request(out, count=64, layers="1")))


def test_a_row_of_another_layer_is_red(out: Path) -> None:
    names = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (1, 2))
    change_rows(out, lambda rows: exchanged(rows, *names))
    found = red_rows(prove_model(Request(out, count=64)))
    assert {(1, "self_attn"), (2, "self_attn")} <= set(found)
    assert not [place for place in found if place[0] == 0]


def test_a_wrong_embedding_norm_or_head_is_red_at_the_end(out: Path) -> None:
    change_rows(out, lambda rows: exchanged(rows, "model.norm.weight", "model.layers.1.input_layernorm.weight"))
    found = prove_model(Request(out, count=64))
    assert found.final is not None
    assert found.final.row.red


# The record and the command


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["prove", *map(str, arguments)])
    return code, *capfd.readouterr()


def test_the_command_records_what_it_shows(out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capfd, out, "--tokens", 64, "-o", tmp_path / "report.json", "--json")
    assert code == 0
    recorded = read_report(out)
    assert recorded is not None
    assert json.loads(shown)["fidelity"] == json.loads((out / FILE).read_text())
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads((out / FILE).read_text())
    assert recorded.tokens == "random tokens, seed 0"


def test_the_command_fails_and_names_the_experts(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    repack(out, swap_two_experts)
    code, shown, _ = run(capfd, out, "--layers", 1)
    assert code == 1
    assert "RED  layer 1, mlp.experts: error" in shown
    assert "experts 3, 5 of 16" in " ".join(shown.split())
    recorded = read_report(out)
    assert recorded is not None
    assert recorded.red


def test_a_record_is_only_of_its_own_compilation(clean: Path, out: Path, report: Report) -> None:
    write_report(out, report)
    assert read_report(out) == report
    (out / "ktc.json").write_text((out / "ktc.json").read_text() + "\n")
    assert read_report(out) is None
    (out / FILE).write_text("{}")
    assert read_report(out) is None
    (out / FILE).write_text('{"schema": 1}')
    with pytest.raises(InputRefused) as refusal:
        read_report(out)
    assert refusal.value.diagnostics[0].code == "N606"


@pytest.mark.parametrize("text", ["", "3", "0,x", "2-1", "0-3", "-1"])
def test_unknown_layers_are_refused(text: str) -> None:
    with pytest.raises(InputRefused) as refusal:
        chosen_layers(text, 3)
    assert [found.code for found in refusal.value.diagnostics] == ["N601"]


def test_layers_are_numbers_and_ranges() -> None:
    assert chosen_layers("2, 0-1,1", 5) == (0, 1, 2)
    assert chosen_layers(None, 3) == (0, 1, 2)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_an_unusable_text_is_refused(clean: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(InputRefused) as refusal:
        prove_model(Request(clean, text=tmp_path / "text"))
    assert refusal.value.diagnostics[0].code == "N603"


def test_memory_is_released_layer_by_layer(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one side's layer has values, no other layer of either side has."""
    from ktc.inference.prove import layer as layers

    held: list[LayerReport | int] = []
    compare = layers.run_layer

    def watched(module: torch.nn.Module, *arguments: Any) -> Any:
        sides = [value for value in _sides if value is not None]
        held.extend(sum(1 for one in side if _has_values(one)) for side in sides)
        return compare(module, *arguments)

    _sides: list[Any] = []
    monkeypatch.setattr(layers, "run_layer", watched)
    whole = layers.compare_layer

    def noted(sides: Any, *arguments: Any) -> Any:
        _sides[:] = [sides.layers_of(sides.stock.model), sides.layers_of(sides.compiled.model)]
        return whole(sides, *arguments)

    monkeypatch.setattr("ktc.inference.prove.run.compare_layer", noted)
    prove_model(Request(clean, count=8))
    pairs = list(zip(held[::2], held[1::2], strict=True))
    assert set(pairs) == {(1, 0), (0, 1)}


def _has_values(layer: torch.nn.Module) -> bool:
    def own(module: torch.nn.Module) -> Iterator[torch.Tensor]:
        return iter(() if isinstance(module, FusedMoe) else module.parameters(recurse=False))

    return any(not tensor.is_meta for module in layer.modules() for tensor in own(module))

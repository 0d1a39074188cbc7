"""`ktc consistency`: each path is that of other code, matched calls are exact, and mismatches and bounds show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import ktc
from ktc.adapters.adapter import attach
from ktc.cli import app as cli
from ktc.diagnostics import InputRefused
from ktc.foundation.decode import decode
from ktc.foundation.host import find_compiler
from ktc.inference.consistency.picture import draw
from ktc.inference.consistency.report import Report
from ktc.inference.consistency.request import Model, Request, models
from ktc.inference.consistency.run import measure
from ktc.inference.consistency.scores import Scores, difference, score
from ktc.inference.consistency.serving_path import serving_scores
from ktc.inference.consistency.stock_path import stock_scores
from ktc.inference.consistency.training_path import trainer_scores
from ktc.stages.link import link

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def out(checkpoint: Path, hand_made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a compiled model with a kernel of bf16 experts."""
    package = hand_made.package(checkpoint, hand_made.scalar_kernel())
    return link(package, tmp_path_factory.mktemp("consistency") / "with_kernel")


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return torch.randint(512, (3, 20), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def report(out: Path, compiled: Path, adapter: Path) -> Report:
    """Return all pairs of the kernel and the experts' reference, tuned by one adapter."""
    two = models([f"kernel={out}", f"reference={compiled}"], [str(adapter)])
    seen: list[tuple[str, int, int]] = []
    found = measure(Request(two, two, sequences=3, length=20, prompt=6), lambda *each: seen.append(each))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert {total for *_, total in seen} == {seen[-1][1]}, "the calls that were announced"
    return found


def tuned(out: Path, adapter: Path, trainable: bool = False) -> PeftModel:
    return attach(ktc.load(out), adapter, trainable=trainable, alone=True)


def assert_same(one: Scores, other: Scores) -> None:
    assert difference(one, other).exact


# Values


def test_the_mean_is_over_the_tokens_of_a_sequence_then_over_sequences() -> None:
    first = torch.zeros(2, 2, dtype=torch.long)
    one = Scores(torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), first)
    other = Scores(torch.tensor([[-1.0, -2.5], [-3.0, -4.0625]]), torch.tensor([[0, 1], [0, 0]]))
    found = difference(one, other)
    assert found.mean == pytest.approx((0.5 + 0.0625) / 4)
    assert found.p99 == pytest.approx(0.0625 + 0.97 * (0.5 - 0.0625))
    assert (found.largest, found.above, found.agreement, found.exact, found.tokens) == (0.5, 0.25, 0.75, False, 4)
    assert difference(one, one).exact


def test_values_that_are_not_finite_have_no_mean_and_count_as_large() -> None:
    first = torch.zeros(1, 2, dtype=torch.long)
    found = difference(Scores(torch.tensor([[0.0, torch.nan]]), first), Scores(torch.zeros(1, 2), first))
    assert (found.mean, found.p99, found.largest, found.above) == (None, None, None, 0.5)
    assert not found.exact


# Paths


@pytest.mark.parametrize("stack", ["on", "off"])
def test_the_trainers_path_is_the_model_in_training_under_autocast(
    out: Path, adapter: Path, rows: Tensor, stack: Any
) -> None:
    found = trainer_scores(tuned(out, adapter, trainable=True), rows, autocast=True, stack=stack)
    assert found.stacked == (stack == "on")
    model = tuned(out, adapter, trainable=True).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = torch.cat([model(input_ids=row[None], use_cache=False).logits for row in rows])
    assert logits.requires_grad
    assert_same(found.scores, score(logits[:, :-1], rows[:, 1:]))


def test_measuring_training_changes_no_value_and_turns_dropout_off_for_its_time(
    out: Path, adapter: Path, rows: Tensor
) -> None:
    model: Any = tuned(out, adapter, trainable=True)
    plain = trainer_scores(model, rows, autocast=True)
    model = tuned(out, adapter, trainable=True)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj")
    layer.lora_dropout["default"] = torch.nn.Dropout(0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert_same(trainer_scores(model, rows, autocast=True).scores, plain.scores)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert layer.lora_dropout["default"].p == 0.5


def test_decoding_is_that_of_one_call_after_the_other(out: Path, adapter: Path, rows: Tensor) -> None:
    model = tuned(out, adapter)
    rows = rows.clone()
    rows[1, 9] = model.generation_config.eos_token_id  # a text goes on behind the end of another
    found = serving_scores(model, rows, prompt=6, batch_size=2, autocast=False)
    with torch.no_grad():
        for row, decoded in zip(rows, found.decode.logs, strict=True):
            made = model(input_ids=row[None, :6], use_cache=True)
            logits, cache = [made.logits[:, -1:]], made.past_key_values
            for token in row[6:-1]:
                logits.append(model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True).logits)
            wanted = score(torch.cat(logits, 1), row[None, 6:]).logs[0]
            assert torch.allclose(decoded, wanted, atol=0.05)


def test_stock_is_transformers_on_the_same_weights(out: Path, checkpoint: Path, rows: Tensor) -> None:
    found = stock_scores(out, rows)
    for scores, dtype in ((found.model_dtype, torch.bfloat16), (found.fp32, torch.float32)):
        stock: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, experts_implementation="eager")
        with torch.no_grad():
            assert_same(scores, score(stock(rows).logits[:, :-1], rows[:, 1:]))


# Reports


def test_calls_of_matched_cells_are_exact_and_others_are_not(report: Report) -> None:
    assert [(cell.trained, cell.served) for cell in report.cells] == [
        ("kernel", "kernel"), ("kernel", "reference"), ("reference", "kernel"), ("reference", "reference"),
    ]  # fmt: skip
    for cell in report.cells:
        assert cell.matched == (cell.trained == cell.served)
        assert cell.paths["calls"].exact == cell.matched
        assert cell.paths["decode"].tokens == 3 * 14
        assert cell.paths["decode"].mean is not None
    assert report.autocast
    assert all("stacked" in side.how for side in report.trained)


def test_an_adapter_serves_in_the_dtype_of_its_model_as_it_was_trained(out: Path, adapter: Path) -> None:
    def dtypes(model: PeftModel) -> set[torch.dtype]:
        return {parameter.dtype for name, parameter in model.named_parameters() if "lora_" in name}

    assert dtypes(tuned(out, adapter)) == {torch.bfloat16}
    assert dtypes(tuned(out, adapter, trainable=True)) == {torch.float32}
    assert dtypes(attach(ktc.load(out, reference=True), adapter, alone=True)) == {torch.float32}


def test_a_report_survives_json_and_its_picture_names_every_pair(report: Report) -> None:
    assert decode(json.loads(json.dumps(report.to_json())), Report) == report
    picture = draw(report)
    assert picture == draw(report)
    assert all(f"{cell.trained} → {cell.served}" in picture for cell in report.cells)


def test_bounds_apply_to_matched_cells(report: Report) -> None:
    assert report.faults(None, exact=True) == ()
    assert report.faults(10.0, exact=True) == ()
    assert len(report.faults(0.0, exact=False)) == sum(not cell.paths["decode"].exact for cell in report.matched)
    damaged = replace(report.cells[0], paths={**report.cells[0].paths, "calls": report.cells[1].paths["calls"]})
    assert report.faults(None, exact=False) == ()
    assert len(replace(report, cells=(damaged, *report.cells[1:])).faults(None, exact=True)) == 1


def test_the_command_shows_marks_writes_and_fails(
    out: Path, compiled: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--sequences", "2", "--tokens", "12", "--prompt", "4"]
    files = ["-o", str(tmp_path / "found.json"), "--plot", str(tmp_path / "found.svg")]
    code = cli.main(["consistency", f"a={out}", "--serve", f"b={compiled}", *sizes, "--max-mean", "0", *files])
    shown = capfd.readouterr().out
    assert code == 1
    assert "a -> b" in shown
    assert "RED" in shown
    assert "0 exactly" not in shown
    assert json.loads((tmp_path / "found.json").read_text())["cells"][0]["trained"] == "a"
    assert (tmp_path / "found.svg").read_text().lstrip().startswith("<?xml")


def test_stock_has_its_own_rounding_beside_it(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sequences", "1", "--tokens", "12", "--prompt", "4"]
    assert cli.main(["consistency", str(out), "--against", "stock", *sizes, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["consistency"]
    assert 0 < found["cells"][0]["paths"]["calls"]["mean"] < 0.2
    assert 0 < found["stock_rounding"]["with_kernel"]["mean"] < 0.2
    assert not found["autocast"]


# Refusals


def test_names_are_split_from_folders_that_do_not_exist_as_written(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    assert models([str(tmp_path / "a=b"), "c=d"], ["c=e"]) == (
        Model("a=b", tmp_path / "a=b"), Model("c", Path("d"), Path("e")),
    )  # fmt: skip
    assert models(["one", "two"], ["x"]) == (Model("one", Path("one"), Path("x")), Model("two", Path("two"), Path("x")))


def refusals(out: Path, checkpoint: Path, tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    text = tmp_path / "short.txt"
    text.write_text("a b")
    yield "V810", [str(out), str(out)]
    yield "V810", [f"a={out}", "--adapter", f"b={out}"]
    yield "V810", [f"a={out}", "--adapter", str(out), "--adapter", f"a={out}"]
    yield "V810", [str(out), "--tokens", "8", "--prompt", "8"]
    yield "V810", [str(out), "--against", "stock", "--adapter", str(out)]
    yield "V812", [str(out), "--text", str(text)]
    yield "A601", [str(out), "--adapter", str(tmp_path)]


def test_senseless_requests_are_refused_before_anything_is_loaded(
    out: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for code, words in refusals(out, checkpoint, tmp_path):
        assert cli.main(["consistency", *words]) == 2, words
        assert f"error[{code}]" in capfd.readouterr().err, words


def test_a_model_without_an_adapter_does_not_train(
    checkpoint: Path, hand_made: ModuleType, compiled: Path, tmp_path: Path
) -> None:
    package = replace(hand_made.package(checkpoint), lora=None)
    only_serves = Model("serves", link(package, tmp_path / "only_serves"))
    with pytest.raises(InputRefused) as refusal:
        measure(Request((only_serves,), (only_serves,)))
    assert refusal.value.diagnostics[0].code == "V813"
    found = measure(Request((Model("trains", compiled),), (only_serves,), sequences=1, length=8, prompt=2))
    assert found.cells[0].paths["calls"].exact


def test_models_of_different_vocabularies_are_refused(
    out: Path, checkpoint: Path, hand_made: ModuleType, tmp_path: Path
) -> None:
    config: Any = AutoConfig.from_pretrained(checkpoint)
    config.vocab_size = 300
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "smaller")
    smaller = link(hand_made.package(tmp_path / "smaller"), tmp_path / "smaller_out")
    with pytest.raises(InputRefused) as refusal:
        measure(Request((Model("one", out),), (Model("other", smaller),)))
    assert refusal.value.diagnostics[0].code == "V811"

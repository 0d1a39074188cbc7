"""The census promises: known families are matched and proven, a miss has words, and only an interrupt ends the run."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from datetime import date
from importlib.metadata import version

import pytest
from places import DOCS

from census import BlockProof, Census, Family, examine, markdown
from census.markdown import COLUMNS, TWIN_COLUMNS, table
from census.programs import PROGRAMS
from ktc.cli import app as cli
from ktc.model import twin
from ktc.stages.proof import Proof

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = DOCS / "reference" / "families.md"
WHOLE = "## Models that read images"
# What the families of every run compute: router, shared experts, attention.
KNOWN = {
    "deepseek_v2": ("softmax, top 4, scaled", "plain", "mla"),
    "deepseek_v3": ("sigmoid, + bias, grouped, top 4, renormalised, scaled", "plain", "mla"),
    "qwen2_moe": ("softmax, top 4", "gated", "mha"),
    "qwen3_moe": ("softmax, top 4", "none", "gqa"),
    "qwen3_next": ("softmax, top 4, renormalised", "gated", "recurrent (`Qwen3NextGatedDeltaNet`), gqa"),
    "glm4_moe": ("sigmoid, + bias, grouped, top 4, renormalised, scaled", "plain", "gqa"),
    "mixtral": ("softmax, top 2, renormalised", "none", "gqa"),
    "olmoe": ("softmax, top 4", "none", "mha"),
    "gpt_oss": ("softmax over the chosen, top 4", "none", "gqa (sliding, sinks), gqa (sinks)"),
    "minimax_m2": ("sigmoid, + bias, top 4, renormalised", "none", "gqa"),
    "ernie4_5_moe": ("softmax, + bias, top 4, renormalised", "plain", "gqa"),
    "jamba": ("softmax, top 2", "none", "recurrent (`JambaMambaMixer`), gqa"),
}
# Latent, windowed and grouped attention; routers with and without groups and biases; dense layers beside sparse ones.
QUICK = ("deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KNOWN]
)
def test_a_known_family_is_matched_proven_and_described(family: str) -> None:
    row = examine(family)
    assert row.matched and row.proven, row.reasons
    assert (row.experts, row.routing, row.attention) == ("matched",) * 3
    assert (row.router, row.shared_experts, ", ".join(row.attention_kinds)) == KNOWN[family]
    assert {proof.part for proof in row.proofs} == {"experts", "attention"}
    assert any(name.startswith("routing_weights of ") for name in row.gradients)
    assert row.equal and [proof.program for proof in row.twins] == ["moe-lora", "moe-experts-lora"], row.twins
    assert all(proof.tokens and not proof.notes and proof.gradients for proof in row.twins)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_dense_family_has_its_attention_matched_and_no_experts(family: str) -> None:
    row = examine(family)
    assert (row.experts, row.routing, row.attention, row.proven) == ("none", "none", "matched", True)
    assert not row.matched


def test_whatever_a_family_raises_is_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ZeroDivisionError("odd config\nsecond line")

    monkeypatch.setattr(twin, "default_config", fail)
    row = examine("qwen3_moe")
    assert (row.matched, row.proven, row.wrong) == (False, False, False)
    assert row.reasons == ("ZeroDivisionError: odd config",)


def test_a_twin_that_was_not_shrunk_is_refused_before_it_gets_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("census.run.LARGEST", 1000)
    row = examine("llama")
    assert not row.proven
    assert "parameters, most of them in" in row.reasons[0]


def test_a_rewrite_that_differs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = {"hidden_states": float("inf")}
    proof = Proof("mlp_0", "mlp_0", "Block", ("known",), ("mlp",), 0.5, gradients, ("one token",), (), 0)
    monkeypatch.setattr("census.run.prove_on", lambda *_: (proof,))
    row = examine("llama")
    assert (row.wrong, row.proven) == (True, False)
    assert row.reasons[0].startswith("WRONG: ")


def test_a_wrong_family_ends_with_one(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    proof = BlockProof("attention", "mlp_0", "Block", 0.5, {"hidden_states": float("inf")})
    _finish_with(monkeypatch, Family("qwen3"), Family("llama", proofs=(proof,)))
    assert cli.main(["census", "--family", "llama", "--family", "qwen3", "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert (report["counts"]["wrong"], report["complete"]) == (1, True)
    assert [row["family"] for row in report["families"]] == ["llama", "qwen3"]
    assert (report["families"][0]["worst_forward"], report["families"][0]["worst_gradient"]) == (0.5, "inf")


def test_an_interrupt_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    _finish_with(monkeypatch, Family("llama", experts="matched"), KeyboardInterrupt())
    assert cli.main(["census", "--family", "llama", "--family", "qwen3", "--json"]) == 130
    report = json.loads(capfd.readouterr().out)
    assert [row["family"] for row in report["families"]] == ["llama"]
    assert report["complete"] is False


def _finish_with(monkeypatch: pytest.MonkeyPatch, *rows: Family | BaseException) -> None:
    def examine_all(*_: object) -> Generator[Family]:
        for row in rows:
            if isinstance(row, BaseException):
                raise row
            yield row

    monkeypatch.setattr("census.command.examine_all", examine_all)


def test_a_name_that_is_no_model_type_is_refused_with_what_was_meant(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["census", "--family", "qwen3_mo"]) == 2
    assert "did you mean `qwen3_moe`?" in capfd.readouterr().err


def test_a_row_tells_what_is_recognised_from_what_is_its_own_code() -> None:
    proof = BlockProof("experts", "mlp_0", "Block", 1e-7, {"hidden_states": 2e-7}, holds=True)
    row = Family("x", "matched", "opaque: odd", "matched", "tanh, top 4", "silu", "none", ("gqa",), (proof,))
    _, _, line = table([row])
    assert line == "| x | rewritten | yes | no | 1e-07 | 2e-07 | own code: tanh, top 4 | silu | none | gqa |"


# the page ------------------------------------------------------------------------------------------------------------
def _rows() -> Iterator[list[str]]:
    """Yield the cells of the committed table of models of text, one family each."""
    yield from _cells(PAGE.read_text(encoding="utf-8").partition(WHOLE)[0])


def _whole_rows() -> Iterator[list[str]]:
    """Yield the cells of the committed table of models that read images, one family each."""
    yield from _cells(PAGE.read_text(encoding="utf-8").partition(WHOLE)[2].partition("## Whole twins")[0])


def _cells(page: str) -> Iterator[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_committed_page_names_exactly_the_families_of_this_transformers() -> None:
    assert [row[0] for row in _rows()] == list(twin.moe_families())
    assert [row[0] for row in _whole_rows()] == list(twin.whole_families())
    assert f"transformers {version('transformers')}" in PAGE.read_text(encoding="utf-8")


def test_the_committed_page_is_what_the_command_prints() -> None:
    page = PAGE.read_text(encoding="utf-8")
    day = re.search(r"on (\d{4}-\d\d-\d\d)\.\nVersions: (.*)\.$", page, re.MULTILINE)
    assert day is not None
    versions = dict(pair.split(" ") for pair in day[2].split(", "))
    empty = markdown(Census(versions, (), 0), date.fromisoformat(day[1]))
    about, _, _ = empty.partition("\n0 families")
    assert page.startswith(about)
    assert "\n".join(table([])) in page
    assert {len(row) for row in _rows()} == {len(COLUMNS)}
    assert not [row for row in _rows() if "WRONG" in (row[2], row[3])]


def test_nineteen_families_that_read_images_are_equal_with_an_image() -> None:
    seen = [row for row in _whole_rows() if row[4].startswith("equal")]
    assert len(seen) >= 19
    assert {len(row) for row in _whole_rows()} == {len(COLUMNS) + 1}


def test_the_committed_page_has_every_whole_twin_in_both_programs() -> None:
    twins = [*_cells(PAGE.read_text(encoding="utf-8").partition("## Whole twins")[2])]
    assert [row[0] for row in twins] == sorted(row[0] for row in (*_rows(), *_whole_rows()))
    assert {len(row) for row in twins} == {1 + len(PROGRAMS) * len(TWIN_COLUMNS)}
    assert not [row for row in twins if any("WRONG" in cell or cell == "other" for cell in row)]


@pytest.mark.full
def test_every_family_is_as_the_page_says() -> None:
    rows = tuple(examine(family) for family in twin.moe_families())
    census = Census({}, rows, len(rows))
    counts = census.counts()
    assert not census.wrong, [row.reasons for row in census.wrong]
    assert counts["proven"] >= 40
    assert counts["routing"] >= 33
    assert counts["equal"] >= 50
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in [*table(rows)][2:]]
    committed = list(_rows())
    errors = (COLUMNS.index("forward"), COLUMNS.index("gradient"))  # rounding differs from processor to processor
    assert [_without(row, errors) for row in found] == [_without(row, errors) for row in committed]


def _without(row: list[str], columns: tuple[int, ...]) -> list[str]:
    return [cell for index, cell in enumerate(row) if index not in columns]

"""`ktc list` shows what can be named, `ktc init` writes files that run, MODEL and RULES have either order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ktc.cli import app as cli
from ktc.cli.following import default_out
from ktc.cli.model_and_rules import model_and_rules, rules_and_model
from ktc.diagnostics import InputRefused
from ktc.foundation import resources
from ktc.language import dsl
from ktc.training.tune.settings import read_settings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def listed(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["list", "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_the_list_has_every_bundled_file(capfd: pytest.CaptureFixture[str]) -> None:
    rows = listed(capfd)
    assert [row["name"] for row in rows["programs"]] == dsl.bundled()
    assert {row["name"] for row in rows["machines"]} == {path.stem for path in resources.hosts().glob("*.toml")}
    assert all(row["is"] for section in ("programs", "models", "data", "machines") for row in rows[section])
    assert rows["compiled"] == rows["cached"] == []


def test_a_damaged_compiled_model_is_listed_as_one(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for place in (folder / "made", folder / "cache" / "compiled" / "made_0"):
        place.mkdir(parents=True)
        (place / "ktc.json").write_text("{")
    rows = listed(capfd)
    assert [(row["name"], "damaged" in row["is"]) for row in rows["compiled"]] == [("made", True)]
    assert len(rows["cached"]) == 1
    assert cli.main(["list"]) == 0
    assert "compiled, for" in capfd.readouterr().out


@pytest.mark.parametrize("program", ["auto", "moe-lora", "moe-qat"])
def test_what_init_writes_is_valid_and_formatted(program: str, folder: Path) -> None:
    assert cli.main(["init", "tiny:qwen3_moe", "--from", program]) == 0
    rules = folder / "qwen3_moe.ktr"
    assert dsl.load(rules, {}).requires
    assert cli.main(["fmt", "--check", str(rules)]) == 0
    ideas = re.findall(r"^#   (rule .*)$", rules.read_text(), re.MULTILINE)
    (folder / "ideas.ktr").write_text("\n".join(ideas))
    assert len(dsl.load(folder / "ideas.ktr", {}).rules) == len(ideas) > 1


def test_every_setting_that_init_writes_is_one(folder: Path) -> None:
    assert cli.main(["init", "tiny:qwen3_moe"]) == 0
    text = (folder / "train.yaml").read_text()
    assert read_settings(folder / "train.yaml", {}) == read_settings(None, {"data": ("capitals",)})
    (folder / "all.yaml").write_text(re.sub(r"^#(?=\w)", "", text, flags=re.MULTILINE))
    assert read_settings(folder / "all.yaml", {}) == read_settings(None, {"data": ("capitals",)})


def test_init_replaces_nothing_without_force(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "train.yaml").write_text("mine")
    assert cli.main(["init", "tiny:qwen3_moe"]) == 2
    assert "error[U009]" in capfd.readouterr().err
    assert (folder / "train.yaml").read_text() == "mine"
    assert not (folder / "qwen3_moe.ktr").exists()
    assert cli.main(["init", "tiny:qwen3_moe", "--force"]) == 0
    assert (folder / "train.yaml").read_text() != "mine"


def test_model_and_rules_have_either_order(folder: Path) -> None:
    (folder / "a.ktr").write_text("")
    (folder / "checkpoint").mkdir()
    for model in ("tiny:qwen3_moe", "checkpoint", "owner/name"):
        for rules in ("a.ktr", "moe-lora", "no/such.ktr", "kimi-k2-lora"):
            assert model_and_rules(model, rules) == model_and_rules(rules, model) == (model, rules)
            assert rules_and_model(rules, model) == rules_and_model(model, rules) == (rules, model)
        assert model_and_rules(model, "auto") == (model, "auto")
        assert rules_and_model(model, None) == ("auto", model)
    assert rules_and_model("moe-lora", None) == ("moe-lora", None)
    assert rules_and_model("norules", "checkpoint") == ("norules", "checkpoint")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("moe-lora", "auto"), "ktc compile MODEL moe-lora"),
        (("auto", "auto"), "ktc compile MODEL auto"),
        (("moe-lora", "mesing"), "did you swap them? `ktc compile mesing moe-lora`"),
        (("tiny:a", "tiny:b"), "`ktc list` shows them"),
    ],
)
def test_two_of_a_kind_are_refused(words: tuple[str, str], hint: str) -> None:
    with pytest.raises(InputRefused) as refused:
        model_and_rules(*words)
    assert refused.value.diagnostics[0].code == "U008"
    assert hint in refused.value.diagnostics[0].hint


def test_a_compiled_model_is_named_after_its_model() -> None:
    assert [default_out(name) for name in ("tiny:qwen3_moe", "Qwen/Qwen3-30B-A3B", "models/7b/")] == [
        "qwen3_moe_ktc", "qwen3_30b_a3b_ktc", "model_7b_ktc",
    ]  # fmt: skip

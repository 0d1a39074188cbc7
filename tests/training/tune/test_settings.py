"""The settings of a run: a YAML file and flags of the same names, refused with their lines, all together."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.training.tune.settings import TrainSettings, read_settings, types_of_settings


def file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def refusals(path: Path) -> list[Diagnostic]:
    with pytest.raises(InputRefused) as refused:
        read_settings(path, {})
    return list(refused.value.diagnostics)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    settings = TrainSettings(
        data=("a.jsonl", "b/*.csv:2"), rank=16, targets=("q_proj", "v_proj"), learning_rate=1e-5, packing=True
    )
    assert read_settings(file(tmp_path, settings.to_yaml()), {}) == settings
    assert read_settings(file(tmp_path, ""), {}) == TrainSettings()


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, "rank: 16\nlearning_rate: 1e-5\nstack: off\nepochs: 2\nscheduler: linear\n")
    found = read_settings(path, {"rank": 4, "alpha": None})
    assert (found.rank, found.alpha, found.learning_rate, found.stack, found.epochs) == (4, None, 1e-5, "off", 2.0)


def test_defaults_are_those_of_the_papers() -> None:
    found = TrainSettings()
    assert (found.accumulation, found.length, found.precision) == (16, 512, "bf16")


def test_every_setting_has_help_and_a_type() -> None:
    assert all(each.metadata["help"] for each in fields(TrainSettings))
    assert list(types_of_settings()) == [each.name for each in fields(TrainSettings)]


def test_all_that_is_wrong_with_a_file_is_told_with_its_lines(tmp_path: Path) -> None:
    found = refusals(file(tmp_path, "learnin_rate: 1\nrank: 0\nrank: 8\npacking: 3\nstack: maybe\neval_split: 1.5\n"))
    assert [(each.code, each.span.line) for each in found if each.span] == [
        ("T502", 1), ("T503", 2), ("T502", 3), ("T503", 4), ("T503", 5), ("T503", 6),
    ]  # fmt: skip
    assert found[0].hint == "did you mean `learning_rate`?"


@pytest.mark.parametrize("text", ["- a\n- b\n", "rank: [8\n", "a: b: c\n"], ids=["a list", "open", "colons"])
def test_what_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    assert refusals(file(tmp_path, text))[0].code == "T501"


def test_data_is_one_source_or_several(tmp_path: Path) -> None:
    for text, sources in (
        ("data: a.jsonl:2", ("a.jsonl:2",)),
        ("data: [a.jsonl:2, b]", ("a.jsonl:2", "b")),
        ("data:", ()),
    ):
        assert read_settings(file(tmp_path, text), {}).data == sources


def test_a_tag_runs_nothing(tmp_path: Path) -> None:
    found = refusals(file(tmp_path, "seed: !!python/object/apply:os.system ['true']\ndata: !!python/name:os.system\n"))
    assert {each.code for each in found} == {"T503"}


def test_settings_that_contradict_each_other_are_refused() -> None:
    for settings in (
        {"early_stopping": 2},
        {"eval_data": ("a.jsonl",), "eval_split": 0.1},
        {"stack": "on", "router_aux_loss": 0.1},
        {"method": "dpo", "packing": True},
        {"method": "dpo", "format": "alpaca"},
        {"method": "kto"},
        {"beta": 0.1},
        {"method": "dpo", "streaming": True},
        {"report_to": ("wandbb",)},
        {"epochs": 0.0},
        {"learning_rate": 0.0},
    ):
        with pytest.raises(InputRefused, match="T503"):
            TrainSettings(**settings)
    TrainSettings(epochs=0.0, max_steps=1)

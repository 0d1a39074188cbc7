"""The pages of `--help` and the messages for wrong command lines: whole names, defaults, groups, names of the field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from ktc.cli import app as cli


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {word}".strip(), below)


COMMANDS = dict(_commands("", typer.main.get_command(cli.app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_has_whole_names_and_defaults_in_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*name.split(), "--help"]) == 0
    page = capfd.readouterr().out
    assert [line for line in page.splitlines() if len(line) > 80] == []
    assert re.findall(r"…|<\w+>|\w\.\.\.$|list\[", page.replace("COMMAND [ARGS]...", "")) == []
    words = re.sub(r"\s+", " ", page)
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "argument":
            continue
        assert all(re.search(rf"{option}\b", page) for option in (*parameter.opts, *parameter.secondary_opts))
        default = parameter.default
        if isinstance(default, int | float | str) and not parameter.is_flag and default != "":
            assert re.search(rf"{parameter.opts[0]}\b.*?\[default: {re.escape(str(default))}", words), parameter.name
    assert page.rindex("Output and help:") > max((page.find(f"\n{title}:") for title in ("Options", "Data")), default=0)


def test_commands_are_in_groups(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    page = capfd.readouterr().out
    assert re.findall(r"^(\S.*):$", page, re.MULTILINE)[:2] == ["Use a model", "Compile"]
    assert "Commands:" not in page


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("train x --lr 1e-4", "in ktc it is `--learning-rate`"),
        ("train x --batch-size 2", "in ktc it is `--batch`"),
        ("train x --per_device_train_batch_size 2", "in ktc it is `--batch`"),
        ("train x --gradient_accumulation_steps 2", "in ktc it is `--accumulation`"),
        ("train x --num-train-epochs 2", "in ktc it is `--epochs`"),
        ("train x --max-length 2", "in ktc it is `--length`"),
        ("train x --learning_rate 2", "in ktc it is `--learning-rate`"),
        ("train x --lora-rank 2", "in ktc it is `--rank`"),
        ("train x --output-dir y", "in ktc it is `--output`"),
        ("train --model x", "the model is the argument MODEL|OUT: `ktc train MODEL|OUT ...`"),
        ("train x --ephocs 2", "did you mean `--epochs`?"),
        ("train x --xyzzy 2", "`ktc train --help` lists the options"),
        ("generate x --max-tokens 2", "in ktc it is `--max-new-tokens`"),
        ("generate x --temp 2", "in ktc it is `--temperature`"),
        ("serve x --max-num-seqs 2", "in ktc it is `--max-batch`"),
        ("compile x --output y", "in ktc it is `--out`"),
        ("finetune x", "in ktc it is `ktc train`"),
        ("trian x", "did you mean `train`?"),
        ("xyzzy", "`ktc --help` lists the commands"),
        ("compile", "usage: `ktc compile [OPTIONS] MODEL [RULES]`"),
        ("train x y", "usage: `ktc train [OPTIONS] MODEL|OUT`"),
    ],
)
def test_another_name_is_answered_with_ours(line: str, hint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    said = capfd.readouterr()
    assert said.err.splitlines()[-1] == f"help: {hint}"
    assert "error[U001]" in said.err
    assert said.out == ""


def test_every_name_of_the_field_leads_to_an_option() -> None:
    from ktc.cli.usage import FIELD_OPTIONS

    ours = {option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts}
    assert {name for names in FIELD_OPTIONS.values() for name in names if f"--{name}" not in ours} == set()

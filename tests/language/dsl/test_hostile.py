"""A rule program from a stranger: nothing of its text is run, by a compiler, a shell or a terminal."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from parsed_sources import trees

from ktc.diagnostics import InputRefused
from ktc.language import dsl
from ktc.language.dsl import schema
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.targets import TARGETS
from ktc.stages.codegen.render import render

SPEC = FusedMoeSpec("fused_moe", 64, 48, 16, 4, "bf16", "bf16", "bf16", "avx2")
HOSTILE = (
    '"; system("id"); //',
    "$(id)",
    "`id`",
    "a\\nb",
    "{{ 7 * 7 }}",
    "*/ int x; /*",
    "../../etc",
    "%s%n",
    "x; rm -rf .",
)
NAMES = (
    "a\n#include </etc/passwd>\n.ktr",
    "*/ int evil; .ktr",
    "line\\\n.ktr",
    "what??/.ktr",
    "$(id) `id` {{ 7 * 7 }}.ktr",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_rule_file_stays_inside_its_comment(name: str, tmp_path: Path) -> None:
    path = tmp_path / name.replace("/", "_")
    path.write_text("rule r { match experts => cpu_moe() }")
    span = dsl.load(path).rules[0].actions[0].span
    plain, hostile = (render([SPEC], {SPEC: origin}).units[0].text for origin in ("a.ktr:1:28", str(span)))
    assert [line for line in hostile.splitlines() if not line.startswith("//")] == [
        line for line in plain.splitlines() if not line.startswith("//")
    ]
    assert not any(line.endswith("\\") for line in hostile.splitlines())


def test_what_a_rewrite_is_told_is_a_number_or_a_word_of_the_schema() -> None:
    for name in TARGETS:
        for setting, spec in schema.SETTINGS[name].items():
            listed = spec.type.name in ("int", "float", "bool") or spec.type.name in schema.ENUMS
            assert listed, f"{name}.{setting} takes any text"


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("parameter", ["format", "threads", "device", "experts"])
def test_a_hostile_value_is_no_value(parameter: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ktr"
    path.write_text(
        "param format : format = stored\nparam threads : int = 1\nparam device : device = auto\n"
        "param experts : list[isa] = [avx2]\nrequire host.isa has avx2 or $experts == [amx]\n"
        "rule r { match experts => cpu_moe($format, threads = $threads) => place($device) }"
    )
    with pytest.raises(InputRefused) as refusal:
        dsl.load(path, {parameter: text})
    assert all(d.span is not None for d in refusal.value.diagnostics)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_stays_a_text(text: str, tmp_path: Path) -> None:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    path = tmp_path / "a.ktr"
    path.write_text(f'require model.type == "{quoted}" else "{quoted}"\nrule r {{ match experts => cpu_moe() }}')
    ruleset = dsl.load(path)
    assert ruleset.requires[0][1].message is not None
    assert ruleset.requires[0][1].message.value == text
    assert text not in str([action.target.settings for rule in ruleset.rules for action in rule.actions])
    path.write_text(f'rule r {{ match linear at "{quoted}" => place(cpu) }}')
    with pytest.raises(InputRefused):
        dsl.load(path)


def test_ktc_starts_no_shell_and_runs_no_text() -> None:
    forbidden = {"system", "popen", "eval", "exec", "getoutput", "getstatusoutput"}
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_method = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") not in (
                "os",
                "subprocess",
            )
            assert is_method or called not in forbidden, f"{file}:{node.lineno} calls `{called}`"
            assert not any(keyword.arg == "shell" for keyword in node.keywords), f"{file}:{node.lineno}"

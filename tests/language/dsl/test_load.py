"""From a path or a name to a RuleSet: settings, imports, what the later stages are given, and what is refused."""

from __future__ import annotations

import errno
import os
from io import BufferedReader
from pathlib import Path

import pytest
from work import calls

from ktc.diagnostics import Diagnostic, InputRefused, render
from ktc.foundation import resources
from ktc.foundation.regular_files import open_regular
from ktc.language import dsl
from ktc.language.dsl import loader, schema
from ktc.model.targets import Place

PROGRAM = """
import "std/moe.ktr"
param device : device = auto
param split  : int = 30 in 1..60
param names  : list[format] = [int8]
param word   : string = "a"
rule experts overrides low {
  match moe.block as m at "model.layers.*.mlp" except "**.0.**"
  where m.layer < $split and m.dtype in [bf16] and $word == "a" and $names == [int8]
  => cpu_moe(threads = $split)
  => place($device) on m.router.gate, m
}
rule low { match experts => keep(kernel) }
rule lower overrides experts { match linear at "lm_head" => lora_linear(rank = 2, alpha = 7) }
lora { rank = 16, targets = ["**.q_proj"] }
plan { cuda:0 = 22GiB, cpu = 1GiB, mode = train }
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.ktr"
    path.write_text(PROGRAM)
    return path


def refused(path: Path | str, settings: dict[str, str] | None = None) -> tuple[Diagnostic, ...]:
    with pytest.raises(InputRefused) as refusal:
        dsl.load(path, settings)
    return refusal.value.diagnostics


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.ktr").write_text(text)
    return folder / "main.ktr"


# What the later stages get ---------------------------------------------------------------------------------------
def test_a_rule_is_resolved(program: Path) -> None:
    rules = {rule.name: rule for rule in dsl.load(program).rules}
    experts = rules["experts"]
    assert (experts.root, experts.at, experts.except_) == ("moe.block", ("model.layers.*.mlp",), ("**.0.**",))
    moe, place = experts.actions
    assert (moe.facet, moe.on) == ("kernel", ())
    assert moe.target.settings == {
        "format": "stored",
        "isa": "auto",
        "numa": "auto",
        "activations": "keep",
        "threads": 30,
    }
    assert (place.facet, place.on) == ("place", (("router", "gate"), ()))
    assert place.target == Place(device="auto", prefill=None)
    assert str(place.span) == f"{program}:11:3"


def test_overrides_are_transitive(program: Path) -> None:
    rules = {rule.name: rule.overrides for rule in dsl.load(program).rules}
    assert rules["lower"] == {"experts", "low"}
    assert rules["experts"] == {"low"}
    assert rules["low"] == frozenset()


def test_adapters_take_what_they_do_not_say_from_the_lora_block(program: Path) -> None:
    ruleset = dsl.load(program)
    rules = {rule.name: rule for rule in ruleset.rules}
    assert ruleset.lora == {"rank": 16, "alpha": 16.0, "dropout": 0.0, "targets": ("**.q_proj",)}
    assert rules["lower"].actions[0].target.settings == {"rank": 2, "alpha": 7.0, "dropout": 0.0}
    targets = rules["lora.targets"]
    assert (targets.root, targets.at) == ("linear", ("**.q_proj",))
    assert targets.actions[0].target.settings == {"rank": 16, "alpha": 16.0, "dropout": 0.0}


def test_plan_units_and_sources(program: Path) -> None:
    ruleset = dsl.load(program)
    assert ruleset.plan == {"cuda:0": 22 * 2**30, "cpu": 2**30, "mode": "train"}
    assert [unit.prefix for unit in ruleset.units] == ["", "moe."]
    assert ruleset.units[0].imports == {"moe": 1}
    assert ruleset.units[0].params == {"device": "auto", "split": 30, "names": ("int8",), "word": "a"}
    assert list(ruleset.sources) == [ruleset.entry, "std/moe.ktr"]
    assert ruleset.sources[ruleset.entry] == PROGRAM
    assert set(ruleset.patterns) >= {"moe.block", "moe.topk_router", "moe.opaque"}


def test_the_shipped_programs_say_what_they_should() -> None:
    lite = dsl.load(resources.examples() / "deepseek-v2-lite-lora.ktr")
    assert [(rule.name, rule.root) for rule in lite.rules] == [
        *(("experts", "moe.block"), ("attention", "attn.mla"), ("all", "module"), ("many_tokens", "moe.opaque"))
    ]
    assert lite.lora == {"rank": 8, "alpha": 32.0, "dropout": 0.1}
    assert len(lite.requires) == 1
    general = dsl.load("moe-lora")
    assert not general.requires
    assert {rule.name: rule.overrides for rule in general.rules}["known"] == {"opaque"}
    assert [rule.actions[0].on for rule in general.rules if rule.name == "opaque"] == [(("experts",),)]


def test_the_shipped_programs_are_checked_with_little_work() -> None:
    """`benchmarks/check.py` measures the time."""
    programs = sorted(path.stem for path in resources.rules().glob("*.ktr"))
    dsl.load(programs[0])  # reads the grammar
    for name in programs:
        calls(lambda name=name: dsl.load(name), most=1_500_000)


# Settings --------------------------------------------------------------------------------------------------------
def test_settings_win_over_defaults(program: Path) -> None:
    settings = {"device": "cuda:1", "split": "5", "names": "[bf16, int4]", "word": "any text, unquoted"}
    params = dsl.load(program, settings).units[0].params
    assert params == {"device": "cuda:1", "split": 5, "names": ("bf16", "int4"), "word": "any text, unquoted"}
    assert dsl.load(program, {"names": "fp8"}).units[0].params["names"] == ("fp8",)


@pytest.mark.parametrize(
    ("key", "text", "code", "words"),
    [
        ("split", "99", "E032", "outside 1..60"),
        ("split", "many", "E030", "expected int"),
        ("split", "1.5", "E030", "expected int, found float"),
        ("split", "model.layers", "E030", "constant"),
        ("split", "3 3", "E001", "unexpected `3`"),
        ("split", "", "E001", "the end"),
        ("device", "gpu", "E026", "unknown device"),
        ("names", "[int8, 3]", "E030", "expected format"),
        ("splt", "3", "E028", "no such parameter"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(program: Path, key: str, text: str, code: str, words: str) -> None:
    (found,) = refused(program, {key: text})
    assert found.code == code
    assert words in found.message
    if code != "E028":
        assert found.span is not None
        assert found.span.line in (3, 4, 5)


# Imports ---------------------------------------------------------------------------------------------------------
def test_imported_rules_are_active_and_their_parameters_settable(tmp_path: Path) -> None:
    library = "param n : int = 1\nrule low { match experts as e where e.layer < $n => keep(kernel) }"
    path = write(tmp_path, main='import "part.ktr" as p with (n = 2)', part=library)
    assert [(rule.name, rule.unit) for rule in dsl.load(path).rules] == [("p.low", 1)]
    assert dsl.load(path).units[1].params == {"n": 2}
    assert dsl.load(path, {"p.n": "3"}).units[1].params == {"n": 3}


def test_errors_of_all_files_come_together(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        main='import "one.ktr"\nimport "two.ktr"\nrule r { match one.p => cpu_mo() }\nparam x : int = "a"',
        one="pattern p(x) -> y { y = }",
        two="pattern p(x) -> y { y = wrong(x) }",
    )
    found = [(d.code, Path(d.span.file).name, d.span.line) for d in refused(path) if d.span]
    expected = [("E001", "one.ktr", 1), ("E021", "two.ktr", 1), ("E024", "main.ktr", 3), ("E030", "main.ktr", 4)]
    assert sorted(found) == expected


def test_an_import_may_not_leave_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside.ktr"
    outside.write_text("")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link.ktr").symlink_to(outside)
    (found,) = refused(write(inside, main='import "link.ktr"'))
    assert (found.code, "leaves" in found.message) == ("E010", True)


def test_a_cycle_names_its_files(tmp_path: Path) -> None:
    path = write(tmp_path, main='import "a.ktr"', a='import "b.ktr"', b='import "main.ktr"')
    (found,) = refused(path)
    assert found.code == "E012"
    assert [Path(step).name for step in found.label.split(" -> ")] == ["main.ktr", "a.ktr", "b.ktr", "main.ktr"]


def test_too_many_files_and_too_deep_imports_are_refused(tmp_path: Path) -> None:
    chain = {f"f{n}": f'import "f{n + 1}.ktr"' for n in range(40)}
    (found,) = refused(write(tmp_path, main='import "f0.ktr"', **chain))
    assert (found.code, "deeper" in found.message) == ("E013", True)
    many = "\n".join(f'import "g{n}.ktr"' for n in range(70))
    found, *_ = refused(write(tmp_path, main=many, **{f"g{n}": "" for n in range(70)}))
    assert (found.code, "files" in found.message) == ("E013", True)


def test_deeply_nested_patterns_are_refused(tmp_path: Path) -> None:
    chain = "\n".join(f"pattern p{n}(x) -> y {{ y = p{n + 1}(x) }}" for n in range(1000))
    found = refused(write(tmp_path, main=chain + "\npattern p1000(x) -> y { y = relu(x) }"))
    assert found[0].code == "E013"


def test_large_programs_are_checked_or_refused_with_little_work(tmp_path: Path) -> None:
    rule = 'rule r{} {{ match linear at "model.layers.{}.**" => keep(kernel) }}\n'
    many = write(tmp_path, main="".join(rule.format(n, n) for n in range(200)))
    calls(lambda: dsl.load(many), most=8_000_000)  # about 2,000,000
    crowded = "rule r { match linear as l " + "=> keep(kernel) " * 5000 + "}"
    captures = "rule r { match linear as l => keep(kernel) on " + ", ".join(["l"] * 5000) + "}"
    bindings = "pattern p(x) -> y { " + " ".join(f"n{n} = relu(x)" for n in range(5000)) + " y = relu(x) }"
    for text in (crowded, captures, bindings):
        path, found = write(tmp_path, main=text), list[Diagnostic]()
        calls(lambda path=path, found=found: found.extend(refused(path)), most=3_000_000)  # 60,000 to 700,000
        assert found[0].code == "E013"


@pytest.mark.parametrize(
    ("content", "code"), [(b"\xff\xfe\x00", "E013"), (b"#" * (2**20 + 1), "E013"), (b"rule", "E001"), (b"\x00", "E003")]
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "main.ktr"
    path.write_bytes(content)
    assert refused(path)[0].code == code


def test_a_fault_of_the_machine_is_not_one_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, main='import "std/moe.ktr"')

    def failing(path: Path) -> BufferedReader:
        if path.name == "moe.ktr":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return open_regular(path)

    monkeypatch.setattr(loader, "open_regular", failing)
    with pytest.raises(OSError, match="Too many open files"):
        dsl.load(tmp_path / "main.ktr")


def test_a_missing_program_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    write(tmp_path, main="")
    assert refused(tmp_path / "mian.ktr")[0].hint == "did you mean `main.ktr`?"
    assert refused(tmp_path)[0].code == "E011"
    (found,) = refused("moe-lroa")
    assert (found.code, found.hint) == ("E011", "did you mean `moe-lora`?")


# The schema itself -----------------------------------------------------------------------------------------------
def test_every_default_of_the_schema_has_the_type_of_its_setting() -> None:
    for name, specs in schema.SETTINGS.items():
        for setting, spec in specs.items():
            values = spec.default if isinstance(spec.default, tuple) else (spec.default,)
            words = schema.ENUMS.get(spec.type.name)
            assert words is None or all(value is None or value in words for value in values), f"{name}.{setting}"


def test_warnings_do_not_stop_a_program(tmp_path: Path) -> None:
    text = 'import "std/moe.ktr"\nparam x : int = 1\npattern p(x) -> y { y = relu(x) }\n'
    ruleset = dsl.load(write(tmp_path, main=text + "rule r { match linear => place(cpu) }"))
    assert [warning.code for warning in ruleset.warnings] == ["W052", "W051", "W050"]
    guarded = 'import "std/moe.ktr"\nrule r { match moe.block as m where CONDITION => cpu_moe() }'
    codes = {
        "m.shared.hidden > 1": ["W055"],
        "m has shared and m.shared.hidden > 1": [],
        "m has router": ["W054"],
    }
    for condition, expected in codes.items():
        path = write(tmp_path, main=guarded.replace("CONDITION", condition))
        warnings = dsl.load(path).warnings
        assert [warning.code for warning in warnings] == expected, render(warnings)


def test_std_needs_no_checkout_path_in_messages() -> None:
    assert all(not Path(name).is_absolute() for name in dsl.load("moe-lora").sources)
    assert (resources.rules() / "std" / "moe.ktr").is_file()


# Limits ----------------------------------------------------------------------------------------------------------
def test_a_check_stops_at_far_too_many_errors(tmp_path: Path) -> None:
    many = "".join(f"pattern p{n}(x) -> y {{ y = sofmax{n}(x) }}\n" for n in range(500))
    path, found = write(tmp_path, main=many), list[Diagnostic]()
    calls(lambda: found.extend(refused(path)), most=4_000_000)  # about 1,000,000
    assert len(found) == 200


def test_the_words_of_all_files_count(tmp_path: Path) -> None:
    part = "require true\n" * 1900
    files = {f"f{n}": part for n in range(20)}
    found = refused(write(tmp_path, main="".join(f'import "f{n}.ktr"\n' for n in range(20)), **files))
    assert {d.code for d in found} == {"E013"}
    assert "words" in found[0].message


def test_an_overlap_that_costs_too_much_is_left_to_the_plan(tmp_path: Path) -> None:
    hard = ", ".join(f'"**.*{word}*.**.[{n}..].**"' for n, word in enumerate(["ab", "ba", "aab", "bba"] * 8))
    rule = 'rule r{} {{ match linear at {} except "**" => keep(kernel) }}\n'
    assert dsl.load(write(tmp_path, main="".join(rule.format(n, hard) for n in range(3)))).rules


def test_numbers_that_leave_their_range_make_no_condition_costly(tmp_path: Path) -> None:
    text = "require 1.5 in 0..999999999999999999\n"
    text += "".join(f"param p{n} : int = $p{n - 1} * $p{n - 1}\n" for n in range(1, 200)) + "param p0 : int = 99\n"
    found = refused(write(tmp_path, main=text))
    assert [d.code for d in found] == ["E032"]


def test_a_family_of_declarations_keeps_its_errors_apart(tmp_path: Path) -> None:
    """What does not parse may declare the names that are missing: they are not told as unknown."""
    text = "pattern p(x) -> y { y = }\nparam q int\nrule s { match }\n"
    text += "rule r overrides s { match p => cpu_moe(threads = $q) }"
    assert {d.code for d in refused(write(tmp_path, main=text))} == {"E001"}

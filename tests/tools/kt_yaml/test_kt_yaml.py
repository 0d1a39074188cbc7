"""Import of KTransformers' rules: replay, emission and verification on small models, and everything that is refused."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from families import captured as capture_family

from ktc.cli import app as cli
from ktc.diagnostics import InputRefused, KtcError, ProofFailed
from ktc.foundation.timed_search import Invalid, TooMuchWork, search
from ktc.language import dsl
from ktc.language.dsl import syntax
from ktc.language.dsl.globs import matches
from ktc.stages.capture import CapturedModel, ModuleInfo
from ktc.tools.kt_yaml import Imported, Source, document, import_for, import_kt_yaml
from ktc.tools.kt_yaml.effects import outcomes
from ktc.tools.kt_yaml.emit import emit
from ktc.tools.kt_yaml.path_globs import globs_of
from ktc.tools.kt_yaml.reach import find_reach
from ktc.tools.kt_yaml.replay import replay
from ktc.tools.kt_yaml.rules import KtRule
from ktc.tools.kt_yaml.verify import verify

FILES = Path(__file__).parent
LAYERS = {"deepseek_v2": 3, "deepseek_v3": 12, "qwen3_moe": 8}
CASES = sorted(path.stem for path in FILES.glob("*.yaml"))
Golden = Callable[[str, str], None]

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def model(family: str) -> CapturedModel:
    return capture_family(family, num_hidden_layers=LAYERS[family])


@cache
def imported(case: str) -> Imported:
    family = next(name for name in LAYERS if case.startswith(name))
    return imported_text((FILES / f"{case}.yaml").read_text(encoding="utf-8"), family, f"{case}.yaml")


def imported_text(text: str, family: str, name: str = "f.yaml") -> Imported:
    source = Source(name, text)
    return import_for(source, source.rules(), model(family))


def rules_of(text: str) -> tuple[KtRule, ...]:
    return Source("f.yaml", text).rules().rules


def rule(match: str, replace: str = "class: default", rest: str = "") -> str:
    return f"- match: {{{match}}}\n  replace: {{{replace}}}\n{rest}"


# Whole files ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", CASES)
def test_programs_and_reports_are_as_blessed(case: str, golden: Golden) -> None:
    found = imported(case)
    golden(f"kt_yaml/{case}.ktr", found.program)
    golden(f"kt_yaml/{case}.report.txt", str(found.report))


@pytest.mark.parametrize("case", CASES)
def test_a_program_is_loaded_without_a_warning(case: str, tmp_path: Path) -> None:
    path = tmp_path / "imported.ktr"
    path.write_text(imported(case).program, encoding="utf-8")
    assert dsl.load(path).warnings == ()


def test_every_fired_rule_is_told_and_every_dead_one_explained() -> None:
    for case in CASES:
        for told in imported(case).report.rules:
            assert told.became or told.why
            assert (told.state == "dead") == (told.modules == 0)


def test_the_report_is_plain_json() -> None:
    report = json.loads(json.dumps(imported("qwen3_moe").to_json()))["report"]
    assert report["rules"][15]["state"] == "dead"
    assert {note["line"] for note in report["left_out"]} == {6, 11, 17, 23, 29, 50, 66, 68, 74, 79, 92}
    assert report["verified_modules"] == len(model("qwen3_moe").modules)


def test_the_command_writes_the_program_and_says_the_rest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktc.tools.kt_yaml.capture", lambda source: model("deepseek_v2"))
    out = tmp_path / "out.ktr"
    arguments = ["import-kt-yaml", str(FILES / "deepseek_v2.yaml"), "tiny:deepseek_v2", "-o", str(out), "--json"]
    assert cli.main(arguments) == 0
    found = json.loads(capfd.readouterr().out)
    assert out.read_text(encoding="utf-8") == found["program"]
    assert found["diagnostics"] == []


def test_the_command_refuses_with_code_two(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(rule("name: x", "class: os.system"), encoding="utf-8")
    assert cli.main(["import-kt-yaml", str(path), "tiny:deepseek_v2"]) == 2
    assert "error[K010]" in capfd.readouterr().err


# Replay --------------------------------------------------------------------------------------------------------------
TREE = tuple(
    ModuleInfo(fqn, class_name, ())
    for fqn, class_name in (
        ("", "Root"), ("model", "DeepseekV2Model"), ("model.layers", "ModuleList"), ("model.layers.0", "Layer"),
        ("model.layers.0.mlp", "DeepseekV2Moe"), ("model.layers.0.mlp.experts", "DeepseekV2Experts"),
        ("model.layers.0.mlp.experts.act_fn", "SiLU"), ("model.layers.0.mlp.gate", "DeepseekV2TopkRouter"),
        ("model.rotary_emb", "DeepseekV2RotaryEmbedding"), ("lm_head", "Linear"),
    )
)  # fmt: skip


def taken(text: str) -> dict[str, int]:
    visits = replay(rules_of(text), TREE).visits
    return {visit.module.fqn: visit.rule.number for visit in visits if visit.rule is not None}


def test_the_first_rule_that_matches_wins() -> None:
    text = rule("name: head") + rule("class: torch.nn.Linear") + rule("name: lm")
    assert taken(text) == {"lm_head": 1}
    assert replay(rules_of(text), TREE).dead == {
        2: "every module that it fits is taken by rule 1",
        3: "every module that it fits is taken by rule 1",
    }


def test_names_are_searched_anywhere_and_both_conditions_must_hold() -> None:
    assert taken(rule("name: l.p")) == {}
    assert taken(rule(r'name: "rs\\.0\\.mlp$"')) == {"model.layers.0.mlp": 1}
    assert taken(rule("name: layers, class: torch.nn.Linear")) == {}


def test_what_is_not_recursive_keeps_its_insides() -> None:
    text = rule("name: experts$", rest="  recursive: False\n") + rule("name: act_fn")
    assert taken(text) == {"model.layers.0.mlp.experts": 1, "model.layers.0.mlp.experts.act_fn": 1}
    assert replay(rules_of(text), TREE).fired == {1: 1}


@pytest.mark.parametrize(
    ("class_name", "path"),
    [
        ("ktransformers.models.modeling_deepseek.DeepseekV2MoE", "model.layers.0.mlp"),
        ("ktransformers.models.modeling_deepseek.DeepseekV2YarnRotaryEmbedding", "model.rotary_emb"),
        ("ktransformers.models.modeling_deepseek.DeepseekV2DynamicNTKScalingRotaryEmbedding", "model.rotary_emb"),
        ("ktransformers.models.modeling_deepseek.MoEGate", "model.layers.0.mlp.gate"),
        ("torch.nn.Linear", "lm_head"),
    ],
)
def test_classes_are_known_by_their_own_names_and_by_ktransformers(class_name: str, path: str) -> None:
    assert taken(rule(f"class: {class_name}")) == {path: 1}


def test_a_class_that_no_module_has_is_dead_not_wrong() -> None:
    (why,) = replay(rules_of(rule("class: some.where.DeepseekV2Modle")), TREE).dead.values()
    assert why == "this model has no module of the class `DeepseekV2Modle`; did you mean `DeepseekV2Model`?"


# Emission and verification -------------------------------------------------------------------------------------------
def test_globs_say_ranges_and_choices_and_nothing_else() -> None:
    universe = [f"m.layers.{i}.{name}" for i in range(12) for name in ("a.q", "a.k", "b")] + ["m", "m.layers", "head"]
    wanted = [f"m.layers.{i}.a.{name}" for i in (*range(3, 9), 11) for name in "qk"] + ["head", "m.layers.5.b"]
    globs = globs_of(wanted, universe)
    assert globs == ("m.layers.[3..8].a.{q,k}", "m.layers.11.a.{q,k}", "head", "m.layers.5.b")
    assert {path for path in universe if any(matches(glob, path) for glob in globs)} == set(wanted)
    assert globs_of(universe[:36:3], universe) == ("m.layers.*.a.q",)


def emitted(case: str) -> tuple[syntax.Module, tuple[object, ...], CapturedModel]:
    there = model(case)
    replayed = replay(rules_of((FILES / f"{case}.yaml").read_text(encoding="utf-8")), there.modules)
    found = outcomes(replayed.visits, find_reach(there))
    return emit(found, there, "imported.ktr", ()).module, found, there


def test_verification_sees_every_lost_rule() -> None:
    module, found, there = emitted("deepseek_v2")
    for number, declaration in enumerate(module.declarations):
        if isinstance(declaration, syntax.Rule):
            rest = (*module.declarations[:number], *module.declarations[number + 1 :])
            lacking = replace(module, declarations=rest)
            if declaration.name.text == "on_cuda_0":
                continue  # what it places stands there by `unplaced` too
            with pytest.raises(ProofFailed, match="K030"):
                verify(lacking, found, there)


def test_verification_sees_a_changed_setting() -> None:
    module, found, there = emitted("deepseek_v2")

    def changed(declaration: syntax.Declaration) -> syntax.Declaration:
        if not isinstance(declaration, syntax.Rule) or declaration.name.text != "experts":
            return declaration
        (action,) = declaration.actions
        return replace(declaration, actions=(replace(action, arguments=()),))

    with pytest.raises(ProofFailed, match="cpu_moe expected, found cpu_moe"):
        verify(replace(module, declarations=tuple(map(changed, module.declarations))), found, there)


def test_what_ktc_cannot_rewrite_is_refused_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    there = model("deepseek_v2")
    reach = find_reach(there)
    reach = replace(reach, paths={**reach.paths, "experts": frozenset[str]()})
    monkeypatch.setattr("ktc.tools.kt_yaml.find_reach", lambda captured: reach)
    found = imported_text((FILES / "deepseek_v2.yaml").read_text(encoding="utf-8"), "deepseek_v2")
    told = found.report.rules[5]
    assert told.state == "refused"
    assert told.why == "ktc finds no `experts` at `model.layers.1.mlp.experts` that `cpu_moe` could rewrite"
    assert "cpu_moe" not in found.program


PATHS = [
    "experts$", "[.]mlp$", "self_attn", "self_attn$", "layers[.][0-1][.]", "embed", "norm", "^model$", "proj", "act_fn",
    "rotary", "^$", "",
]  # fmt: skip
CLASSES = ["torch.nn.Linear", "m.DeepseekV2Attention", "m.Qwen3MoeAttention", "torch.nn.ModuleList", "m.DeepseekV2MoE"]
OPERATORS = {  # and what `generate_op` may be
    "linear.KTransformersLinear": ["KLinearTorch", "KLinearFP8", "~"],
    "experts.KTransformersExperts": ["KExpertsCPU", "KExpertsMarlin", "KSFTExpertsCPU", "~"],
    "experts.KDeepseekV2MoE": [],
    "attention.KDeepseekV2Attention": [],
    "gate.KMoEGate": [],
    "RoPE.RotaryEmbedding": [],
    "models.KDeepseekV2Model": [],
}
DEVICES = ["cpu", "cuda", "'cuda:1'"]


def random_rule(chosen: random.Random) -> str:
    """A rule that need make no sense, over the paths, classes and operators of real ones."""

    def maybe(share: float, text: str) -> list[str]:
        return [text] if chosen.random() < share else []

    operator, operations = chosen.choice([*OPERATORS.items()])
    settings = [f"generate_op: {chosen.choice(operations)}"] if operations else []
    for key in ("generate_device", "prefill_device"):
        settings += maybe(0.6, f"{key}: {chosen.choice(DEVICES)}")
    match = [f'name: "{chosen.choice(PATHS)}"', *maybe(0.3, f"class: {chosen.choice(CLASSES)}")]
    replaced = f"class: ktransformers.operators.{operator}, kwargs: {{{', '.join(settings)}}}"
    default = f"kwargs: {{generate_device: {chosen.choice(DEVICES)}}}"
    rest = maybe(0.2, "  recursive: False\n")
    return rule(", ".join(match), replaced if chosen.random() < 0.7 else default, "".join(rest))


@pytest.mark.parametrize("seed", range(25))
def test_whatever_a_file_says_its_program_does_the_same(seed: int) -> None:
    chosen = random.Random(seed)
    text = "".join(random_rule(chosen) for _ in range(chosen.randint(1, 10)))
    family = chosen.choice(["deepseek_v2", "qwen3_moe"])
    assert imported_text(text, family).report.verified_modules == len(model(family).modules)


def test_nothing_of_the_file_reaches_the_program_but_numbers() -> None:
    text = rule(r'name: "^lm_head$|evil\\nrule evil"') + rule('name: "\\u2028 }"')
    program = imported_text(text, "deepseek_v2").program
    assert "evil" not in program
    assert "\u2028" not in program


# Refusals ------------------------------------------------------------------------------------------------------------
LINEAR = "class: ktransformers.operators.linear.KTransformersLinear"
EXPERTS = "class: ktransformers.operators.experts.KTransformersExperts"
MODEL = "class: ktransformers.operators.models.KDeepseekV2Model"
THRESHOLD = "per_layer_prefill_intput_threshold"
REFUSED = {
    "broken YAML": ("- match: {name: x\n- b", "K002", "3:1"),
    "no document": ("# nothing\n", "K002", "1:1"),
    "an anchor": (rule("name: &a x"), "K003", "1:17"),
    "an alias": ("- *a\n", "K003", "1:3"),
    "a tag that runs code": ("- !!python/object/apply:os.system [ls]\n", "K003", "1:3"),
    "nesting": ("[" * 40 + "]" * 40, "K004", "1:17"),
    "two documents": ("- a\n---\n- b\n", "K004", "2:1"),
    "too many rules": (rule("name: x") * 501, "K004", "1:1"),
    "too many values": ("[" + "a," * 60_000 + "]", "K004", "1:100000"),
    "a key twice": (rule("name: x, name: y"), "K005", "1:20"),
    "a key that is a list": ("? [a]\n: b\n", "K005", "1:3"),
    "no list": ("match: {name: x}\n", "K006", "1:1"),
    "a rule that is a text": ("- hello\n", "K006", "1:3"),
    "no replace": ("- match: {name: x}\n", "K006", "1:3"),
    "an empty match": (rule("nmae: x"), "K006", "1:10"),
    "a name that is a number": (rule("name: 7"), "K006", "1:17"),
    "a class that is no name": (rule("class: 'a b'"), "K006", "1:18"),
    "recursive that is a text": (rule("name: x", rest="  recursive: maybe\n"), "K006", "3:14"),
    "kwargs that are a list": (rule("name: x", f"{LINEAR}, kwargs: [a]"), "K006", "2:80"),
    "a broken expression": (rule('name: "(a"'), "K008", "1:17"),
    "an endless count": (rule('name: "a{99999999999}"'), "K008", "1:17"),
    "any class": (rule("name: x", "class: subprocess.Popen"), "K010", "2:20"),
    "a class with a near name": (rule("name: x", "class: evil.linear.KTransformersLinear"), "K010", "2:20"),
    "an unknown operation": (rule("name: x", f"{LINEAR}, kwargs: {{generate_op: KLinearMarlni}}"), "K011", "2:94"),
    "an unknown backend": (rule("name: x", f"{EXPERTS}, kwargs: {{backend: AMXFP4}}"), "K011", "2:92"),
    "a device without kernels": (rule("name: x", f"{LINEAR}, kwargs: {{generate_device: xpu}}"), "K012", "2:98"),
    "a strange device": (rule("name: x", f"{LINEAR}, kwargs: {{generate_device: disk}}"), "K012", "2:98"),
    "a negative threshold": (rule("name: x", f"{MODEL}, kwargs: {{{THRESHOLD}: -1}}"), "K013", "2:114"),
    "a layer that is none": (rule("name: x", f"{MODEL}, kwargs: {{transfer_map: {{a: cuda}}}}"), "K013", "2:93"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(what: str) -> None:
    text, code, place = REFUSED[what]
    with pytest.raises(InputRefused) as refused:
        rules_of(text)
    first = refused.value.diagnostics[0]
    assert first.span is not None
    assert (first.code, f"{first.span.line}:{first.span.column}") == (code, place)


def test_all_faults_of_a_file_are_told_together() -> None:
    text = rule("name: 7") + rule("name: x", "class: a.B") + rule('name: "("') + rule("nmae: x")
    with pytest.raises(InputRefused) as refused:
        rules_of(text)
    assert [(d.code, d.span and d.span.line) for d in refused.value.diagnostics] == [
        ("K006", 1), ("K010", 4), ("K008", 5), ("K006", 7),
    ]  # fmt: skip


def test_a_class_of_the_file_is_never_imported() -> None:
    with pytest.raises(InputRefused):
        rules_of(rule("class: antigravity.Window", "class: antigravity.Window"))
    assert "antigravity" not in sys.modules


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    large, binary = tmp_path / "large.yaml", tmp_path / "binary.yaml"
    large.write_bytes(b"#" * (document.MAX_BYTES + 1))
    binary.write_bytes(b"- \xff\xfe")
    for path in (large, binary, tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(InputRefused, match="K001"):
            import_kt_yaml(path, "tiny:deepseek_v2")


def test_scalars_are_read_as_yaml_means_them() -> None:
    text = "[yes, Off, 'yes', null, ~, 12, '12', -3, 1e3, \"a\\nb\"]"
    root = document.parse(text, "f.yaml")
    assert isinstance(root, document.Sequence)
    values = [item.value for item in root.items if isinstance(item, document.Scalar)]
    assert values == [True, False, "yes", None, None, 12, "12", -3, "1e3", "a\nb"]


# Expressions ---------------------------------------------------------------------------------------------------------
def test_expressions_find_what_re_finds() -> None:
    expressions = ["^model", r"layers\.(?!0).*mlp$", "(?<=rs).1", r"(.)\1", "[ab]{2}", "x|", "", "(?P<n>l)p"]
    names = ["model.layers.1.mlp", "model.layers.0.mlp", "model", "", "aab.ba"]
    found = search(expressions, names)
    assert found == [frozenset(name for name in names if re.search(each, name)) for each in expressions]


INVALID = ["(a", "*", "[b-a]", "a{2,1}", "(?<=a*)b", "a{99999999999}", "(" * 10_000, r"\g", "\ud83d("]


def test_what_re_refuses_is_refused_and_the_rest_is_searched() -> None:
    *refused, found = search([*INVALID, "a"], ["ab"])
    assert all(isinstance(each, Invalid) and each.reason for each in refused)
    assert found == {"ab"}


@pytest.mark.parametrize("text", ["(a|a)*$", "(?:(?:|a)+)+$", "(?i:" + r"[\0-\U0010ffff]" * 500 + ")"])
def test_an_expression_that_takes_long_is_stopped(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.foundation.timed_search.MAX_SECONDS", 0.3)
    with pytest.raises(TooMuchWork, match=r"0\.3 seconds") as stopped:
        search(["b", text, "c"], ["model.layers." + "a" * 200 + "!"])
    assert stopped.value.index == 1


def test_an_expression_that_takes_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.foundation.timed_search.MAX_BYTES", 100 << 20)
    with pytest.raises(TooMuchWork, match="100 MiB"):
        search(["a", "(?:(a)|b)*x"], ["a" * 1_000_000])


def test_an_expression_that_is_too_much_work_names_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.foundation.timed_search.MAX_SECONDS", 0.3)
    rules = rules_of(rule("name: a") + rule('name: "(a|a)*$"'))
    with pytest.raises(KtcError, match="K009: rule 2 is too much work"):
        replay(rules, (ModuleInfo("model.layers." + "a" * 200 + "!", "Linear", ()),))

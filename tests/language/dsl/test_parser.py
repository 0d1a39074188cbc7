"""Text to tree: what the grammar means, what is refused, and that errors of a file come together."""

from __future__ import annotations

import pytest
from lark import Lark

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import resources
from ktc.language.dsl import parser, syntax
from ktc.language.dsl.parser import parse, parse_value
from ktc.language.dsl.printer import print_expression, print_module


def refused(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(InputRefused) as refusal:
        parse(text, "a.ktr")
    return refusal.value.diagnostics


def test_the_grammar_has_no_conflict() -> None:
    pytest.importorskip("interegular", reason="lark's strict mode needs it")
    grammar = (resources.grammar() / "ktr.lark").read_text()
    Lark(grammar, parser="lalr", lexer="contextual", strict=True, start=["start", "range"])


def test_every_declaration_reaches_the_tree() -> None:
    text = """
    import "std/moe.ktr" as moe with (k = 2)
    param p : list[isa] = [avx2] in [avx2, amx]
    require host.cores > 4 else "too small"
    pattern q(x) -> a, b is mlp { a, b = f(x) }
    rule r { match moe.block => cpu_moe() }
    lora { rank = 8 }
    plan { cuda:0 = 22GiB }
    """
    kinds = [type(declaration).__name__ for declaration in parse(text, "a.ktr").declarations]
    assert kinds == ["Import", "Param", "Require", "Pattern", "Rule", "Block", "Block"]


def test_spans_are_exact_and_take_no_part_in_equality() -> None:
    module = parse("\n  rule r {\n match linear => place(cuda:0)\n}", "a.ktr")
    rule = module.declarations[0]
    assert isinstance(rule, syntax.Rule)
    assert str(rule.span) == "a.ktr:2:3"
    assert (rule.span.end_line, rule.span.end_column) == (4, 2)
    assert str(rule.actions[0].span) == "a.ktr:3:15"
    assert str(rule.actions[0].arguments[0].value.span) == "a.ktr:3:24"
    assert parse("rule r { match linear => place(cuda:0) }", "b.ktr") == module


def test_comments_are_kept_with_their_places() -> None:
    module = parse('# first\nrequire model.type == "#no" # second\n', "a.ktr")
    assert [(c.text, c.span.line, c.span.column) for c in module.comments] == [("# first", 1, 1), ("# second", 2, 29)]


def test_a_comment_stays_with_the_line_it_explains() -> None:
    text = f"# head\nplan {{\n  # of the GPU\n{'  cuda:0 = 22GiB':<50}# all of it\n}}\n# end\n"
    assert print_module(parse(text, "a.ktr")) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1.5e3", 1500.0),
        ("22GiB", 22 * 2**30),
        ("1.5 KB", 1500),
        ("0B", 0),
        ("true", True),
        ('"a\\"\\\\"', 'a"\\'),
    ],
)
def test_literals(text: str, value: object) -> None:
    literal = parse_value(text, "v")
    assert isinstance(literal, syntax.Literal)
    assert literal.value == value
    assert parse_value(print_expression(literal), "v") == literal


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("a.b or c.d and not e.f == 1 + 2 * -3", "a.b or c.d and not (e.f == 1 + 2 * -3)"),
        ("(a.b or c.d) and not (e.f and g.h)", "(a.b or c.d) and not (e.f and g.h)"),
        ("1 - (2 - 3) - 4 == ((5))", "1 - (2 - 3) - 4 == 5"),
        ("(a.b == 1) == (c.d in 1..2)", "(a.b == 1) == (c.d in 1..2)"),
        ("m has shared and m.layer not in [0, 1,]", "m has shared and m.layer not in [0, 1]"),
        ("-(-(1 + 2)) * 3 < 4", "--(1 + 2) * 3 < 4"),
    ],
)
def test_precedence_survives_printing(text: str, printed: str) -> None:
    module = parse(f"require {text}", "a.ktr")
    assert print_module(module) == f"require {printed}\n"
    assert parse(f"require {printed}", "a.ktr") == module


@pytest.mark.parametrize(
    "term", ["(a + b)?", "(a | b) * c", "a + (b + c)", "f(a)? | _", "(a * b + c)?", "add(a, b, k = 1)", "(f(a)?)?"]
)
def test_terms_survive_printing(term: str) -> None:
    module = parse(f"pattern p(x) -> y {{ y = {term} }}", "a.ktr")
    assert print_module(module) == f"pattern p(x) -> y {{\n  y = {term}\n}}\n"


def test_an_infix_term_is_the_call_of_its_operator() -> None:
    assert parse("pattern p(x) -> y { y = x + x }", "a") == parse("pattern p(x) -> y { y = add(x, x) }", "a")


@pytest.mark.parametrize("word", ["planner", "lorax", "truest", "inner", "android"])
def test_a_name_may_begin_with_a_keyword(word: str) -> None:
    assert parse(f"rule {word} {{ match linear as l where l.{word} == {word} => place(cpu) }}", "a.ktr")


@pytest.mark.parametrize("word", ["rule", "in", "plan", "true", "has"])
def test_a_keyword_is_no_name(word: str) -> None:
    assert refused(f"rule r {{ match linear as {word} => place(cpu) }}")[0].code == "E001"


def test_all_syntax_errors_of_a_file_are_reported() -> None:
    good = "rule r{} {{ match linear => place(cpu) }}\n"
    text = "".join(good.format(n) if n % 3 else f"rule r{n} {{ match => }}\n" for n in range(12))
    assert [d.span.line for d in refused(text) if d.span] == [1, 4, 7, 10]


def test_an_error_inside_a_declaration_does_not_hide_the_next_line() -> None:
    first, second = refused("param = 3\nparam x int = 3\nparam y : int = 3\n")
    assert (str(first.span), str(second.span)) == ("a.ktr:1:7", "a.ktr:2:9")


@pytest.mark.parametrize(
    "text",
    [
        "#" + "x" * parser.MAX_BYTES,
        "require " + "(" * 65 + "true" + ")" * 65,
        "require " + "[" * 100_000,
        "require " + "not " * 20_000 + "true",
        "require " + " and ".join(["true"] * 20_000),
        "require " + "-" * 5000 + "1 == 1",
        "pattern p(x) -> y { y = " + "x + " * 5000 + "x }",
        "require true\n" * (parser.MAX_DECLARATIONS + 1),
    ],
    ids=["bytes", "nesting", "open brackets", "not", "and", "minus", "terms", "declarations"],
)
def test_a_file_over_a_limit_is_refused_with_a_place(text: str) -> None:
    found = refused(text)
    assert found[0].code == "E013"
    assert found[0].span is not None


def test_a_value_of_the_command_line_is_one_expression() -> None:
    assert parse_value("cuda:0", "--set") == syntax.Literal("device", "cuda:0")
    for text in ("", "cuda:0 cpu", "=> place(cpu)", "a and b", '"'):
        with pytest.raises(InputRefused):
            parse_value(text, "--set")

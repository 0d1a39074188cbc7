"""Messages: their text, their JSON, and what never reaches a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable

from ktc.diagnostics import Diagnostic, InputRefused, Related, Span, listing, render, suggest, to_json

SOURCE = """import "std/attention.ktr" as attn
rule attention {
  match attn.mla as a
  => mla_absorbed()
\t=> lora_linear on a.q, a.kv_b
}
"""
ABSORBED = Diagnostic(
    "E042",
    "`lora_linear` on `kv_b`, but `mla_absorbed` absorbs it",
    Span("v2.ktr", 5, 2, 5, 31),
    label="`kv_b` is no longer a node",
    hint="leave out `a.kv_b`",
    related=(
        Related(Span("v2.ktr", 4, 3, 4, 20), "`mla_absorbed` absorbs `core`, `kv_b`"),
        Related(Span("std/attention.ktr", 24, 3, 24, 40), "`kv_b` is bound here"),
    ),
)
WARNING = Diagnostic("W052", "import `attn` is never used", Span("v2.ktr", 1, 1, 1, 35), severity="warning")
UNPLACED = Diagnostic("E028", "--set devise: there is no such parameter", hint="did you mean `device`?")


def test_the_text_of_messages_is_fixed(golden: Callable[[str, str], None]) -> None:
    golden("diagnostics/text.txt", render([ABSORBED, WARNING, UNPLACED], {"v2.ktr": SOURCE}) + "\n")


def test_the_place_is_shown_without_the_source_too() -> None:
    text = render([ABSORBED])
    assert text.startswith("error[E042]: `lora_linear` on `kv_b`")
    assert "\n --> v2.ktr:5:2\n" in text
    assert "help: leave out `a.kv_b`" in text


def test_color_is_added_only_when_asked() -> None:
    plain = render([ABSORBED], {"v2.ktr": SOURCE})
    colored = render([ABSORBED], {"v2.ktr": SOURCE}, color=True)
    assert "\x1b" not in plain
    assert "\x1b[1;31merror[E042]\x1b[0m" in colored


def test_control_characters_of_a_file_do_not_reach_the_terminal() -> None:
    hostile = "rule \x1b[2J\x07\u202e { }"
    diagnostic = Diagnostic("E001", f"unexpected `{hostile}`", Span("\x1b]0;a.ktr", 1, 6, 1, 8), label="\x1b[31m")
    text = render([diagnostic], {"\x1b]0;a.ktr": hostile})
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_very_long_line_is_shown_in_part_with_its_caret() -> None:
    line = "x" * 5000 + "WRONG" + "y" * 5000
    text = render([Diagnostic("E001", "unexpected", Span("a.ktr", 1, 5001, 1, 5006))], {"a.ktr": line})
    shown, underline = text.splitlines()[-2:]
    assert len(shown) < 200
    assert shown[underline.index("^") : underline.rindex("^") + 1] == "WRONG"


def test_a_place_outside_the_text_does_no_harm() -> None:
    for span in (Span("a.ktr", 9, 1, 9, 2), Span("a.ktr", 0, 0, 0, 0), Span("a.ktr", 1, 80, 3, 1)):
        assert "error[E001]" in render([Diagnostic("E001", "lost", span)], {"a.ktr": "short\n"})


def test_json_has_every_field_and_survives_serialisation() -> None:
    found = json.loads(json.dumps(to_json(ABSORBED)))
    assert list(found) == [
        *("code", "severity", "message", "file", "line", "column", "end_line", "end_column", "hint", "related", "lsp")
    ]
    assert (found["code"], found["severity"], found["file"]) == ("E042", "error", "v2.ktr")
    assert (found["line"], found["column"], found["end_line"], found["end_column"]) == (5, 2, 5, 31)
    assert found["related"][1] == {
        "message": "`kv_b` is bound here",
        "file": "std/attention.ktr",
        "line": 24,
        "column": 3,
        "end_line": 24,
        "end_column": 40,
    }
    assert to_json(UNPLACED)["line"] is None


def test_json_has_the_shape_of_the_language_server_protocol() -> None:
    found = json.loads(json.dumps(to_json(ABSORBED)["lsp"]))
    assert found["range"] == {"start": {"line": 4, "character": 1}, "end": {"line": 4, "character": 30}}
    assert (found["severity"], found["code"], found["source"]) == (1, "E042", "ktc")
    assert found["message"].startswith("`lora_linear` on `kv_b`, but `mla_absorbed` absorbs it. `kv_b` is no longer")
    assert found["relatedInformation"][0]["location"]["range"]["start"] == {"line": 3, "character": 2}
    assert [to_json(d)["lsp"]["severity"] for d in (WARNING, UNPLACED)] == [2, 1]  # type: ignore[index]
    text = "\U0001f600\u00e9 x"
    beyond = to_json(Diagnostic("E001", "unexpected", Span("a.ktr", 1, 4, 1, 5)), {"a.ktr": text})["lsp"]
    assert beyond["range"]["start"] == {"line": 0, "character": 4}  # type: ignore[index]


def test_suggestions_are_close_or_absent() -> None:
    assert suggest("cpu_mo", ["cpu_moe", "place"]) == "did you mean `cpu_moe`?"
    assert suggest("zebra", ["cpu_moe", "place"]) == ""
    assert listing(["a", "b", "c"], limit=2) == "`a`, `b`, ..."
    assert listing([]) == "none"


def test_an_error_has_the_codes_places_and_hints_in_its_text() -> None:
    error = InputRefused(ABSORBED, UNPLACED, sources={"v2.ktr": SOURCE})
    assert error.exit_code == 2
    assert str(error).splitlines() == [
        f"E042: {ABSORBED.message}", " --> v2.ktr:5:2 `kv_b` is no longer a node", "help: leave out `a.kv_b`",
        f"E028: {UNPLACED.message}", "help: did you mean `device`?",
    ]  # fmt: skip
    assert render(error.diagnostics, error.sources).count("error[") == 2

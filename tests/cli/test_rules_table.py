"""The table of rules says what becomes of each rule's matches, also where they stay as they are."""

from __future__ import annotations

from pathlib import Path

from families import CPU, captured, planned, rules
from rich.console import Console

from ktc.cli.tables import rules_table
from ktc.stages.match import match

PROGRAM = """
rule experts { match moe.block => cpu_moe() }
rule kept    { match attn.gqa => keep(kernel) }
rule head    { match linear at "lm_head" => keep(quant) => keep(adapter) }
rule absent  { match attn.mla expect >= 0 => keep(kernel) }
"""


def test_a_rule_that_keeps_something_says_so(tmp_path: Path) -> None:
    model, program = captured("qwen3_moe"), rules(PROGRAM, tmp_path)
    _, plan = planned(model, program)
    console = Console(width=120)
    with console.capture() as shown:
        console.print(rules_table(program, match(model, program, CPU), plan))
    lines = {line.split()[0]: " ".join(line.split()[2:]) for line in shown.get().splitlines() if len(line.split()) > 2}
    assert lines["kept"] == "keeps its own code"
    assert lines["head"] == "keeps its weights, gets no adapter"
    assert lines["absent"] == "fits nowhere"
    assert lines["experts"].startswith("cpu_moe")

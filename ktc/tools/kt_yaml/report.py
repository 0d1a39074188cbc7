"""The report of an import: the result of each rule, rules that never fire, settings that are implied or left out.

It is text for people and plain values for `--json`. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ktc.stages.capture import CapturedModel
from ktc.tools.kt_yaml import names
from ktc.tools.kt_yaml.document import printable
from ktc.tools.kt_yaml.effects import Outcome, implied, operations, trains
from ktc.tools.kt_yaml.replay import Replay
from ktc.tools.kt_yaml.rules import KtRule, KtRules
from ktc.tools.kt_yaml.verify import Effect, Verified

State = Literal["imported", "implied", "dead", "refused"]


@dataclass(frozen=True, slots=True)
class RuleReport:
    """One rule of the file. `became` names rules of the program, `why` explains other results."""

    number: int
    line: int
    replacement: str
    modules: int
    state: State
    became: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """A remark about one setting or rule of the file."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """`derived` are settings that follow from placement, `left_out` those that the program omits."""

    file: str
    model: str
    rules: tuple[RuleReport, ...]
    derived: tuple[Note, ...]
    left_out: tuple[Note, ...]
    verified_modules: int
    verified_rewrites: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.file} on {self.model}", "", *_table(self.rules)]
        for title, notes in (("follows from placement", self.derived), ("left out", self.left_out)):
            if notes:
                lines += ["", f"{title}:", *(f"  line {note.line}: {note.text}" for note in notes)]
        lines += ["", f"verified: {self.verified_modules} modules, {self.verified_rewrites} of them rewritten"]
        return "".join(f"{printable(line)}\n" for line in lines)


def make_report(
    file: str,
    read: KtRules,
    replayed: Replay,
    outcomes: Sequence[Outcome],
    became: Mapping[int, tuple[str, ...]],
    verified: Verified,
    captured: CapturedModel,
) -> Report:
    fired = [rule for rule in read.rules if replayed.fired.get(rule.number)]
    derived, differing = _out_devices(outcomes, verified.effect)
    maps_derived, maps_differing = _transfer_maps(fired, captured, verified.effect)
    ignored = [Note(d.span.line, d.message) for d in read.warnings if d.span is not None]
    left_out = [*ignored, *differing, *maps_differing, *_losses(fired), *_lost(outcomes)]
    return Report(
        file,
        str(captured.facts["type"]),
        tuple(_rule(rule, replayed, outcomes, became) for rule in read.rules),
        tuple(sorted((*derived, *maps_derived), key=_line)),
        tuple(sorted(left_out, key=_line)),
        verified.modules,
        verified.rewrites,
    )


def _rule(
    rule: KtRule, replayed: Replay, outcomes: Sequence[Outcome], became: Mapping[int, tuple[str, ...]]
) -> RuleReport:
    def report(state: State, why: str) -> RuleReport:
        count = replayed.fired.get(rule.number, 0)
        return RuleReport(rule.number, rule.span.line, rule.short, count, state, became.get(rule.number, ()), why)

    if rule.number in replayed.dead:
        return report("dead", replayed.dead[rule.number])
    lost = [outcome.lost for outcome in outcomes if outcome.rule is rule and outcome.lost]
    if lost and not any(outcome.kernel for outcome in outcomes if outcome.rule is rule):
        return report("refused", lost[0])
    if became.get(rule.number):
        return report("imported", f"but not {len(lost)} of the modules: {lost[0]}" if lost else "")
    return report("implied", implied(rule) or "nothing: these modules hold no weights of their own")


def _table(rules: Sequence[RuleReport]) -> list[str]:
    rows = [("rule", "line", "replacement", "modules", "became")]
    for rule in rules:
        outcome = {"dead": "never fires: ", "refused": "refused: "}.get(rule.state, "") + rule.why
        result = "; ".join(part for part in (", ".join(rule.became), outcome) if part)
        rows.append((str(rule.number), str(rule.line), rule.replacement, str(rule.modules), result))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    right = (True, True, False, True)
    return [
        "  ".join(
            [*(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=False)), row[4]]
        ).rstrip()
        for row in rows
    ]


def _out_devices(outcomes: Sequence[Outcome], effect: Effect) -> tuple[list[Note], list[Note]]:
    """Compare the `out_device` of every rule with the device around its modules."""
    derived, differing = dict[int, Note](), dict[int, Note]()
    for outcome in outcomes:
        wanted = outcome.rule.settings.get("out_device") if outcome.rule else None
        if outcome.rule is None or outcome.inside or not isinstance(wanted, str):
            continue
        line = outcome.rule.span.line
        around = effect.place_of(outcome.path.rpartition(".")[0])[0]
        if around == wanted:
            derived[line] = Note(line, f"`out_device` {wanted}: results return to the device of their block")
        else:
            said = f"`out_device` {wanted}: results return to the device of their block, {around}"
            differing[line] = Note(line, said)
    return [note for line, note in derived.items() if line not in differing], [*differing.values()]


def _transfer_maps(fired: Sequence[KtRule], captured: CapturedModel, effect: Effect) -> tuple[list[Note], list[Note]]:
    """Compare every `transfer_map` with the layers at which the program's placement changes the device."""
    layers = {site.layer: effect.place_of(site.fqn.rpartition(".")[0])[0] for site in captured.sites}
    moves = {layer: device for layer, device in layers.items() if layer and layers.get(layer - 1) != device}
    derived: list[Note] = []
    differing: list[Note] = []
    for rule in fired:
        wanted = rule.settings.get("transfer_map")
        if not isinstance(wanted, Mapping):
            continue
        if dict(wanted) == moves:
            derived.append(Note(rule.span.line, f"`transfer_map` {_map(wanted)}: the same as placement implies"))
        else:
            said = f"`transfer_map` {_map(wanted)}: hidden states move as placement implies, {_map(moves)}"
            differing.append(Note(rule.span.line, said))
    return derived, differing


def _map(moves: Mapping[int, str]) -> str:
    return ", ".join(f"{layer} -> {device}" for layer, device in sorted(moves.items())) or "nowhere"


def _losses(fired: Sequence[KtRule]) -> list[Note]:
    notes: list[Note] = []
    training = trains(fired)
    for rule in fired:
        if training and rule.kind == "linear" and set(operations(rule)) - {"KLinearTorch"}:
            notes.append(Note(rule.span.line, "linears are trained through PyTorch's kernel, as KTransformers does it"))
            continue
        used = dict.fromkeys(operations(rule))
        notes += [Note(rule.span.line, f"`{name}`: {names.LOSSES[name]}") for name in used if name in names.LOSSES]
        if rule.settings.get("prefill_op") == "KExpertsMarlin" and operations(rule)[0] in names.CPU_EXPERTS:
            notes.append(Note(rule.span.line, "`prefill_op` KExpertsMarlin: ktc chooses the kernel of the prefill"))
    return notes


def _lost(outcomes: Sequence[Outcome]) -> list[Note]:
    lost = {o.rule.number: Note(o.rule.span.line, o.lost) for o in outcomes if o.rule is not None and o.lost}
    return [*lost.values()]


def _line(note: Note) -> int:
    return note.line

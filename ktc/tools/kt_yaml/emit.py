"""Emit the outcomes of a replay as a rule program: one rule per rewrite and per placement, each with its globs.

Placement is hoisted to the largest subtrees whose modules agree. Everything goes through the syntax tree and its
printer: no text of the YAML file reaches the program.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ktc.diagnostics import Span
from ktc.foundation.module_paths import from_inside, is_inside
from ktc.language.dsl import syntax
from ktc.language.dsl.schema import SETTINGS
from ktc.model import targets
from ktc.stages.capture import CapturedModel
from ktc.tools.kt_yaml.effects import UNMATCHED_DEVICE, Kernel, Outcome, trains
from ktc.tools.kt_yaml.path_globs import globs_of
from ktc.tools.kt_yaml.reach import import_attention, rewrite_rule
from ktc.tools.kt_yaml.rules import KtRule

_NAMES = {
    targets.LinearTarget.name: "linears",
    targets.CpuMoe.name: "experts",
    targets.GpuMoe.name: "gpu_experts",
    targets.Fused.name: "fused",
}
_LINES = 10  # between the synthetic spans: the comment of a declaration is one line before it


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a module, as in `place(run, prefill = prefill)`."""

    run: str
    prefill: str


@dataclass(frozen=True, slots=True)
class Emitted:
    """The emitted program. `became` has the names of its rules for each rule of the file, by that rule's number."""

    module: syntax.Module
    became: dict[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Group:
    """The content of one rule of the program. `origins` are the file's rules, `expect` is its number of matches."""

    stem: str
    root: str
    action: syntax.Action
    paths: tuple[str, ...]
    origins: tuple[KtRule, ...]
    expect: int | None


def emit(outcomes: Sequence[Outcome], captured: CapturedModel, file: str, header: Sequence[str]) -> Emitted:
    """Emit the program for `captured`. `header` are the lines of its first comment."""
    universe = [module.fqn for module in captured.modules if module.fqn]
    groups = [*_kernels(outcomes), *_prefills(outcomes), *_placements(outcomes, universe)]
    taken, became = Counter[str](), dict[int, tuple[str, ...]]()
    declarations: list[tuple[str, syntax.Declaration]] = []
    for group in groups:
        taken[group.stem] += 1
        name = group.stem if taken[group.stem] == 1 else f"{group.stem}_{taken[group.stem]}"
        for origin in group.origins:
            became[origin.number] = (*became.get(origin.number, ()), name)
        expect = None if group.expect is None else syntax.Expect("==", syntax.Literal("int", group.expect))
        rule = rewrite_rule(name, group.root, globs_of(group.paths, universe), group.action, expect)
        declarations.append((_origin(group.origins), rule))
    before: list[tuple[str, syntax.Declaration]] = [("", _require(captured))]
    if any("." in group.root for group in groups):
        before.insert(0, ("", import_attention()))
    module = _with_comments(file, header, [*before, *declarations, ("", _plan(outcomes))])
    return Emitted(module, became)


# Rewrites ------------------------------------------------------------------------------------------------------------
def _kernels(rewritten: Sequence[Outcome]) -> list[_Group]:
    members: dict[Kernel, list[Outcome]] = defaultdict(list)
    for outcome in rewritten:
        if outcome.kernel is not None:
            members[outcome.kernel].append(outcome)
    return [
        _group(_stem(kernel), kernel.root, _action(kernel), outcomes, len(outcomes))
        for kernel, outcomes in members.items()
    ]


def _stem(kernel: Kernel) -> str:
    """`linears_torch`, `experts`, `attention`: the name of a rewrite's rule."""
    stem = _NAMES.get(kernel.target, "attention")
    return f"{stem}_{dict(kernel.settings)['kernel']}" if kernel.root == "linear" else stem


def _action(kernel: Kernel) -> syntax.Action:
    """Return the target with the settings that differ from its defaults, the first one without its name."""
    specs = SETTINGS[kernel.target]
    first = next(iter(specs))
    arguments = tuple(
        syntax.Argument(None if name == first else name, _value(value))
        for name, value in kernel.settings
        if specs[name].required or specs[name].default != value
    )
    return syntax.Action(syntax.Name(kernel.target), arguments, ())


def _value(value: str | bool) -> syntax.Expression:
    if isinstance(value, bool):
        return syntax.Literal("bool", value)
    return syntax.Literal("device", value) if ":" in value else syntax.Reference((value,))


# Placement -----------------------------------------------------------------------------------------------------------
def _prefills(rewritten: Sequence[Outcome]) -> list[_Group]:
    """Return a placement for experts on the CPU with prefill elsewhere. Their rewrite decides the device."""
    members: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in rewritten:
        if outcome.pinned and outcome.prefill != "cpu":
            members[outcome.prefill].append(outcome)
    return [
        _group("experts_prefill", "module", _place(Devices("cpu", device)), outcomes, None)
        for device, outcomes in members.items()
    ]


def _placements(outcomes: Sequence[Outcome], universe: Sequence[str]) -> list[_Group]:
    located = {o.path: o for o in outcomes if o.located and not o.pinned and o.path}
    hoisted = _Hoist(located, universe).devices
    members: dict[Devices, list[str]] = defaultdict(list)
    for path, devices in hoisted.items():
        members[devices].append(path)
    groups: list[_Group] = []
    for devices, paths in members.items():
        below = [
            o for path, o in located.items() if _devices_of(o) == devices and any(is_inside(path, top) for top in paths)
        ]
        stem = re.sub(r"\W", "_", f"on_{devices.run}")
        stem += re.sub(r"\W", "_", f"_prefill_{devices.prefill}") if devices.prefill != devices.run else ""
        group = _group(stem, "module", _place(devices), below, None)
        groups.append(replace(group, paths=tuple(paths)))
    return groups


class _Hoist:
    """`devices` has the largest subtrees whose modules agree, and modules that differ from those below them."""

    def __init__(self, located: dict[str, Outcome], universe: Sequence[str]) -> None:
        self.located = located
        self.children: dict[str, list[str]] = defaultdict(list)
        self.below: dict[str, list[Outcome]] = defaultdict(list)
        self.devices: dict[str, Devices] = {}
        for path in universe:
            self.children[path.rpartition(".")[0]].append(path)
        for path, outcome in located.items():
            for around in from_inside(path):
                self.below[around].append(outcome)
        for top in self.children[""]:
            self.visit(top, None)

    def visit(self, path: str, inherited: Devices | None) -> None:
        outcomes = self.below.get(path, [])
        wanted = {_devices_of(outcome) for outcome in outcomes}
        if not wanted or wanted == {inherited}:
            return
        if len(wanted) == 1:
            if inherited is not None or any(outcome.rule is not None for outcome in outcomes):
                self.devices[path] = wanted.pop()
            return  # otherwise no rule places it: `unplaced`
        if path in self.located:
            inherited = self.devices[path] = _devices_of(self.located[path])
        for child in self.children[path]:
            self.visit(child, inherited)


def _devices_of(outcome: Outcome) -> Devices:
    return Devices(outcome.device, outcome.prefill)


def _place(devices: Devices) -> syntax.Action:
    device = syntax.Argument(None, _value(devices.run))
    other = (syntax.Argument("prefill", _value(devices.prefill)),) if devices.prefill != devices.run else ()
    return syntax.Action(syntax.Name(targets.Place.name), (device, *other), ())


# The rest of the program ---------------------------------------------------------------------------------------------
def _group(stem: str, root: str, action: syntax.Action, outcomes: Sequence[Outcome], expect: int | None) -> _Group:
    origins = {o.rule.number: o.rule for o in outcomes if o.rule is not None}
    paths = tuple(outcome.path for outcome in outcomes)
    return _Group(stem, root, action, paths, tuple(origins[number] for number in sorted(origins)), expect)


def _require(captured: CapturedModel) -> syntax.Require:
    facts = captured.facts
    wanted = (("type", syntax.Literal("string", facts["type"])), ("layers", syntax.Literal("int", facts["layers"])))
    kind, layers = (syntax.Binary("==", syntax.Reference(("model", name)), value) for name, value in wanted)
    return syntax.Require(syntax.Binary("and", kind, layers), syntax.Text("this program names the paths of one model"))


def _plan(outcomes: Sequence[Outcome]) -> syntax.Block:
    rules = [outcome.rule for outcome in outcomes if outcome.rule is not None]
    settings = [syntax.Setting(syntax.Name("mode"), _value("train" if trains(rules) else "infer"))]
    settings.append(syntax.Setting(syntax.Name("unplaced"), _value(UNMATCHED_DEVICE)))
    threshold = max((prefill_threshold(rule) for rule in rules), default=0)
    if threshold:
        settings.append(syntax.Setting(syntax.Name("layerwise_prefill"), syntax.Literal("int", threshold)))
    return syntax.Block("plan", tuple(settings))


def prefill_threshold(rule: KtRule) -> int:
    """Return the number of tokens from which KTransformers prefills layer by layer, 0 if it never does."""
    threshold = rule.settings.get("per_layer_prefill_intput_threshold")
    return threshold if isinstance(threshold, int) else 0


def _origin(origins: Sequence[KtRule]) -> str:
    if not origins:
        return "# modules that no rule of the file matches"
    lines = ", ".join(str(rule.span.line) for rule in origins)
    numbers = ", ".join(str(rule.number) for rule in origins)
    many = "s" if len(origins) > 1 else ""
    return f"# rule{many} {numbers} of the file, line{many} {lines}"


def _with_comments(
    file: str, header: Sequence[str], declarations: Sequence[tuple[str, syntax.Declaration]]
) -> syntax.Module:
    """Add a comment before each declaration that has one. The printer orders by span."""
    placed: list[syntax.Declaration] = []
    comments = [syntax.Comment(f"# {line}", span=_at(file, number)) for number, line in enumerate(header, start=1)]
    line = len(header) + 1
    for comment, declaration in declarations:
        if comment:
            comments.append(syntax.Comment(comment, span=_at(file, line)))
        placed.append(replace(declaration, span=_at(file, line + 1)))
        line += _LINES
    return syntax.Module(file, tuple(placed), tuple(comments))


def _at(file: str, line: int) -> Span:
    return Span(file, line, 1, line, 1)

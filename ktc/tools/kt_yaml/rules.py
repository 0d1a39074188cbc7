"""Read the YAML document as checked rules of KTransformers: their matches, replacements and settings.

All faults of all rules are reported together. A key that KTransformers would ignore silently becomes a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ktc.diagnostics import Diagnostic, InputRefused, Severity, Span, listing, suggest
from ktc.foundation.timed_search import Invalid, TooMuchWork, search
from ktc.tools.kt_yaml import names
from ktc.tools.kt_yaml.document import Mapping as Map
from ktc.tools.kt_yaml.document import Node, Scalar, Sequence
from ktc.tools.kt_yaml.names import Kind

MAX_RULES = 500

Setting = str | int | bool | None | Mapping[int, str]


@dataclass(frozen=True, slots=True)
class KtRule:
    """One rule of the file, `number` counted from 1. `settings` are its kwargs, with devices as `cpu` or `cuda:0`."""

    number: int
    span: Span
    name: str | None  # a regular expression
    class_: str | None
    replacement: str
    kind: Kind
    settings: Mapping[str, Setting]
    recursive: bool

    @property
    def short(self) -> str:
        """The replacement class without its package."""
        return self.replacement.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class KtRules:
    rules: tuple[KtRule, ...]
    warnings: tuple[Diagnostic, ...]


def read_rules(root: Node, file: str, text: str) -> KtRules:
    """Read the rules of a document.

    Raises:
        InputRefused: with every fault of every rule.
    """
    reader = _Reader()
    rules = reader.rules(root)
    reader.check_expressions()
    errors = [d for d in reader.diagnostics if d.severity == "error"]
    if errors:
        raise InputRefused(*errors, sources={file: text})
    return KtRules(tuple(rules), tuple(reader.diagnostics))


class _Reader:
    def __init__(self) -> None:
        self.diagnostics: list[Diagnostic] = []
        self.expressions: list[tuple[str, Span]] = []

    def say(self, code: str, message: str, span: Span, hint: str = "", severity: Severity = "error") -> None:
        self.diagnostics.append(Diagnostic(code, message, span, hint=hint, severity=severity))

    def rules(self, root: Node) -> list[KtRule]:
        if not isinstance(root, Sequence):
            self.say("K006", f"expected a list of rules, found {_kind(root)}", root.span)
            return []
        if len(root.items) > MAX_RULES:
            self.say("K004", f"a file has at most {MAX_RULES} rules, this one has {len(root.items)}", root.span)
            return []
        read = (self.rule(number, item) for number, item in enumerate(root.items, start=1))
        return [rule for rule in read if rule]

    def rule(self, number: int, node: Node) -> KtRule | None:
        if not isinstance(node, Map):
            self.say("K006", f"expected a rule with `match` and `replace`, found {_kind(node)}", node.span)
            return None
        self.unknown(node, ("match", "replace", "recursive"), "a rule")
        match, replace = self.part(node, "match"), self.part(node, "replace")
        recursive = self.scalar(node, "recursive", bool)
        if match is None or replace is None:
            return None
        self.unknown(match, ("name", "class"), "`match`")
        self.unknown(replace, ("class", "kwargs"), "`replace`")
        expression, class_ = self.expression(match), self.class_path(match)
        if not ({"name", "class"} & match.entries.keys()):
            self.say("K006", "`match` needs `name` or `class`", match.span, "without both it would match every module")
        replacement = self.class_path(replace) or names.DEFAULT
        kind = self.replacement(replacement, replace)
        if kind is None:
            return None
        settings = self.settings(kind, replace)
        return KtRule(number, node.span, expression, class_, replacement, kind, settings, recursive is not False)

    # shape -----------------------------------------------------------------------------------------------------------
    def unknown(self, node: Map, keys: Iterable[str], where: str) -> None:
        for key in node.entries.keys() - set(keys):
            hint = suggest(key, keys) or f"KTransformers ignores it; {where} has {listing(keys)}"
            self.say("K020", f"unknown key `{key}` in {where}", node.keys[key], hint, "warning")

    def part(self, node: Map, key: str) -> Map | None:
        value = node.entries.get(key)
        if isinstance(value, Map):
            return value
        what = f"found {_kind(value)}" if value else "it is missing"
        self.say("K006", f"a rule needs a mapping `{key}`, {what}", value.span if value else node.span)
        return None

    def scalar(self, node: Map, key: str, wanted: type) -> str | int | bool | None:
        value = node.entries.get(key)
        if value is None:
            return None
        if isinstance(value, Scalar) and isinstance(value.value, wanted):
            return value.value
        spoken = {str: "a text", bool: "`true` or `false`", int: "a number"}[wanted]
        self.say("K006", f"`{key}` is {spoken}, found {_kind(value)}", value.span)
        return None

    def class_path(self, node: Map) -> str | None:
        path = self.scalar(node, "class", str)
        if isinstance(path, str) and not all(part.isidentifier() for part in path.split(".")):
            self.say("K006", "a class is a name with dots", node.entries["class"].span)
            return None
        return str(path) if path is not None else None

    def expression(self, match: Map) -> str | None:
        text = self.scalar(match, "name", str)
        if text is None:
            return None
        self.expressions.append((str(text), match.entries["name"].span))
        return str(text)

    def check_expressions(self) -> None:
        """Report the expressions that `re` refuses, together. The diagnostics are then in the order of the file."""
        texts, spans = [text for text, _ in self.expressions], [span for _, span in self.expressions]
        try:
            results = search(texts, ())
        except TooMuchWork as error:
            self.say("K009", f"this expression is too much work: {error}", spans[error.index])
            results = []
        for result, span in zip(results, spans, strict=False):
            if isinstance(result, Invalid):
                self.say(
                    "K008", f"invalid regular expression: {result.reason}", span, "the syntax is that of Python's `re`"
                )
        self.diagnostics.sort(key=lambda result: (result.span.line, result.span.column) if result.span else (0, 0))

    # meaning ---------------------------------------------------------------------------------------------------------
    def replacement(self, class_path: str, replace: Map) -> Kind | None:
        kind = names.kind_of(class_path)
        if kind is None:
            span = replace.entries["class"].span
            hint = f"KTransformers would import and run it; ktc reads the operators under `{names.PACKAGE[:-1]}`"
            self.say("K010", f"the replacement class `{class_path}` is not known", span, hint)
        return kind

    def settings(self, kind: Kind, replace: Map) -> dict[str, Setting]:
        kwargs = replace.entries.get("kwargs")
        if kwargs is None or (isinstance(kwargs, Scalar) and kwargs.value is None):
            return {}
        if not isinstance(kwargs, Map):
            self.say("K006", f"`kwargs` is a mapping, found {_kind(kwargs)}", kwargs.span)
            return {}
        settings: dict[str, Setting] = {}
        for key, value in kwargs.entries.items():
            if key not in names.SETTINGS[kind]:
                self.foreign(key, kind, kwargs.keys[key])
            else:
                settings[key] = self.setting(kind, key, value)
        return settings

    def foreign(self, key: str, kind: Kind, span: Span) -> None:
        if key in names.REFUSED_SETTINGS:
            self.say("K021", f"`{key}` is refused: {names.REFUSED_SETTINGS[key]}", span, severity="warning")
            return
        hint = suggest(key, names.SETTINGS[kind]) or "KTransformers ignores it silently"
        self.say("K020", f"the setting `{key}` is not known for this class", span, hint, "warning")

    def setting(self, kind: Kind, key: str, node: Node) -> Setting:
        if key == "transfer_map":
            return self.transfers(node)
        if key.endswith("_device"):
            return self.device(node)
        value = node.value if isinstance(node, Scalar) else None
        if key.endswith("_op"):
            known = (*names.CPU_EXPERTS, *names.GPU_EXPERTS) if kind == "experts" else (*names.LINEAR_KERNELS,)
            return None if isinstance(node, Scalar) and value is None else self.one_of(key, node, known)
        if key == "backend":
            spelled = {name.casefold(): name for name in names.BACKENDS}
            if isinstance(value, str) and value.casefold() in spelled:
                return spelled[value.casefold()]
            return self.one_of(key, node, names.BACKENDS)
        wanted = bool if key == "absorb_for_prefill" else int
        if not isinstance(value, wanted) or (wanted is int and int(value) < 0):
            self.say("K013", f"`{key}` is {'true or false' if wanted is bool else 'a count'}", node.span)
        return value

    def one_of(self, key: str, node: Node, known: Iterable[str]) -> str | None:
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, str) and value in known:
            return value
        shown = f"`{value}`" if isinstance(node, Scalar) else _kind(node)
        hint = (suggest(value, known) if isinstance(value, str) else "") or f"known: {listing(known)}"
        self.say("K011", f"unknown `{key}`: {shown}", node.span, hint)
        return None

    def device(self, node: Node) -> str | None:
        value = node.value if isinstance(node, Scalar) else None
        kind, colon, index = str(value).partition(":")
        number = index if colon else "0"
        if value == "cpu":
            return "cpu"
        if kind == "cuda" and number.isascii() and number.isdigit() and len(number) <= 3:
            return f"{kind}:{int(number)}"
        shown = f"`{value}`" if isinstance(node, Scalar) else _kind(node)
        self.say("K012", f"{shown} is not a device that ktc knows", node.span, "known: `cpu`, `cuda`, `cuda:1`")
        return None

    def transfers(self, node: Node) -> Mapping[int, str]:
        if not isinstance(node, Map):
            self.say("K013", f"`transfer_map` maps layers to devices, found {_kind(node)}", node.span)
            return {}
        devices: dict[int, str] = {}
        for key, value in node.entries.items():
            device = self.device(value)
            if not (key.isascii() and key.isdigit()):
                self.say("K013", f"invalid layer `{key}`", node.keys[key])
            elif device:
                devices[int(key)] = device
        return devices


def _kind(node: Node | None) -> str:
    match node:
        case Map():
            return "a mapping"
        case Sequence():
            return "a list"
        case Scalar(value=None) | None:
            return "nothing"
        case Scalar(value=bool()):
            return "true or false"
        case Scalar(value=int()):
            return "a number"
        case Scalar():
            return f"the text `{str(node.value)[:40]}`"

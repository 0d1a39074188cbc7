"""The term matcher: one pattern against one block's graph, backwards from a root, with backtracking.

Layout operators and casts are transparent. A name is bound once and compared wherever it is used again. An argument
that the pattern does not mention must have its default, and reductions must be over the last dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from torch import fx

from ktc.diagnostics import Span
from ktc.language.dsl import syntax
from ktc.language.dsl.ruleset import PatternDefinition, RuleSet
from ktc.model.graph import ops
from ktc.stages.match.state import EMPTY, Several, State, Sub, Value, freeze, look, settle, sources_of, upstream_of
from ktc.stages.match.types import SubMatch

STEP_BUDGET = 20_000  # per root; a pattern that needs more is refused as ambiguous


class BudgetExceeded(Exception):
    """A pattern took more than STEP_BUDGET steps at one root."""


@dataclass(slots=True)
class Attempt:
    """The farthest point of a pattern: recorded during matching, reported without a match."""

    matched: int = -1
    node: str = ""
    actual: str = ""
    wanted: str = ""
    span: Span = syntax.NOWHERE


class TermMatcher:
    """Match the patterns of one rule set in one graph."""

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._steps = 0
        self.best = Attempt()

    def match(self, pattern: PatternDefinition, root: fx.Node) -> tuple[SubMatch, frozenset[fx.Node]] | None:
        """Return the first match of `pattern` whose first output is `root`, with its nodes. Raises BudgetExceeded."""
        self._steps = 0
        for sub in self._enter(pattern, Value(root)):
            return freeze(sub), sub.state.nodes
        return None

    # patterns --------------------------------------------------------------------------------------------------------
    def _enter(self, pattern: PatternDefinition, value: Value) -> Iterator[Sub]:
        """Yield all ways in which `value` is the first output of `pattern`."""
        first = pattern.declaration.outputs[0].text
        for state in self._use(pattern, syntax.Use((first,)), value, EMPTY):
            if not state.pending:
                yield Sub(pattern.name, state)

    def _term(self, pattern: PatternDefinition, term: syntax.Term, value: Value, state: State) -> Iterator[State]:
        self._steps += 1
        if self._steps > STEP_BUDGET:
            raise BudgetExceeded(pattern.name)
        match term:
            case syntax.Wildcard():
                yield state
            case syntax.Alternatives(choices):
                for choice in choices:
                    yield from self._term(pattern, choice, value, state)
            case syntax.Maybe(inner):
                yield from self._term(pattern, inner, value, state)
                assert isinstance(inner, syntax.Call), "the checker admits `?` after a call only"
                yield from self._term(pattern, inner.operands[0], value, state)
            case syntax.Use():
                yield from self._use(pattern, term, value, state)
            case syntax.Call():
                callee = self._pattern(pattern, term.callee)
                if callee is None:
                    yield from self._node(pattern, term, value, state)
                else:
                    yield from (outer for outer, _ in self._call(pattern, term, callee, value, state))

    def _use(self, pattern: PatternDefinition, use: syntax.Use, value: Value, state: State) -> Iterator[State]:
        name = use.parts[0]
        bound = state.names.get(name)
        binding = _binding_of(pattern.declaration, name)
        if isinstance(bound, Sub):
            member = bound.state.names.get(use.parts[1]) if len(use.parts) > 1 else _first_output(self._rules, bound)
            if member == value:
                yield state
        elif bound is not None:
            if bound == value:
                yield state
            else:
                self._miss(use, value, state, f"the value bound to `{name}`")
        elif binding is None:
            yield state.bind(name, value)
        else:
            yield from self._define(pattern, use, binding, value, state)

    def _define(
        self, pattern: PatternDefinition, use: syntax.Use, binding: syntax.Binding, value: Value, state: State
    ) -> Iterator[State]:
        name = use.parts[0]
        calls = self._pattern_calls(pattern, binding.term)
        if len(binding.names) > 1:
            position = next(i for i, n in enumerate(binding.names) if n.text == name)
            if value.node is None or value.index != position:
                return
            for inner in self._term(pattern, binding.term, Value(value.node), state):
                for i, other in enumerate(binding.names):
                    inner = inner if other.text == "_" else inner.bind(other.text, Value(value.node, i))
                yield inner
        elif calls:
            first = calls[0][1].declaration.outputs[0].text
            member = use.parts[1] if len(use.parts) > 1 else first
            if member != first:
                # Another output than the first: recorded, and compared when the first output is met.
                yield replace(state, pending={**state.pending, (name, member): value})
                return
            for call, callee in calls:
                for outer, sub in self._call(pattern, call, callee, value, state):
                    yield from settle(outer.bind(name, sub), name, sub)
        else:
            for inner in self._term(pattern, binding.term, value, state):
                yield inner.bind(name, value)

    def _pattern_calls(
        self, pattern: PatternDefinition, term: syntax.Term
    ) -> list[tuple[syntax.Call, PatternDefinition]]:
        """Return the patterns that a binding chooses from, with equal outputs; empty if a choice is not a pattern."""
        calls: list[tuple[syntax.Call, PatternDefinition]] = []
        for choice in term.choices if isinstance(term, syntax.Alternatives) else (term,):
            callee = self._pattern(pattern, choice.callee) if isinstance(choice, syntax.Call) else None
            if callee is None or (calls and _outputs(callee) != _outputs(calls[0][1])):
                return []
            assert isinstance(choice, syntax.Call)
            calls.append((choice, callee))
        return calls

    def _call(
        self, pattern: PatternDefinition, call: syntax.Call, callee: PatternDefinition, value: Value, state: State
    ) -> Iterator[tuple[State, Sub]]:
        for sub in self._enter(callee, value):
            pairs = [
                (operand, bound)
                for declared, operand in zip(callee.declaration.inputs, call.operands, strict=True)
                if isinstance(bound := sub.state.names.get(declared.text), Value)
            ]
            merged = replace(state, nodes=state.nodes | sub.state.nodes)
            for outer in self._all(pattern, pairs, merged):
                yield outer, sub

    def _pattern(self, pattern: PatternDefinition, callee: tuple[str, ...]) -> PatternDefinition | None:
        unit = self._rules.units[pattern.unit]
        if len(callee) == 1:
            return self._rules.patterns.get(unit.prefix + callee[0])
        imported = self._rules.units[unit.imports[callee[0]]]
        return self._rules.patterns.get(imported.prefix + callee[1])

    # nodes -----------------------------------------------------------------------------------------------------------
    def _node(self, pattern: PatternDefinition, call: syntax.Call, value: Value, state: State) -> Iterator[State]:
        wanted = call.callee[0]
        if wanted == "from":
            yield from self._from(pattern, call.operands[0], value, state)
            return
        if wanted == "every":
            yield from self._every(pattern, call.operands[0], value, state)
            return
        if wanted == "const":
            if value.node is None:
                yield state
            else:
                self._miss(call, value, state, "a constant")
            return
        node = value.node
        if node is None or value.index != 0 or ops.operator(node) != wanted:
            self._miss(call, value, state, f"`{wanted}`")
            return
        reason = _attribute_mismatch(node, call)
        if reason:
            self._miss(call, value, state, reason)
            return
        operands = ops.operands(node)
        if len(operands) < len(call.operands) or (wanted in ops.COMMUTATIVE and len(operands) != len(call.operands)):
            return
        passed = {node}
        looked = [look(operand, passed) for operand in operands]
        here = replace(state, nodes=state.nodes | passed)
        orders = permutations(looked) if wanted in ops.COMMUTATIVE else [tuple(looked)]
        for order in orders:
            yield from self._all(pattern, list(zip(call.operands, order, strict=False)), here)

    def _from(self, pattern: PatternDefinition, term: syntax.Term, value: Value, state: State) -> Iterator[State]:
        """Yield nothing if `term` fits several sources of `value`: choosing one would be a guess."""
        if value.node is None:
            return
        sources, passed = sources_of(value.node)
        here = replace(state, nodes=state.nodes | passed)
        fitting = [states for source in sources if (states := list(self._term(pattern, term, Value(source), here)))]
        if len(fitting) == 1:
            yield from fitting[0]

    def _every(self, pattern: PatternDefinition, term: syntax.Term, value: Value, state: State) -> Iterator[State]:
        """Bind the name `term` to every node that fits its definition among those that flow into `value`."""
        if value.node is None or not isinstance(term, syntax.Use):
            return
        name, fitting = term.parts[0], list[Value]()
        for node in upstream_of(value.node):
            if ops.operator(node) in ops.TRANSPARENT or node.op in ("placeholder", "get_attr"):
                continue
            after = next(self._term(pattern, term, Value(node), state), None)
            if after is not None:
                names = {other: bound for other, bound in after.names.items() if other != name}
                state = replace(after, names=names)
                fitting.append(Value(node))
        if fitting:
            yield state.bind(name, Several(tuple(fitting)))

    def _all(self, pattern: PatternDefinition, pairs: list[tuple[syntax.Term, Value]], state: State) -> Iterator[State]:
        if not pairs:
            yield state
            return
        (term, value), rest = pairs[0], pairs[1:]
        for inner in self._term(pattern, term, value, state):
            yield from self._all(pattern, rest, inner)

    def _miss(self, term: syntax.Term, value: Value, state: State, wanted: str) -> None:
        if len(state.nodes) <= self.best.matched:
            return
        if value.node is None:
            node, actual = "", f"the constant {value.scalar:g}"
        else:
            result = f" (result {value.index})" if value.index else ""
            node, actual = value.node.name, f"`{ops.operator(value.node)}`{result}"
        self.best = Attempt(len(state.nodes), node, actual, wanted, term.span)


def _binding_of(declaration: syntax.Pattern, name: str) -> syntax.Binding | None:
    return next((b for b in declaration.bindings if any(n.text == name for n in b.names)), None)


def _outputs(pattern: PatternDefinition) -> tuple[str, ...]:
    return tuple(output.text for output in pattern.declaration.outputs)


def _first_output(rules: RuleSet, sub: Sub) -> Value | Several | Sub | None:
    return sub.state.names.get(rules.patterns[sub.pattern].declaration.outputs[0].text)


def _attribute_mismatch(node: fx.Node, call: syntax.Call) -> str:
    """Return why the attributes of `node` do not fit, "" if they do."""
    named = {a.name: _constant(a.value) for a in call.attributes}
    actual = ops.attributes(node)
    for name, wanted in named.items():
        fits = ops.works_along(node, wanted) if name == "dim" else actual.get(str(name)) == wanted
        if not fits:
            return f"`{name} = {wanted}`"
    for name, plain in ops.PLAIN.get(ops.operator(node), {}).items():
        if ops.argument(node, name, plain) != plain:
            return f"`{ops.operator(node)}` with `{name} = {plain}`"
    if ops.operator(node) in ops.LAST_DIM and "dim" not in named and not ops.works_along(node, -1):
        return f"`{ops.operator(node)}` over the last dimension"
    return ""


def _constant(value: syntax.Expression) -> object:
    """Return the required attribute value: a literal, or the text of an enum constant."""
    match value:
        case syntax.Literal():
            return value.value
        case syntax.Unary(operand=syntax.Literal(value=int() | float() as positive)):
            return -positive
        case syntax.Reference():
            return ".".join(value.parts)
        case _:
            return ""

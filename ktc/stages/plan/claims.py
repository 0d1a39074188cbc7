"""Claims of rules on facets of nodes. The only place where conflicts between rules are resolved.

A node has four facets (kernel, adapter, quant, place), and each has at most one claim. If two rules claim it, one must
override the other: the loser's action is dropped for that match, and its other actions remain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from ktc.diagnostics import Diagnostic, InputRefused, Related
from ktc.language.dsl.ruleset import RuleAction, RuleDefinition, RuleSet
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_by_name
from ktc.model.targets.node_plan import Claim
from ktc.stages.capture import CapturedModel
from ktc.stages.match import Binding, Match, Matches, NodeRef, NodeSet, SubMatch
from ktc.stages.plan.draft import PlanDraft

Slot = tuple[str, str, str]  # facet, site or module path, node


def claim_nodes(draft: PlanDraft) -> PlanDraft:
    """Claim what the rules' matches name. Raise InputRefused with every unresolved conflict."""
    return replace(draft, claims=resolve_claims(draft.captured, draft.request.matches, draft.rules))


def resolve_claims(captured: CapturedModel, matches: Matches, rules: RuleSet) -> tuple[Claim, ...]:
    """Return the remaining claims. Raise InputRefused with every unresolved conflict."""
    by_rule = {rule.name: rule for rule in rules.rules}
    groups = [group for match in matches.matches for group in _claims_of(captured, match, by_rule[match.rule])]
    holders: dict[Slot, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        for claim in group:
            holders[claim.facet, claim.site or claim.path, claim.node].append(number)
    losers, conflicts = set[int](), dict[tuple[str, str, str], list[Slot]]()
    for slot, numbers in holders.items():
        for first in numbers:
            for second in numbers:
                a, b = groups[first][0], groups[second][0]
                if first == second or a.rule == b.rule:
                    continue
                if a.rule in by_rule[b.rule].overrides:
                    losers.add(first)
                elif first < second and b.rule not in by_rule[a.rule].overrides:
                    conflicts.setdefault((a.rule, b.rule, slot[0]), []).append(slot)
    kept = (claim for number, group in enumerate(groups) if number not in losers for claim in group)
    # Two matches of one rule may share a node; the node is rewritten once.
    standing = tuple({(c.facet, c.site or c.path, c.node, c.target.name): c for c in kept}.values())
    problems = [
        *_conflict_diagnostics(conflicts, by_rule),
        *_adapters_on_absorbed(standing),
        *_escaping(captured, matches, by_rule),
    ]
    if problems:
        raise InputRefused(*problems)
    return standing


def _claims_of(captured: CapturedModel, match: Match, rule: RuleDefinition) -> Iterable[list[Claim]]:
    """Yield one non-empty list of claims per action of the rule."""
    for action in rule.actions:
        done = (rule.name, action.target, action.span)
        claims = [Claim(path, node, *done, match.site, match.block) for path, node in _claimed(captured, match, action)]
        if claims:
            yield claims


def _claimed(captured: CapturedModel, match: Match, action: RuleAction) -> list[tuple[str, str]]:
    """(absolute path, node name) of everything the action claims."""
    if not match.block:
        return [(match.path, "")]
    graph = captured.block(match.block).graph
    assert graph is not None
    nodes = nodes_by_name(graph)
    if action.on:
        bindings = [b for path in action.on if (b := match.capture(path)) is not None]
    else:
        absorbed = action.target.consumes or action.target.default_captures
        bindings = [match.bindings[name] for name in absorbed if name in match.bindings]
        bindings = bindings or [NodeRef(n) for n in match.nodes if ops.operator(nodes[n]) in absorbed]
    names = list(dict.fromkeys(name for binding in bindings for name in _roots(binding)))
    if not names and action.facet == "place":
        return [(match.path, "")]
    claimed = action.target.claimed_of([nodes[name] for name in names or match.nodes], whole=not names)
    return [(f"{match.site}.{action.target.module_of(node)}".rstrip("."), node.name) for node in claimed]


def _roots(binding: Binding) -> list[str]:
    """Return the node of a capture; for a sub-pattern, every node it bound."""
    if isinstance(binding, NodeRef):
        return [binding.node]
    if isinstance(binding, NodeSet):
        return list(binding.nodes)
    if isinstance(binding, SubMatch):
        return [name for inner in binding.bindings.values() for name in _roots(inner)]
    return []


def _conflict_diagnostics(
    conflicts: dict[tuple[str, str, str], list[Slot]], by_rule: dict[str, RuleDefinition]
) -> Iterable[Diagnostic]:
    for (first, second, facet), slots in conflicts.items():
        where = f"{slots[0][1]}" + (f" (`{slots[0][2]}`)" if slots[0][2] else "")
        nodes = f"{len(slots)} node{'s' * (len(slots) != 1)}"
        a, b = by_rule[first].declaration, by_rule[second].declaration
        yield Diagnostic(
            "M061",
            f"rules `{first}` and `{second}` both claim facet `{facet}` of {nodes}, e.g. {where}",
            b.name.span,
            hint=f"narrow one of them, or write `rule {second} overrides {first}`",
            related=(Related(a.name.span, "also claimed here"),),
        )


def _adapters_on_absorbed(claims: tuple[Claim, ...]) -> Iterable[Diagnostic]:
    absorbed = {(c.site, c.node): c for c in claims if c.node and c.target.consumes}
    for claim in claims:
        other = absorbed.get((claim.site, claim.node))
        if claim.facet == "adapter" and other is not None and claim.target.name not in other.target.fuses:
            yield Diagnostic(
                "E042",
                f"`{claim.target.name}` on `{claim.path}`, but `{other.target.name}` absorbs it",
                claim.span,
                hint="leave it out of the rule",
                related=(Related(other.span, "absorbed here"),),
            )


def _escaping(captured: CapturedModel, matches: Matches, by_rule: dict[str, RuleDefinition]) -> Iterable[Diagnostic]:
    """Nodes that a rewrite would make disappear while something outside the match still uses them (M062).

    Of the nodes that a target absorbs the last one is replaced and keeps its users; the others vanish, and with them
    what the match holds between them and the last.
    """
    reported: set[tuple[str, str]] = set()
    for match in matches.matches:
        graph = captured.block(match.block).graph if match.block else None
        for action in by_rule[match.rule].actions:
            consumed = action.target.consumes
            if action.on or len(consumed) < 2 or graph is None:
                continue
            nodes = nodes_by_name(graph)
            captures = {n: b.node for n in consumed if isinstance(b := match.bindings.get(n), NodeRef)}
            *vanishing, last = sorted(captures, key=lambda name: list(nodes).index(captures[name]))
            for name in vanishing:
                outside = _used_outside(nodes[captures[name]], match.nodes, captures[last])
                if outside and (match.rule, name) not in reported:
                    reported.add((match.rule, name))
                    message = (
                        f"`{action.target.name}` would absorb `{name}` at {match.path}, which `{outside}` also uses"
                    )
                    yield Diagnostic("M062", message, action.span, hint="narrow the rule")


def _used_outside(node: fx.Node, matched: tuple[str, ...], last: str) -> str:
    """Return a node outside the match that uses `node`, or a value of the match before `last`; "" without one."""
    for user in node.users:
        layout = ops.operator(user) in ops.TRANSPARENT or ops.operator(user) == "getitem"
        if not layout and user.name not in matched:
            return user.name
        if user.name != last and (user_name := _used_outside(user, matched, last)):
            return user_name
    return ""

"""Rules -> matches: candidates of each rule's root, filtered by its paths and condition; then its expected count.

Every distinct block is matched once; a match applies to every site of its block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from ktc.diagnostics import InputRefused
from ktc.foundation.host import Host
from ktc.language.dsl import globs
from ktc.language.dsl.evaluate import evaluate
from ktc.language.dsl.ruleset import RuleDefinition, RuleSet
from ktc.model.graph import ops
from ktc.model.graph.fold import tensor_inputs
from ktc.model.graph.typed import nodes_of
from ktc.model.targets.settings import Value
from ktc.stages.capture import BlockGraph, CapturedModel, ModuleInfo
from ktc.stages.match.expectations import Counts, may_match_nothing, unmet_expectation, unmet_requirements
from ktc.stages.match.facts import Facts, common_path
from ktc.stages.match.term import Attempt, BudgetExceeded, TermMatcher
from ktc.stages.match.types import Match, Matches, NearMiss, NodeRef, SubMatch

DEFAULT_TOKENS = 512
NEAR = 4  # minimum of matched nodes in a reported near miss; fewer agree by accident
# Nodes that compute nothing on data: excluded from a match's coverage.
_STRUCTURE = frozenset({"input", "weight", "output", "getitem", "sym_size", "sym_numel"}) | ops.TRANSPARENT
_LEAF_CLASSES = {"linear": "Linear", "embedding": "Embedding"}


def match(captured: CapturedModel, rules: RuleSet, host: Host) -> Matches:
    """Find the matches of every rule. Raises InputRefused with all unmet `require` and `expect` of the program."""
    tokens = rules.plan.get("tokens")
    facts = Facts(captured, host, tokens if isinstance(tokens, int) else DEFAULT_TOKENS)
    matches, misses, problems = list[Match](), list[NearMiss](), unmet_requirements(rules, facts)
    if problems:
        raise InputRefused(*problems)
    for rule in rules.rules:
        candidates, nearest = _candidates(rule, rules, captured)
        by_path = [m for m in candidates if _path_selected(rule, m.path)]
        selected = [m for m in by_path if _condition(rule, rules, facts, m)]
        misses += nearest if not selected else []
        matches += selected
        counts = Counts(len(candidates), len(by_path), len(selected))
        problem = unmet_expectation(rule, rules, facts, counts, nearest, [m.path for m in candidates])
        problems += [] if problem is None else [problem]
    if problems:
        raise InputRefused(*problems)
    optional = frozenset(rule.name for rule in rules.rules if may_match_nothing(rule, rules, facts))
    return Matches(tuple(matches), tuple(misses), rules.warnings, optional)


# candidates ----------------------------------------------------------------------------------------------------------
def _candidates(rule: RuleDefinition, rules: RuleSet, captured: CapturedModel) -> tuple[list[Match], list[NearMiss]]:
    if rule.root == "module":
        return [_module_match(rule, m) for m in captured.modules if m.fqn], []
    pattern = rules.patterns.get(rule.root)
    matches, misses = list[Match](), list[NearMiss]()
    for block in captured.blocks:
        if block.graph is None:
            continue
        if pattern is None:
            local = [_leaf(rule, block, n.name) for n in nodes_of(block.graph) if ops.operator(n) == rule.root]
        else:
            matcher = TermMatcher(rules)
            local = list(_pattern_matches(rule, rules, block, matcher))
            if not local and matcher.best.matched >= NEAR:
                misses.append(_near_miss(rule, block, captured, matcher.best))
        for site in captured.sites_of(block.key):
            matches += [_at_site(m, site.fqn, site.layer, captured) for m in local]
    leaf_class = _LEAF_CLASSES.get(rule.root)
    inside = _inside(captured) if leaf_class else frozenset[str]()
    text, head = captured.text, captured.ends[1]  # towers run as their own code
    of_text = [m for m in captured.modules if m.fqn.startswith(text) or m.fqn == head]
    outside = [m for m in of_text if m.class_name == leaf_class and m.fqn not in inside]
    return [*matches, *(_module_match(rule, m) for m in outside)], sorted(misses, key=lambda m: -m.matched)


def _inside(captured: CapturedModel) -> frozenset[str]:
    """Return the modules of blocks: those that a graph shows, and all modules of opaque blocks and of experts' blocks.

    A graph shows what its block's hidden states are computed from. Code for another result of the block is outside.
    """
    inside = set[str]()
    for block in captured.blocks:
        nodes = [] if block.graph is None else nodes_of(block.graph)
        shown = {str(node.meta["fqn"]) for node in nodes if node.op != "get_attr" and "fqn" in node.meta}
        whole = not nodes or block.experts is not None or any(ops.operator(node) == "experts" for node in nodes)
        for site in captured.sites_of(block.key):
            prefix = f"{site.fqn}."
            below = (m.fqn for m in captured.modules if m.fqn.startswith(prefix))
            inside |= {fqn for fqn in below if whole or fqn.removeprefix(prefix) in shown}
    return frozenset(inside)


def _module_match(rule: RuleDefinition, module: ModuleInfo) -> Match:
    return Match(rule.name, rule.root, module.fqn, _layer(module.fqn), "", "", module.class_name)


def _layer(fqn: str) -> int | None:
    return next((int(part) for part in fqn.split(".") if part.isdigit()), None)


def _leaf(rule: RuleDefinition, block: BlockGraph, node: str) -> Match:
    ref = NodeRef(node)
    return Match(rule.name, rule.root, "", None, "", block.key, "", {rule.root: ref}, (node,))


def _pattern_matches(rule: RuleDefinition, rules: RuleSet, block: BlockGraph, matcher: TermMatcher) -> Iterator[Match]:
    """Yield the matches of one block; if one's nodes strictly contain another's, only the larger."""
    assert block.graph is not None
    pattern, matched = rules.patterns[rule.root], list[tuple[SubMatch, frozenset[fx.Node]]]()
    for root in nodes_of(block.graph):
        if ops.operator(root) in ("input", "weight", "output", "getitem") or ops.operator(root) in ops.TRANSPARENT:
            continue
        try:
            result = matcher.match(pattern, root)
        except BudgetExceeded:
            continue
        if result is not None:
            matched.append(result)
    computing = {n for n in _on_data(block.graph) if ops.operator(n) not in _STRUCTURE}
    order = {n: i for i, n in enumerate(nodes_of(block.graph))}
    for sub, nodes in matched:
        if any(nodes < other for _, other in matched):
            continue
        names = tuple(n.name for n in sorted(nodes, key=order.__getitem__))
        coverage = len(nodes & computing) / max(1, len(computing))
        yield Match(rule.name, rule.root, "", None, "", block.key, "", sub.bindings, names, coverage)


def _on_data(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that the hidden states reach; patterns need not explain nodes that only prepare positions."""
    reached = {n for n in nodes_of(graph) if n.op == "placeholder" and n.name == "hidden_states"}
    for node in nodes_of(graph):
        if any(source in reached for source in tensor_inputs(node)):
            reached.add(node)
    return reached


def _at_site(in_block: Match, site: str, layer: int, captured: CapturedModel) -> Match:
    graph = captured.block(in_block.block).graph
    assert graph is not None
    fqns = [
        str(n.meta["fqn"])
        for n in nodes_of(graph)
        if n.name in in_block.nodes and n.op != "get_attr" and "fqn" in n.meta
    ]
    path = common_path(site, fqns)
    class_name = next((m.class_name for m in captured.modules if m.fqn == path), "")
    return replace(in_block, path=path, layer=layer, site=site, class_name=class_name)


def _near_miss(rule: RuleDefinition, block: BlockGraph, captured: CapturedModel, best: Attempt) -> NearMiss:
    site = captured.sites_of(block.key)[0].fqn
    return NearMiss(rule.name, rule.root, block.key, site, best.matched, best.node, best.actual, best.wanted, best.span)


# selection -----------------------------------------------------------------------------------------------------------
def _path_selected(rule: RuleDefinition, path: str) -> bool:
    wanted = not rule.at or any(globs.matches(g, path) for g in rule.at)
    return wanted and not any(globs.matches(g, path) for g in rule.except_)


def _condition(rule: RuleDefinition, rules: RuleSet, facts: Facts, candidate: Match) -> bool:
    where = rule.declaration.where
    if where is None:
        return True
    alias = rule.declaration.alias.text if rule.declaration.alias else None

    def resolve(parts: tuple[str, ...]) -> Value:
        if parts[0] != alias:
            return facts.answer(parts)
        if "has" in parts:
            at = parts.index("has")
            return candidate.capture((*parts[1:at], *parts[at + 1 :])) is not None
        binding = candidate.capture(parts[1:-1])
        if rule.root not in rules.patterns and len(parts) == 2 and candidate.block:
            binding = candidate.bindings[rule.root]
        return None if binding is None else facts.attribute(candidate, binding, parts[-1])

    return evaluate(where, rules.units[rule.unit].params, resolve) is True

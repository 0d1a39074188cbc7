"""The modules that KTransformers' replacements apply to, as ktc matches them: linears, experts, attention, by path.

A small program that only claims them runs through the same loader and matcher as any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ktc.foundation import host
from ktc.foundation.files import temporary_folder
from ktc.language import dsl
from ktc.language.dsl import syntax
from ktc.language.dsl.printer import print_module
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.graph.typed import nodes_of
from ktc.model.targets import Keep, MlaAbsorbed
from ktc.stages.capture import CapturedModel
from ktc.stages.match import Match, Matches, NodeRef, match
from ktc.tools.kt_yaml.effects import GQA, MLA, Reach

_ROOTS = ("linear", "experts", MLA, GQA)


def find_reach(captured: CapturedModel) -> Reach:
    """Find the paths of everything that a rule for KTransformers' modules could rewrite."""
    rules = tuple(_claim(f"find_{number}", root) for number, root in enumerate(_ROOTS))
    _, matches = run_program(syntax.Module("reach.ktr", (import_attention(), *rules)), captured)
    paths = {str(rule.root): frozenset(match.path for match in matches.of(rule.name.text)) for rule in rules}
    latent = (match for match in matches.matches if match.root == MLA)
    return Reach(paths, frozenset(path for match in latent for path in _absorbed(match, captured)))


def _absorbed(latent: Match, captured: CapturedModel) -> Iterator[str]:
    """Return the paths of the linears that `MlaAbsorbed` absorbs in one match."""
    graph = captured.block(latent.block).graph
    assert graph is not None, "a match of a pattern has a graph"
    nodes = {node.name: node for node in nodes_of(graph)}
    for name in MlaAbsorbed.consumes:
        binding = latent.capture((name,))
        if isinstance(binding, NodeRef) and "fqn" in nodes[binding.node].meta:
            yield f"{latent.site}.{nodes[binding.node].meta['fqn']}"


def run_program(module: syntax.Module, captured: CapturedModel) -> tuple[RuleSet, Matches]:
    """Print, load and match a module.

    Raises:
        InputRefused: as loader and matcher do.
    """
    with temporary_folder("import") as folder:
        path = folder / module.file
        path.write_text(print_module(module), encoding="utf-8")
        ruleset = dsl.load(path)
    return ruleset, match(captured, ruleset, host.detect())


def import_attention() -> syntax.Import:
    return syntax.Import(syntax.Text("std/attention.ktr"), syntax.Name("attn"), ())


def rewrite_rule(
    name: str, root: str, at: Sequence[str], action: syntax.Action, expect: syntax.Expect | None
) -> syntax.Rule:
    globs = tuple(syntax.Text(glob) for glob in at)
    matched = syntax.QualifiedName(tuple(root.split(".")))
    return syntax.Rule(syntax.Name(name), (), matched, None, globs, (), None, expect, (action,))


def _claim(name: str, root: str) -> syntax.Rule:
    keep = syntax.Action(syntax.Name(Keep.name), (syntax.Argument(None, syntax.Reference(("kernel",))),), ())
    return rewrite_rule(name, root, (), keep, syntax.Expect(">=", syntax.Literal("int", 0)))

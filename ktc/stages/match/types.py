"""The results of matching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ktc.diagnostics import Diagnostic, Span


@dataclass(frozen=True, slots=True)
class NodeRef:
    """One result of a node of a block's graph, by the node's name."""

    node: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class NodeSet:
    """All nodes that `every` found, by their names, in the order of the graph."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubMatch:
    """The bindings of an inlined pattern."""

    pattern: str
    bindings: Mapping[str, Binding]


Binding = NodeRef | NodeSet | SubMatch | int | float


@dataclass(frozen=True, slots=True)
class Match:
    """One place that a rule selected.

    `path` is the matched module. `site` and `block` identify the block whose graph holds `nodes` (empty for a match of
    modules, which has no graph). `coverage` is the share of the block's computing nodes in the match.
    """

    rule: str
    root: str
    path: str
    layer: int | None
    site: str
    block: str
    class_name: str
    bindings: Mapping[str, Binding] = field(default_factory=dict[str, Binding])
    nodes: tuple[str, ...] = ()
    coverage: float = 1.0

    def capture(self, path: tuple[str, ...]) -> Binding | None:
        """Return the binding at `path` below the match, None if an optional part is absent."""
        binding: Binding = SubMatch(self.root, self.bindings)
        for name in path:
            inner = binding.bindings.get(name) if isinstance(binding, SubMatch) else None
            if inner is None:
                return None
            binding = inner
        return binding


@dataclass(frozen=True, slots=True)
class NearMiss:
    """The best attempt of a pattern without a match in a block: where it stopped and what it expected there."""

    rule: str
    pattern: str
    block: str
    site: str
    matched: int
    node: str
    actual: str
    wanted: str
    span: Span

    def __str__(self) -> str:
        nodes = f"{self.matched} node{'s' * (self.matched != 1)} of `{self.pattern}`"
        stop = f"expected {self.wanted}, found {self.actual} ({self.span})"
        return f"{nodes} matched in {self.site}, then at `{self.node}` {stop}"


@dataclass(frozen=True, slots=True)
class Matches:
    """All matches in the order of the rules, and the near misses of rules without a match.

    `optional` has the rules that may match nothing, by name.
    """

    matches: tuple[Match, ...]
    near_misses: tuple[NearMiss, ...]
    warnings: tuple[Diagnostic, ...] = ()
    optional: frozenset[str] = frozenset()

    def of(self, rule: str) -> tuple[Match, ...]:
        return tuple(m for m in self.matches if m.rule == rule)

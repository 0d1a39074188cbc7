"""Facts for conditions: attributes of captures, and facts about model and host. An unknown fact is None."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from ktc.foundation.host import Host
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.model.targets.settings import Value
from ktc.stages.capture import CapturedModel
from ktc.stages.match.types import Binding, Match, NodeRef, NodeSet, SubMatch

_BITS = {"f64": 64, "f32": 32, "i64": 64, "fp8": 8}


@dataclass(frozen=True)
class Facts:
    """The facts of one captured model on one host. `tokens` is the number of tokens for intensities."""

    captured: CapturedModel
    host: Host
    tokens: int

    @cached_property
    def _bytes(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for module in self.captured.modules:
            size = sum(t.bytes for t in module.tensors)
            parts = module.fqn.split(".") if module.fqn else []
            for depth in range(len(parts) + 1):
                prefix = ".".join(parts[:depth])
                totals[prefix] = totals.get(prefix, 0) + size
        return totals

    @cached_property
    def _nodes(self) -> dict[tuple[str, str], fx.Node]:
        return {(b.key, n.name): n for b in self.captured.blocks if b.graph is not None for n in nodes_of(b.graph)}

    def node(self, block: str, name: str) -> fx.Node:
        """Return a node of a block's graph by the names of both."""
        return self._nodes[block, name]

    def path_of(self, match: Match, binding: Binding) -> str:
        """Return the module of a capture: the owner of a node's weight, or the common path of its nodes."""
        if isinstance(binding, NodeRef):
            fqn = str(self.node(match.block, binding.node).meta.get("fqn", ""))
            return f"{match.site}.{fqn}".rstrip(".")
        nodes = [n for n in _leaves(binding) if "fqn" in self.node(match.block, n).meta]
        return common_path(match.site, [str(self.node(match.block, n).meta["fqn"]) for n in nodes])

    def answer(self, parts: tuple[str, ...]) -> Value:
        """Return a fact for `evaluate`, or with `has` whether a set of facts contains a name."""
        fact = self.about(parts[0], parts[1])
        if len(parts) == 4 and parts[2] == "has":
            return parts[3] in fact if isinstance(fact, tuple) else None
        return fact

    def about(self, what: str, attribute: str) -> Value:
        """Return a fact such as `host.isa`, `gpu.count`, `model.layers`."""
        host, gpus = self.host, self.host.gpus
        tables: dict[str, dict[str, Value]] = {
            "host": {"isa": host.isas, "cores": host.cores, "numa": host.numa, "memory": host.memory},
            "gpu": {"count": len(gpus), "memory": min((g.memory for g in gpus), default=None)},
            "model": self.captured.facts,
        }
        return tables.get(what, {}).get(attribute)

    def attribute(self, match: Match, binding: Binding, name: str) -> Value:
        """Return an attribute of a capture (or of the match itself, given as its SubMatch)."""
        path = self.path_of(match, binding) if match.block else match.path
        match name:
            case "path":
                return path
            case "layer":
                return match.layer
            case "class":
                return next((m.class_name for m in self.captured.modules if m.fqn == path), None)
            case "bytes":
                return self._bytes.get(path)
            case "dtype":
                return self.captured.facts["dtype"]
            case "intensity":
                return self._intensity(match, binding)
            case "head":
                return path == self.captured.ends[1]
            case "tower":
                return path in self.captured.towers
            case "routes":
                return isinstance(binding, NodeRef) and routes(self.node(match.block, binding.node))
            case _ if isinstance(binding, NodeRef):
                return ops.attributes(self.node(match.block, binding.node)).get(name)
            case _:
                return self._of_role(match, binding, name) if isinstance(binding, SubMatch) else None

    def _of_role(self, match: Match, sub: SubMatch, name: str) -> Value:
        """Return an attribute of a role (`moe`, `attention`), read from the pattern's bindings."""
        nodes = [self.node(match.block, n) for n in _leaves(sub)]

        def first(op: str, attribute: str) -> Value:
            return next((ops.attributes(n).get(attribute) for n in nodes if ops.operator(n) == op), None)

        def width(capture: str, attribute: str) -> Value:
            ref = sub.bindings.get(capture)
            return ops.attributes(self.node(match.block, ref.node)).get(attribute) if isinstance(ref, NodeRef) else None

        match name:
            case "num_experts" | "hidden" | "inter" | "act":
                return first("experts", name)
            case "top_k":
                return self.top_k(match)
            case "scoring":
                return next((ops.operator(n) for n in nodes if ops.operator(n) in ("softmax", "sigmoid")), None)
            case "kv_rank":
                return width("kv_b", "in_features")
            case "heads" | "kv_heads" | "head_dim" | "v_dim":
                return self._of_core(match, sub, name)
            case "rope_dim":
                total, rank = width("kv_a", "out_features"), width("kv_b", "in_features")
                return total - rank if isinstance(total, int) and isinstance(rank, int) else None
            case "nope_dim":
                head, rope = self._of_core(match, sub, "head_dim"), self._of_role(match, sub, "rope_dim")
                return head - rope if isinstance(head, int) and isinstance(rope, int) else None
            case _:
                return None

    def top_k(self, match: Match) -> int | None:
        """Return the experts per token: the width of the indices that reach the experts."""
        for name in match.nodes:
            node = self.node(match.block, name)
            if ops.operator(node) == "experts":
                return int(ops.shape_of(node.args[1])[-1])
        return None

    def _of_core(self, match: Match, sub: SubMatch, name: str) -> int | None:
        core = sub.bindings.get("core")
        if not isinstance(core, NodeRef):
            return None
        query, key, value = (ops.shape_of(a) for a in self.node(match.block, core.node).args[:3])
        sizes = {"heads": query[1], "kv_heads": key[1], "head_dim": query[-1], "v_dim": value[-1]}
        return int(sizes[name])

    def _intensity(self, match: Match, binding: Binding) -> float | None:
        """Return the FLOPs per weight byte: two per weight and token; a routed expert sees its share of the tokens."""
        bytes_per_weight = _BITS.get(str(self.captured.facts["dtype"]), 16) / 8
        names = [binding.node] if isinstance(binding, NodeRef) else list(_leaves(binding))
        kinds = {ops.operator(self.node(match.block, n)) for n in names}
        if "experts" in kinds:
            experts, top_k = self.attribute(match, binding, "num_experts"), self.top_k(match)
            return 2 * self.tokens * top_k / experts / bytes_per_weight if isinstance(experts, int) and top_k else None
        return 2 * self.tokens / bytes_per_weight if "linear" in kinds else None


def _leaves(binding: Binding) -> list[str]:
    if isinstance(binding, NodeRef):
        return [binding.node]
    if isinstance(binding, NodeSet):
        return list(binding.nodes)
    if not isinstance(binding, SubMatch):
        return []
    return list(dict.fromkeys(leaf for inner in binding.bindings.values() for leaf in _leaves(inner)))


def routes(linear: fx.Node) -> bool:
    """Return whether the result of a linear layer chooses or weighs experts.

    Experts may run in another block than their router: then a choice of the largest scores without attention is one.
    """
    names = {ops.operator(node) for node in linear.graph.nodes}
    seen, todo = {linear}, list(linear.users)
    while todo:
        node = todo.pop()
        routing = {argument for argument in node.args[1:3] if isinstance(argument, fx.Node)}
        if ops.operator(node) == "experts" and seen & routing:
            return True
        if ops.operator(node) == "topk" and not names & {"experts", "sdpa"}:
            return True
        if node not in seen and ops.operator(node) != "experts":
            seen.add(node)
            todo += node.users
    return False


def common_path(site: str, fqns: list[str]) -> str:
    """Return the longest module path that all of `fqns` (relative to `site`) share."""
    shared: list[str] = []
    for parts in zip(*(f.split(".") for f in fqns), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join([site, *shared]) if site else ".".join(shared)

"""`place`: the device of a module and all below it. The pass puts a `transfer` on every edge between devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ktc.model.targets.settings import Device
from ktc.model.targets.target import Block, Target

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True, slots=True)
class Place(Target):
    """`device` holds the weights.

    `prefill` is the device of calls with many tokens, for experts whose weights can be sent there. `stream` is the
    device that computes a module, to which `device` sends the weights of its linear layers in every pass.
    """

    device: Device = "cpu"
    prefill: Device | None = None
    stream: Device | None = None

    name: ClassVar = "place"
    fixed_facet: ClassVar = "place"
    accepts: ClassVar = ("*",)
    changes_graphs: ClassVar = True
    one_of: ClassVar = ("device", "stream")

    @property
    def placement(self) -> Place:
        """The devices that the rule gives the module."""
        return self

    @property
    def computes_on(self) -> Device:
        """The device of the module's activations."""
        return self.stream or self.device

    @property
    def contradiction(self) -> str:
        """Return what `stream` contradicts, "" for nothing: it takes weights from the host, for calls of any size."""
        if self.stream is None:
            return ""
        if self.prefill is not None:
            return "has both `prefill` and `stream`"
        return "" if self.device == "cpu" else f"streams weights from host memory, not from {self.device}"

    @classmethod
    def apply(cls, graph: fx.GraphModule, block: Block) -> None:
        """Write `meta["device"]` into every node and insert the transfers; only tensors are transferred."""
        from ktc.model.graph.typed import nodes_of, tensor_of

        pinned = {a.fqn: block.node_devices[a.node] for a in block.actions if a.node in block.node_devices}
        for node in nodes_of(graph):
            elsewhere = node.op == "call_module" and str(node.target) in pinned
            node.meta["device"] = pinned[str(node.target)] if elsewhere else block.device
        for node in nodes_of(graph):
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            for source in node.all_input_nodes:
                if source.meta["device"] != node.meta["device"] and tensor_of(source) is not None:
                    node.replace_input_with(source, _moved(graph.graph, source, node))


def _moved(graph: fx.Graph, source: fx.Node, user: fx.Node) -> fx.Node:
    """`source` on the device of `user`; one transfer serves all users there."""
    from ktc.model.graph import ops

    device = user.meta["device"]
    for existing in source.users:
        if existing.target is ops.transfer and existing.args[1] == device:
            return existing
    with graph.inserting_after(source):
        moved = graph.call_function(ops.transfer, (source, device))
    moved.meta = {k: v for k, v in source.meta.items() if k in ("val", "shape", "dtype")}
    moved.meta |= {"op": "transfer", "device": device, "rule": user.meta.get("rule") or source.meta.get("rule", "")}
    return moved

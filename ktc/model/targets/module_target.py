"""`ModuleTarget`: a rewrite that puts a module of ktc in the place of a node, and of the stock module at its FQN.

In: a graph and the plan's actions, later the stock model and the row of `ktc.json`. Out: the graph with a call of the
module, the module for the model. Refused (`WrongModule`): a stock module that the rewrite is not for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ktc.model.targets.settings import Facet, NoConfig
from ktc.model.targets.target import Block, NodeAction, Target

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.kernels.kernel_library import Kernel

_CARRYING: Final[tuple[Facet, ...]] = ("kernel", "quant", "adapter")  # of two on a node, the earlier makes its module
ITSELF = "itself"  # in the graph of a block that is replaced as a whole, the module that replaces it


class WrongModule(ValueError):
    """The model has another module at the FQN than the one that was compiled; the message says what it has."""


@dataclass(frozen=True, slots=True)
class ModuleTarget(Target):
    """`module` is the name of the module in `ktc.json`, `config` the class of what it is built with.

    `operands` is how many operands of the node the module takes. It `replaces_code` where the code of the stock module
    does not run any more, which reads the settings of that module.
    """

    module: ClassVar[str]
    config: ClassVar[type[Any]] = NoConfig
    operands: ClassVar[int] = 1
    replaces_code: ClassVar[bool] = False
    changes_graphs: ClassVar = True

    def build_reference(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return the module that replaces `node` in the graph. It runs without a kernel: proofs need no compiler."""
        raise NotImplementedError

    def module_name(self, action: NodeAction) -> str:
        """Return the name in `ktc.json` of the module that this action puts."""
        return self.module

    def recipe(self, action: NodeAction, about: Mapping[str, Any], host: Host) -> Any:
        """Return the config of the module in the loaded model.

        `about` has the attributes of the module's call, none outside the captured blocks.
        """
        return NoConfig()

    @staticmethod
    def realise(old: nn.Module, config: Any, kernel: Kernel | None) -> nn.Module:
        """Return the module for the model, with the weights of the stock module. Without `kernel` it runs in PyTorch.

        Raises ValueError where `old` is not what was compiled.
        """
        raise NotImplementedError

    def inputs(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the values that the module is called with."""
        return node.args[: self.operands]

    def described(self, node: fx.Node) -> dict[str, Any]:
        """Return the attributes of the module's call."""
        from ktc.model.graph import ops

        return ops.attributes(node)

    def kernel_name(self, action: NodeAction) -> str:
        """Return the name of the node's kernel in pictures, "" for none."""
        return action.kernel.entry if action.kernel else ""

    @classmethod
    def apply(cls, graph: fx.GraphModule, block: Block) -> None:
        """Replace the nodes that actions of this target name."""
        from ktc.model.graph.typed import nodes_by_name

        nodes = nodes_by_name(graph)
        for action in primary_actions(block.actions):
            if type(action.target) is cls:  # a target may be a kind of another
                others = tuple(other for other in block.actions if other.node == action.node and other is not action)
                action.target.replace(graph, nodes[action.node], action, others)

    def replace(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction, others: Sequence[NodeAction]) -> None:
        """Put a call of the module in the place of `node`; the call names the rules of all actions on the node."""
        graph.set_submodule(graph_target(action), self.build_reference(graph, node, action))
        with graph.graph.inserting_before(node):
            call = graph.graph.call_module(graph_target(action), self.inputs(node))
        together = (action, *others)
        call.meta = {**node.meta, "op": self.name, "attributes": self.described(node), "fqn": action.fqn}
        call.meta |= {
            "rule": ", ".join(dict.fromkeys(action.rule for action in together)),
            "span": ", ".join(dict.fromkeys(str(action.span) for action in together)),
        }
        if kernel := self.kernel_name(action):
            call.meta["kernel"] = kernel
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)


def module_target(action: NodeAction) -> ModuleTarget:
    """Return the target of an action that puts a module."""
    assert isinstance(action.target, ModuleTarget), f"`{action.target.name}` puts no module"
    return action.target


def graph_target(action: NodeAction) -> str:
    """Return the name of the action's module in the rewritten graph, which cannot put a module at itself."""
    return action.fqn or ITSELF


def replaced(block: nn.Module, place: str) -> nn.Module:
    """Return the stock module of `block` that the module at `place` of the rewritten graph replaces."""
    return block if place == ITSELF else block.get_submodule(place)


def primary_actions(actions: Sequence[NodeAction]) -> Iterator[NodeAction]:
    """Yield one action per node, whose target makes the module: that of a kernel, a quantisation or an adapter."""
    for facet in _CARRYING:
        carried = {action.node for before in _CARRYING[: _CARRYING.index(facet)] for action in _of(actions, before)}
        yield from (action for action in _of(actions, facet) if action.node not in carried)


def _of(actions: Sequence[NodeAction], facet: Facet) -> list[NodeAction]:
    return [action for action in actions if action.target.fixed_facet == facet]

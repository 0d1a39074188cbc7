"""`Target`: a rewrite of the rule language. A subclass describes the rewrite, an instance holds a rule's settings.

Nothing here imports torch, since the rule language reads these classes. A pass imports torch inside its method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Protocol

from ktc.diagnostics import Span
from ktc.model.targets.settings import Facet, Value

if TYPE_CHECKING:
    from torch import fx

    from ktc.foundation.host import Host


@dataclass(frozen=True, slots=True)
class Target:
    """The fields of a subclass are its settings: a field without a default must be given, the first may be positional.

    `fills` is the facet of a node that it takes, None where its setting `facet` names it. `accepts` lists roles and
    kinds (`*` any), `absorbs` the captures that stop being nodes of their own, `pins` the captures that it forces onto
    a device. `hosts` are the targets that it carries out itself on what it absorbs, `inside` the captures that it
    claims where a rule names none. `changes_graphs` says that it has a pass. Of the settings in `one_of`, a rule gives
    at least one.

    `available` is false for a target that is designed and not built: programs with it are checked and planned like any
    other, and `compile` refuses it by name. `built` has the values that this version carries out, for settings of which
    it does not carry out all. `without_backward` are the kernels of its settings that cannot be trained through.
    """

    name: ClassVar[str]
    fills: ClassVar[Facet | None]
    accepts: ClassVar[tuple[str, ...]]
    absorbs: ClassVar[tuple[str, ...]] = ()
    pins: ClassVar[Mapping[str, str]] = {}
    hosts: ClassVar[tuple[str, ...]] = ()
    inside: ClassVar[tuple[str, ...]] = ()
    available: ClassVar[bool] = False
    changes_graphs: ClassVar[bool] = False
    one_of: ClassVar[tuple[str, ...]] = ()
    built: ClassVar[Mapping[str, tuple[Value, ...]]] = {}
    without_backward: ClassVar[frozenset[str]] = frozenset()

    @property
    def settings(self) -> dict[str, Value]:
        """Every setting with its value, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def claimed_facet(self) -> Facet:
        """The facet of a node that it takes."""
        assert self.fills is not None, f"`{self.name}` says by a setting what it takes"
        return self.fills

    @property
    def untrainable(self) -> str:
        """The kernel without a backward pass that a setting names, "" for none."""
        return next((str(value) for value in self.settings.values() if value in self.without_backward), "")

    @property
    def as_proven(self) -> Target:
        """The target whose module proofs compare with stock code."""
        return self

    @property
    def pinned(self) -> str | None:
        """The fixed device of its node; None where the node is on the device of its block."""
        return next(iter(self.pins.values()), None)

    @property
    def takes_experts(self) -> bool:
        """Whether its node computes the routed experts of a layer."""
        return "experts" in self.absorbs

    def num_threads(self, host: Host) -> int:
        """Return the number of threads of its kernel on `host`."""
        return 1

    @classmethod
    def apply(cls, graph: fx.GraphModule, block: Block) -> None:
        """Run the target's pass over a copy of a block's graph."""


class Spec(Protocol):
    """A kernel that the plan chose for a target."""

    @property
    def entry(self) -> str:
        """The name under which the kernel library exposes it."""
        ...

    @property
    def isa(self) -> str:
        """The instruction set that it is built for."""
        ...


@dataclass(frozen=True, slots=True)
class Prefill:
    """The devices of calls with at least `tokens` tokens, each with a share of the experts.

    Weights pass through `buffer` bytes on each device; those of a layer that is `resident` stay there.
    """

    devices: tuple[str, ...]
    tokens: int
    buffer: int
    resident: bool = False


@dataclass(frozen=True, slots=True)
class NodeWeights:
    """The treatment of a node's weights: `grid` as `Int4Grid` writes it, `masters` the dtype of trained ones, or "".

    `merged`: an adapter is added to them before they are rounded.
    """

    grid: str = ""
    masters: str = ""
    merged: bool = False

    @property
    def arguments(self) -> dict[str, int | str]:
        """The words of a recipe."""
        return {"grid": self.grid, "masters": self.masters, "merged": "merged" if self.merged else ""}


AS_STORED = NodeWeights()


@dataclass(frozen=True, slots=True)
class NodeAction:
    """One rewrite of one node of a block's graph. `fqn` is the module it becomes, relative to the block.

    `fqn` is empty where the block is that module: experts beside their router, called by the layer itself. A node with
    a kernel and an adapter has two. `kernel` is what the plan chose, None where PyTorch runs it.
    """

    node: str
    fqn: str
    target: Target
    rule: str
    span: Span
    kernel: Spec | None = None
    prefill: Prefill | None = None
    weights: NodeWeights = AS_STORED

    def at(self, site: str) -> str:
        """Return the FQN of the module in the model, for the block at `site`."""
        return f"{site}.{self.fqn}".rstrip(".")


class Block(Protocol):
    """A block as a pass receives it: its actions, its device, and by name the nodes on other devices."""

    @property
    def actions(self) -> tuple[NodeAction, ...]: ...
    @property
    def device(self) -> str: ...
    @property
    def node_devices(self) -> Mapping[str, str]: ...

"""`Target`: a rewrite of the rule language. A subclass describes the rewrite, an instance holds a rule's settings.

Nothing here imports torch, since the rule language reads these classes. A pass imports torch inside its method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from ktc.diagnostics import Span
from ktc.model.targets.settings import Facet, Value

if TYPE_CHECKING:
    from torch import fx

    from ktc.foundation.host import Host
    from ktc.model.kernels.spec import Spec
    from ktc.model.kernels.working_memory import ProductRows, Slots
    from ktc.model.linears.coded_weight import DecodedCopy
    from ktc.model.targets.node_plan import CapturedNode, NodePlan
    from ktc.model.targets.place import Place
    from ktc.model.targets.quantisation import Quantisation


@dataclass(frozen=True, slots=True)
class Target:
    """The fields of a subclass are its settings: a field without a default must be given, the first may be positional.

    `fixed_facet` is the facet of a node that it takes, None where its setting `facet` names it. `accepts` lists roles
    and kinds (`*` any). `consumes` lists the captures that stop being nodes of their own, `required_devices` those that
    it forces onto a device. `fuses` are the targets that it carries out itself on what it consumes. `default_captures`
    are the captures that it claims where a rule names none. Of the settings in `one_of`, a rule gives at least one.
    `changes_graphs` is whether it has a pass.

    A target chooses its kernel, explains itself and counts its bytes: `choose`, `explain`, `memory`.
    """

    name: ClassVar[str]
    fixed_facet: ClassVar[Facet | None]
    accepts: ClassVar[tuple[str, ...]]
    consumes: ClassVar[tuple[str, ...]] = ()
    required_devices: ClassVar[Mapping[str, str]] = {}
    fuses: ClassVar[tuple[str, ...]] = ()
    default_captures: ClassVar[tuple[str, ...]] = ()
    changes_graphs: ClassVar[bool] = False
    one_of: ClassVar[tuple[str, ...]] = ()
    adapts: ClassVar[Literal["", "linear", "experts"]] = ""  # what takes LoRA
    keeps: ClassVar[bool] = False  # its node stays as it is
    trains_weights: ClassVar[bool] = False  # the node's own weights train
    fixed_weights: ClassVar[bool] = False  # its kernel multiplies a weight that does not change
    packs_weights: ClassVar[bool] = False  # no adapter trains on its weights
    replaces_modules: ClassVar[bool] = False  # modules outside the captured blocks too
    stays_on_gpu: ClassVar[bool] = False  # its weights stay on the GPU of the block, which computes every call
    varies_by_step: ClassVar[bool] = False  # decoding steps differ, so that none is recorded
    module: ClassVar[str] = ""  # the name in `ktc.json` of the module that it puts

    @property
    def settings(self) -> dict[str, Value]:
        """Every setting with its value, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def claimed_facet(self) -> Facet:
        """The facet of a node that it takes."""
        assert self.fixed_facet is not None, f"`{self.name}` says by a setting what it takes"
        return self.fixed_facet

    @property
    def as_proven(self) -> Target:
        """The target whose module proofs compare with stock code."""
        return self

    @property
    def required_device(self) -> str | None:
        """The fixed device of its node; None where the node is on the device of its block."""
        return next(iter(self.required_devices.values()), None)

    @property
    def takes_experts(self) -> bool:
        """Whether its node computes the routed experts of a layer."""
        return "experts" in self.consumes

    @property
    def placement(self) -> Place | None:
        """The devices that a rule gives a module; None for other targets."""
        return None

    @property
    def rounding(self) -> Quantisation | None:
        """The grid that weights are rounded to; None for other targets."""
        return None

    @property
    def int8_cache(self) -> bool:
        """Whether the cache of its attention holds int8 codes."""
        return False

    @property
    def without_codes(self) -> Target:
        """The target with keys and values in the model's dtype."""
        return self

    @property
    def leaves_gpus_to_pytorch(self) -> bool:
        """Whether the node keeps its own code on a GPU, where the target has no kernel."""
        return False

    @property
    def leaves_cpus_to_pytorch(self) -> bool:
        """Whether the node keeps its own code on the CPU, where its kernel saves little."""
        return False

    def claimed_of(self, nodes: Sequence[fx.Node], *, whole: bool) -> Sequence[fx.Node]:
        """Return the nodes that it claims: every one of a capture, or the last of a `whole` match."""
        return nodes[-1:] if whole else nodes

    def module_of(self, node: fx.Node) -> str:
        """Return the FQN, within its block, of the module that a claim on `node` is about."""
        return str(node.meta.get("fqn", ""))

    def num_threads(self, host: Host) -> int:
        """Return the number of threads of its kernel on `host`."""
        return 1

    def unsuited(self, seen: CapturedNode) -> Unsuited | None:
        """Return why the node cannot be rewritten by this target, None if it can."""
        return None

    def at_layer(self, layer: int, seen: CapturedNode, device: str) -> Target | None:
        """Return the rewrite of the node at a layer of the model on `device`, None where it keeps its own code."""
        return self

    def choose(self, plan: NodePlan, seen: CapturedNode) -> Spec | None:
        """Return the kernel of a node, None where PyTorch computes it.

        Raises InputRefused for a node without the kernel that the rule names, HostLacks for a missing instruction set.
        """
        return None

    def explain(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> tuple[str, ...]:
        """Return the node's fate: a sentence, and further ones that no rule gives. Empty if reported elsewhere."""
        return (f"is run by PyTorch, on {plan.device}",)

    def memory(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> NodeMemory:
        """Return the bytes of the node beside its weights."""
        return NodeMemory()

    def cached(self, seen: CapturedNode, per_position: int) -> int:
        """Return the bytes of a position in the layer's cache, which takes `per_position` in the stock model."""
        return per_position

    def multiplies_stored_on_gpus(self, seen: CapturedNode) -> bool:
        """Return whether a GPU multiplies the node's weight as the checkpoint stores it, where it leaves others."""
        return False

    def reads_prompts_in_blocks(self, seen: CapturedNode) -> bool:
        """Return whether prompts of its attention, which has sinks, keep no scores of all their tokens."""
        return False

    @classmethod
    def apply(cls, graph: fx.GraphModule, block: Block) -> None:
        """Run the target's pass over a copy of a block's graph."""


@dataclass(frozen=True, slots=True)
class Unsuited:
    """Why a target is impossible on a node: the code of a finding and the reason.

    In words, `instead` is what its modules do, and `remains` the code that is kept if the rule allows it.
    """

    code: str
    reason: str
    instead: str
    remains: str


@dataclass(frozen=True, slots=True)
class NodeLora:
    """The LoRA of a node: the ranks on its first and its second product (0: none), and whether it has dropout."""

    ranks: tuple[int, int]
    dropout: bool


@dataclass(frozen=True, slots=True)
class LoraBytes:
    """A LoRA on a linear node: its rank, bytes of an element of its weights, and of a dropout mask (0: no dropout)."""

    rank: int
    item: int
    mask: int


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The bytes of a node beside its weights: of routed experts, of a product with many rows, of an adapter.

    `decoded` is the copy of a packed weight on a GPU.
    """

    slots: Slots | None = None
    product: ProductRows | None = None
    decoded: DecodedCopy | None = None
    lora: LoraBytes | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """The devices of calls with at least `tokens` tokens, each with a share of the experts.

    Weights pass through `buffer` bytes on each device; those of a layer that is `resident` stay there. `kept` is the
    number of single experts of a layer that are there for decoding, on average of all layers, and `share` the part of
    the others that the device reads over the bus at first; with `fixed_split` neither changes. None: a GPU reads none.
    Calls of at least `divided` tokens (0: none) have their experts on three engines too, with `crowded` as in
    `Division`.
    """

    devices: tuple[str, ...]
    tokens: int
    buffer: int
    resident: bool = False
    kept: int | None = None
    share: float = 0.0
    fixed_split: bool = False
    divided: int = 0
    crowded: float = 1.0

    @property
    def in_decoding(self) -> str:
        """The experts that the device reads in decoding steps, as a part of a sentence; "" if the CPU reads all."""
        if self.kept is None:
            return ""
        first = "" if self.fixed_split else " at first"
        read = f"reads {self.share:.0%} of the {'others' if self.kept else 'experts'} over the bus{first}"
        return f"it keeps {self.kept} of them, and it {read}" if self.kept else f"it {read}"

    @property
    def only_device(self) -> str | None:
        """The device that computes all calls from weights that stay there, if there is one."""
        stays = self.resident and self.tokens <= 1 and len(self.devices) == 1
        return self.devices[0] if stays else None


@dataclass(frozen=True, slots=True)
class NodeWeights:
    """The treatment of a node's weights: `grid` as `Int4Grid` writes it, `masters` the dtype of trained ones, or "".

    `merged`: an adapter is added to them before they are rounded.
    """

    grid: str = ""
    masters: str = ""
    merged: bool = False


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

    @property
    def required_device(self) -> str | None:
        """The device of the node where the block's own does not count."""
        return (self.prefill and self.prefill.only_device) or self.target.required_device

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

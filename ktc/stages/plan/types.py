"""The plan: what is rewritten where, by which kernel, on which device, and why. Frozen; nothing in it is a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ktc.diagnostics import Diagnostic, Span
from ktc.foundation.host import Host
from ktc.model.kernels.spec import Spec
from ktc.model.targets.target import NodeAction
from ktc.stages.capture import BlockSite


@dataclass(frozen=True, slots=True)
class BlockRewrite:
    """A distinct rewrite: the sites of one block that receive the same actions on the same devices.

    `device` is that of the block, `node_devices` those of nodes on other devices (by name).
    """

    key: str
    block: str
    sites: tuple[BlockSite, ...]
    actions: tuple[NodeAction, ...]
    device: str
    node_devices: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class UncapturedLinear:
    """A linear layer outside the captured blocks, as the head, that a rule gives a kernel.

    The `action` has no node, and its `fqn` is that of the model.
    """

    action: NodeAction
    device: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of a module and its descendants, except for those with a placement of their own.

    `rule` is empty and `span` None for the root, which is on the device for unplaced modules.
    """

    fqn: str
    device: str
    rule: str
    span: Span | None


@dataclass(frozen=True, slots=True)
class StreamedLinear:
    """A linear layer that `device` computes from `nbytes` of weights in host memory.

    They pass through `buffer` bytes there, or through more where a layer is larger.
    """

    fqn: str
    device: str
    buffer: int
    nbytes: int
    rule: str
    span: Span


@dataclass(frozen=True, slots=True)
class HostTable:
    """A table of embeddings that stays in host memory, and whose rows `device` reads."""

    fqn: str
    device: str


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The adapter of the program: exact FQNs of modules and of experts' weights, and PEFT's own names.

    The patterns have the rank or alpha of those that differ.
    """

    targets: tuple[str, ...]
    parameters: tuple[str, ...]
    r: int
    lora_alpha: float
    lora_dropout: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    trainable: int  # parameters of lora_A and lora_B over all targets, and of `modules`
    modules: tuple[str, ...] = ()  # that train themselves


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The permanent bytes on a device, and its budget (None: unknown).

    `kinds` has the weights by their use, experts as packed; `adapter` is the LoRA's own weights, their gradients and
    the two moments of Adam, of which `expert_adapter` are those on routed experts. `streaming` is what streamed weights
    pass through, and copies of experts that stay.
    """

    device: str
    budget: int | None
    kinds: Mapping[str, int]
    adapter: int
    streaming: int = 0
    expert_adapter: int = 0

    @property
    def weights(self) -> int:
        """Bytes of all weights, without the adapter."""
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A size of input: `batch` sequences of `length` tokens, None where the user did not say."""

    batch: int | None = None
    length: int | None = None


ANY_SIZE = BatchShape()


@dataclass(frozen=True, slots=True)
class Choices:
    """Decisions that the rules leave to the planner. A rule's placement wins over `devices`, which has modules by FQN.

    Calls of routed experts with at least `least` tokens go to the devices `sent`, as do all calls of those that are
    `resident` there. `stock` are experts that PyTorch computes on the device of their layer. All are FQNs. The device
    `keeps` as many single experts of the others as it has room for, where decoding steps read them.
    """

    devices: Mapping[str, str] = field(default_factory=dict[str, str])
    sent: tuple[str, ...] = ()
    least: int = 1
    resident: frozenset[str] = frozenset()
    stock: frozenset[str] = frozenset()
    keeps: bool = False


NO_CHOICES = Choices()


@dataclass(frozen=True, slots=True)
class Workload:
    """The needs of a use of the model at `batch` sequences of `length` tokens: bytes by device and purpose.

    `shortfall` has the bytes that are missing by device, empty if it fits. `max_length` is the largest length of one
    sequence within every budget, `max_batch` the largest batch at `length`; 0 for none. `bound` names the limit of
    `max_length`.
    """

    name: str
    batch: int
    length: int
    needs: Mapping[str, Mapping[str, int]]
    shortfall: Mapping[str, int]
    max_length: int
    max_batch: int
    bound: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes by device, and the inputs that fit. Shared parameters are counted once.

    `active` are those that one token uses: all except experts that are not chosen and the table of embeddings.
    `tower_pass` says what is planned for images, "" for a model of text.
    """

    parameters: int
    active: int
    devices: tuple[DeviceMemory, ...]
    workloads: tuple[Workload, ...]
    notes: tuple[str, ...]
    tower_pass: str = ""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is as it is, for one module path or pattern of paths."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that rewrite, codegen and link carry out. `over_budget` names the devices that hold too little."""

    host: Host
    mode: str  # train | infer
    threads: int
    rewrites: tuple[BlockRewrite, ...]
    placements: tuple[Placement, ...]
    kernels: tuple[Spec, ...]
    lora: LoraPlan | None
    memory: MemoryPlan
    reasons: tuple[Reason, ...]
    warnings: tuple[Diagnostic, ...] = ()
    over_budget: tuple[Diagnostic, ...] = ()
    streams: tuple[StreamedLinear, ...] = ()
    uncaptured: tuple[UncapturedLinear, ...] = ()
    table: HostTable | None = None
    cuda_graph: bool = False  # decoding steps are captured
    processes: int = 1  # of `ktc train`, each with a GPU and this plan for one

    @property
    def native_step(self) -> bool:
        """Whether decoding steps are native programs."""
        return any(spec.op == "step" for spec in self.kernels)

    @property
    def devices(self) -> tuple[DeviceMemory, ...]:
        """Return the permanent bytes of each device."""
        return self.memory.devices

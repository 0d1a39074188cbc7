"""`PlanDraft`: the decisions so far. Each pass of the plan takes a draft and returns the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ktc.diagnostics import Diagnostic
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.checkpoint import WeightSource
from ktc.model.graph.typed import nodes_by_name
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.linear_spec import PackedLinearSpec
from ktc.model.kernels.spec import Spec
from ktc.model.targets.node_plan import CapturedNode, Claim, NodePlan
from ktc.model.targets.target import AS_STORED, NodeLora, NodeWeights
from ktc.stages.capture import CapturedModel
from ktc.stages.match import Matches
from ktc.stages.plan.types import (
    BatchShape,
    BlockRewrite,
    Choices,
    HostTable,
    LoraPlan,
    MemoryPlan,
    Placement,
    Plan,
    Reason,
    StreamedLinear,
    UncapturedLinear,
)


@dataclass(frozen=True, slots=True)
class Request:
    """The input of the plan: a captured model, the rows of its checkpoint, its matches with rules, and a host.

    `rows` has the `sources` by the module that takes them. `must_fit` is the size of input that must fit. `choices` are
    None for a program that decides everything itself.
    """

    captured: CapturedModel
    sources: tuple[WeightSource, ...]
    rows: Mapping[str, tuple[WeightSource, ...]]
    matches: Matches
    rules: RuleSet
    host: Host
    must_fit: BatchShape
    choices: Choices | None = None


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """The decisions about a request. A pass fills in fields, or replaces claims by those that are carried out.

    `left` has by site why its block keeps its own code. `treatments` has by FQN what becomes of weights that are
    rounded or train, `trained_modules` the FQNs that PEFT saves beside an adapter. `nodes` is in the order of the
    model's sites. `steps` is the kernel of native decoding steps.
    """

    request: Request
    claims: tuple[Claim, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict[str, str])
    treatments: Mapping[str, NodeWeights] = field(default_factory=dict[str, NodeWeights])
    trained_modules: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()
    nodes: tuple[NodePlan, ...] = ()
    streams: tuple[StreamedLinear, ...] = ()
    rewrites: tuple[BlockRewrite, ...] = ()
    uncaptured: tuple[UncapturedLinear, ...] = ()
    table: HostTable | None = None
    lora: LoraPlan | None = None
    memory: MemoryPlan | None = None
    cuda_graph: bool = False
    steps: Spec | None = None
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    over_budget: tuple[Diagnostic, ...] = ()
    trains: bool = field(init=False)  # whether the program trains: every node of every candidate reads it

    def __post_init__(self) -> None:
        """Decide once per draft whether the program trains."""
        adapts = self.rules.plan.get("mode") == "train" or any(claim.facet == "adapter" for claim in self.claims)
        object.__setattr__(self, "trains", adapts)

    def with_warnings(self, *warnings: Diagnostic) -> PlanDraft:
        """Return the draft with further warnings."""
        return replace(self, warnings=(*self.warnings, *warnings))

    def with_reasons(self, *reasons: Reason) -> PlanDraft:
        """Return the draft with further reasons."""
        return replace(self, reasons=(*self.reasons, *reasons))

    @property
    def captured(self) -> CapturedModel:
        """The captured model."""
        return self.request.captured

    @property
    def rules(self) -> RuleSet:
        """The rule program."""
        return self.request.rules

    @property
    def host(self) -> Host:
        """The host that is planned for."""
        return self.request.host

    @property
    def devices(self) -> dict[str, str]:
        """The device of each placed module by FQN. Other modules are on the device of their nearest ancestor."""
        return {placement.fqn: placement.device for placement in self.placements}

    @property
    def mode(self) -> str:
        """The mode of the program: `train` or `infer`."""
        mode = self.rules.plan.get("mode") or ("train" if self.lora else "infer")
        return "train" if mode == "train" else "infer"

    def treatment(self, path: str) -> NodeWeights:
        """Return what becomes of the weights of the module at `path`."""
        return self.treatments.get(path, AS_STORED)

    def captured_node(self, claim: Claim) -> CapturedNode:
        """Return what a target reads of a claim's node, or of its module outside the captured blocks."""
        captured = self.captured
        graph = captured.block(claim.block).graph if claim.block else None
        return CapturedNode(
            nodes_by_name(graph)[claim.node] if graph is not None and claim.node else None,
            captured.model.get_submodule(claim.site if claim.node else claim.path),
            captured.model.dtype,
            self.host,
            self.request.rows.get(claim.path, ()),
            (captured.stored_format, captured.stored_group),
            self.trains,
            str(captured.model.config.model_type),
        )

    def lora_of(self, plan: NodePlan) -> NodeLora | None:
        """Return the LoRA of a node, with rank 0 for a node without; None for a program without an adapter."""
        lora, path = self.lora, plan.claim.path
        if lora is None:
            return None
        dropout = lora.lora_dropout != 0
        if not plan.target.takes_experts:
            return NodeLora((lora.rank_pattern.get(path, lora.r), 0), dropout)
        ranks = {name: lora.rank_pattern.get(name, lora.r) for name in lora.parameters}
        first = max(ranks.get(f"{path}.{name}", 0) for name in ("gate_up_proj", "up_proj"))
        return NodeLora((first, ranks.get(f"{path}.down_proj", 0)), dropout)

    @property
    def experts(self) -> dict[str, FusedMoeSpec]:
        """The kernel of each module of routed experts that one runs, by FQN."""
        return {plan.claim.path: plan.spec for plan in self.nodes if isinstance(plan.spec, FusedMoeSpec)}

    @property
    def packed_linears(self) -> dict[str, PackedLinearSpec]:
        """The kernel of each linear layer whose weight stays in the blocks of its file, by FQN."""
        return {plan.claim.path: plan.spec for plan in self.nodes if isinstance(plan.spec, PackedLinearSpec)}

    def nodes_by_site(self) -> dict[str, list[NodePlan]]:
        """Return by site the nodes that a module of ktc replaces, in the order of their claims."""
        nodes: dict[str, list[NodePlan]] = {}
        for plan in self.nodes:
            if plan.claim.node and plan.target.module:
                nodes.setdefault(plan.claim.site, []).append(plan)
        return nodes

    def finished(self) -> Plan:
        """Return the plan, once every pass has run."""
        assert self.memory is not None, "a pass counts the memory"
        chosen = [plan.spec for plan in self.nodes if plan.spec is not None]
        steps = (self.steps,) if self.steps else ()
        return Plan(
            host=self.host,
            mode=self.mode,
            threads=max((claim.target.num_threads(self.host) for claim in self.claims), default=1),
            rewrites=self.rewrites,
            placements=self.placements,
            kernels=tuple(dict.fromkeys((*self.experts.values(), *chosen, *steps))),
            lora=self.lora,
            memory=self.memory,
            reasons=self.reasons,
            warnings=self.warnings,
            over_budget=self.over_budget,
            streams=self.streams,
            uncaptured=self.uncaptured,
            table=self.table,
            cuda_graph=self.cuda_graph,
        )

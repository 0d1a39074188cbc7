"""Captured model and decisions -> `MemoryPlan`: bytes per device, and the lengths and batches that fit.

Weights, adapters and caches are counted; activations follow the model of `activations` and `workloads`. The one place
that compares bytes with budgets. Nothing is refused here: what does not fit is a value, which `compile` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from ktc.diagnostics import Diagnostic
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.model.kernels.kernel_spec import KernelSpec
from ktc.model.kernels.linear_spec import PackedLinearSpec
from ktc.model.kernels.packed_size import packed_bytes, packed_linear_bytes
from ktc.stages.capture import BlockGraph, CapturedModel
from ktc.stages.plan.placement import budget_of, device_of, gib
from ktc.stages.plan.trained import NOTHING_TRAINED, TrainedWeights
from ktc.stages.plan.types import (
    ANY_SIZE,
    BlockRewrite,
    DeviceMemory,
    LoraPlan,
    MemoryPlan,
    OutsideLinear,
    Point,
    StreamedLinear,
    Workload,
)
from ktc.stages.plan.workloads import workloads

KINDS = ("attention", "experts", "mlp", "embeddings", "lm_head", "other")
_BYTES = {"bf16": 2, "fp32": 4}  # of a master
_RECURRENT = frozenset({"conv1d", "convolution", "cumsum", "softplus"})


def plan_memory(
    captured: CapturedModel,
    rewrites: Sequence[BlockRewrite],
    placements: Mapping[str, str],
    kernels: Mapping[str, KernelSpec],
    lora: LoraPlan | None,
    rules: RuleSet,
    host: Host,
    asked: Point,
    streams: Sequence[StreamedLinear] = (),
    streaming: Mapping[str, int] = MappingProxyType({}),
    outside: Sequence[OutsideLinear] = (),
    linears: Mapping[str, PackedLinearSpec] = MappingProxyType({}),
    trained: TrainedWeights = NOTHING_TRAINED,
) -> MemoryPlan:
    """Return the memory plan. `placements` maps FQNs to devices, `kernels` the FQN of experts to their kernel.

    `linears` has the kernel of each linear layer that stays in blocks. `asked` is the size of input that the user
    named. `streaming` has by device the bytes of `DeviceMemory.streaming`.
    """
    weights = _weights(captured, {**placements, **{each.fqn: "cpu" for each in streams}}, kernels, linears, trained)
    adapters = _adapters(captured, lora, placements, trained, kernels)
    devices = tuple(
        DeviceMemory(
            name, budget_of(name, rules, host), weights.get(name, {}), adapters.get(name, 0), streaming.get(name, 0)
        )
        for name in sorted({*weights, *adapters, *streaming}, key=lambda name: (name == "cpu", name))
    )
    uses, notes = workloads(captured, rewrites, placements, devices, lora, rules, host, asked, outside)
    total = sum(parameter.numel() for _, parameter in captured.model.named_parameters())
    return MemoryPlan(total, total - _idle(captured), devices, uses, notes)


def over_budget(memory: MemoryPlan, mode: str, asked: Point) -> tuple[Diagnostic, ...]:
    """Return one diagnostic per device that cannot hold the permanent bytes (M070) or the requested input (M075)."""
    found: list[Diagnostic] = []
    for held in memory.devices:
        adapter = held.adapter if mode == "train" else 0
        if held.budget is not None and held.weights + adapter + held.streaming > held.budget:
            state = f" and {gib(adapter)} for its adapter" if adapter else ""
            state += f" and {gib(held.streaming)} for streamed weights" if held.streaming else ""
            message = f"the plan puts {gib(held.weights)} of weights{state} on `{held.device}`, its budget is "
            hint = f"place less there, choose a smaller format, or set `plan {{ {held.device} = SIZE }}`"
            found.append(Diagnostic("M070", message + gib(held.budget), hint=hint))
    if not found and asked != ANY_SIZE:
        found += [problem for problem in [_asked_for_too_much(memory.workloads, mode)] if problem is not None]
    return tuple(found)


def _asked_for_too_much(uses: Sequence[Workload], mode: str) -> Diagnostic | None:
    """Of the ways to do what the program is for, the last one needs least memory."""
    use = ([use for use in uses if use.name.startswith(mode)] or [*uses])[-1]  # nothing trains without an adapter
    if not use.short:
        return None
    short = ", ".join(f"{gib(size)} on `{device}`" for device, size in use.short.items())
    message = f"{use.name} at batch {use.batch} and length {use.length} is short of {short}"
    hint = f"what fits: length {use.longest} at batch 1, batch {use.widest} at length {use.length}"
    return Diagnostic("M075", message, hint=hint)


# Weights -------------------------------------------------------------------------------------------------------------
def _weights(
    captured: CapturedModel,
    placements: Mapping[str, str],
    kernels: Mapping[str, KernelSpec],
    linears: Mapping[str, PackedLinearSpec],
    trained: TrainedWeights,
) -> dict[str, dict[str, int]]:
    """Return bytes by device and kind. A tensor that several modules share is on the device of the first."""
    kinds = _kinds(captured)
    totals: dict[str, dict[str, int]] = {}

    def add(device: str, kind: str, size: int) -> None:
        of_device = totals.setdefault(device, dict.fromkeys(KINDS, 0))
        of_device[kind] += size

    for fqn, tensor in _tensors(captured):
        owner, _, leaf = fqn.rpartition(".")
        size = tensor.numel() * tensor.element_size()
        if owner in linears and leaf == "weight":
            size = packed_linear_bytes(linears[owner], *tensor.shape)
        of_owner = trained.of(owner)
        if of_owner.masters:
            size = tensor.numel() * _BYTES[of_owner.masters]
        if owner not in kernels or of_owner.masters or of_owner.merged:  # what a kernel packs is counted as packed
            add(device_of(owner, placements), _nearest(owner, kinds), size)
    for spec in kernels.values():
        add("cpu", "experts", packed_bytes(spec))
    return {device: {kind: size for kind, size in held.items() if size} for device, held in totals.items()}


def _tensors(captured: CapturedModel) -> Iterator[tuple[str, Tensor]]:
    yield from captured.model.named_parameters()
    yield from captured.model.named_buffers()


def _kinds(captured: CapturedModel) -> dict[str, str]:
    """Return the kind of the modules by FQN; a module has the kind of its nearest ancestor here."""
    kinds = {"": "other"}
    for site in captured.sites:
        block = captured.block(site.block)
        kinds[site.fqn] = _kind_of(block)
        for name in _experts_of(block):
            kinds[f"{site.fqn}.{name}".rstrip(".")] = "experts"
    table, head = captured.ends
    return {**kinds, **({head: "lm_head"} if head else {}), **({table: "embeddings"} if table else {})}


def _kind_of(block: BlockGraph) -> str:
    """Attention has a core; a dense or shared MLP is what has neither that nor a memory of its own."""
    if block.graph is None:
        return "other"
    names = {ops.operator(node) for node in nodes_of(block.graph)}
    if "sdpa" in names:
        return "attention"
    return "other" if names & _RECURRENT else "mlp"


def _nearest(fqn: str, kinds: Mapping[str, str]) -> str:
    while fqn not in kinds:
        fqn = fqn.rpartition(".")[0]
    return kinds[fqn]


# Parameters ----------------------------------------------------------------------------------------------------------
def _adapters(
    captured: CapturedModel,
    lora: LoraPlan | None,
    placements: Mapping[str, str],
    trained: TrainedWeights,
    kernels: Mapping[str, KernelSpec],
) -> dict[str, int]:
    """Bytes by device: PEFT keeps LoRA in fp32 at least, beside its base layer; Adam needs four of each number.

    A module that trains is copied by PEFT, with its packed weights, or with the weight that it rounds.
    """
    found: dict[str, int] = {}
    if lora is None:
        return found
    for path in lora.targets:
        rows, columns = captured.model.get_submodule(path).get_parameter("weight").shape
        device = device_of(path, placements)
        count = lora.rank_pattern.get(path, lora.r) * (rows + columns)
        found[device] = found.get(device, 0) + 4 * max(4, captured.model.dtype.itemsize) * count
    for path in lora.parameters:  # as masters on the host, where the experts' kernel reads them
        num_experts, rows, columns = captured.model.get_parameter(path).shape
        count = lora.rank_pattern.get(path, lora.r) * num_experts * (rows + columns)
        found["cpu"] = found.get("cpu", 0) + 4 * max(4, captured.model.dtype.itemsize) * count
    for path in trained.modules:
        device, masters = device_of(path, placements), _BYTES.get(trained.of(path).masters)
        for parameter in captured.model.get_submodule(path).parameters():
            kept = parameter.numel() * (captured.model.dtype.itemsize if masters and path not in kernels else 0)
            found[device] = found.get(device, 0) + 4 * (masters or parameter.element_size()) * parameter.numel() + kept
        if path in kernels:
            found["cpu"] = found.get("cpu", 0) + packed_bytes(kernels[path])
    return found


def _idle(captured: CapturedModel) -> int:
    """Parameters that one token does not meet."""
    idle = 0
    for site in captured.sites:
        block = captured.block(site.block)
        for name, share in _experts_of(block).items():
            module = captured.model.get_submodule(f"{site.fqn}.{name}".rstrip("."))
            idle += round(sum(parameter.numel() for parameter in module.parameters()) * (1 - share))
    table, head = captured.ends
    if not table or (head and _weight(captured, head) is _weight(captured, table)):
        return idle  # a tied table is the head as well
    return idle + sum(parameter.numel() for parameter in captured.model.get_submodule(table).parameters())


def _weight(captured: CapturedModel, fqn: str) -> object:
    return getattr(captured.model.get_submodule(fqn), "weight", None)


def _experts_of(block: BlockGraph) -> dict[str, float]:
    """Return the modules of routed experts in a block, relative to it, with the share that a token uses."""
    if block.graph is None:
        return {}
    found: dict[str, float] = {}
    for node in nodes_of(block.graph):
        if ops.operator(node) == "experts":
            chosen = int(ops.shape_of(node.args[1])[-1])
            found[str(node.meta["fqn"])] = chosen / int(ops.attributes(node)["num_experts"])
    return found

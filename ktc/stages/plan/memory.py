"""The decisions of a draft -> `MemoryPlan`: bytes per device, and the lengths and batches that fit.

Weights, adapters and caches are counted; activations follow the model of `activations` and `workloads`. The one place
that compares bytes with budgets. Nothing is refused here: what does not fit is a value, which `compile` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation.host import Host
from ktc.foundation.module_paths import from_inside
from ktc.language.dsl import syntax
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.experts.trained.adapter_memory import planned_on_gpu, trained_bytes
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.model.kernels.packed_size import packed_bytes, packed_linear_bytes
from ktc.stages.capture import BlockGraph, CapturedModel
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.placement import budget_of, device_of, gib
from ktc.stages.plan.streamed_bytes import sent_experts, streamed_bytes
from ktc.stages.plan.tower_passes import tower_note
from ktc.stages.plan.types import ANY_SIZE, BatchShape, DeviceMemory, MemoryPlan, Plan, Workload
from ktc.stages.plan.workloads import workloads

KINDS = ("attention", "experts", "mlp", "embeddings", "lm_head", "towers", "other")
_BYTES = {"bf16": 2, "fp32": 4}  # of a master
_RECURRENT = frozenset({"conv1d", "convolution", "cumsum", "softplus"})


def count_memory(draft: PlanDraft) -> PlanDraft:
    """Count the bytes on each device, and the inputs that fit."""
    weights, adapters, streaming = _weights(draft), _adapters(draft), streamed_bytes(draft)
    kept = {name: sum(weights.get(name, {}).values()) + streaming.get(name, 0) for name in {*weights, *streaming}}
    of_experts = {} if draft.lora is None else _expert_adapters(draft, _sums(kept, adapters))
    adapters = _sums(adapters, of_experts)
    devices = tuple(
        DeviceMemory(
            name, budget_of(name, draft.rules, draft.host), weights.get(name, {}), adapters.get(name, 0),
            streaming.get(name, 0), of_experts.get(name, 0),
        )
        for name in sorted({*weights, *adapters, *streaming}, key=lambda name: (name == "cpu", name))
    )  # fmt: skip
    uses, notes = workloads(draft, devices)
    total = sum(parameter.numel() for _, parameter in draft.captured.model.named_parameters())
    told = tower_note(draft.captured)
    notes = (*notes, told) if told else notes
    memory = MemoryPlan(total, total - _idle(draft.captured), devices, uses, notes, told)
    return replace(draft, memory=memory)


def compare_with_budgets(draft: PlanDraft) -> PlanDraft:
    """Record the devices whose budget is exceeded, and warn of budgets of GPUs that the host lacks."""
    assert draft.memory is not None, "the pass before counts the memory"
    decided = replace(draft, over_budget=over_budget(draft.memory, draft.mode, draft.request.must_fit))
    return decided.with_warnings(*_idle_budgets(draft.rules, draft.host))


def require_feasible(plan: Plan) -> None:
    """Raise HostLacks for a plan over a memory budget."""
    if plan.over_budget:
        raise HostLacks(*plan.over_budget)


def over_budget(memory: MemoryPlan, mode: str, must_fit: BatchShape) -> tuple[Diagnostic, ...]:
    """Return one diagnostic per device that cannot hold the permanent bytes (M070) or the requested input (M075)."""
    problems: list[Diagnostic] = []
    for device in memory.devices:
        adapter = device.adapter if mode == "train" else 0
        if device.budget is not None and device.weights + adapter + device.streaming > device.budget:
            state = f" and {gib(adapter)} for its adapter" if adapter else ""
            state += f" and {gib(device.streaming)} for streamed weights" if device.streaming else ""
            message = f"the plan puts {gib(device.weights)} of weights{state} on `{device.device}`, its budget is "
            hint = f"place less there, choose a smaller format, or set `plan {{ {device.device} = SIZE }}`"
            problems.append(Diagnostic("M070", message + gib(device.budget), hint=hint))
    if not problems and must_fit != ANY_SIZE:
        problems += [problem for problem in [_does_not_fit(memory.workloads, mode)] if problem is not None]
    return tuple(problems)


def _does_not_fit(uses: Sequence[Workload], mode: str) -> Diagnostic | None:
    """Return the diagnostic (M075) for the use of the program's mode that needs least memory, the last of them."""
    use = ([use for use in uses if use.name.startswith(mode)] or [*uses])[-1]  # nothing trains without an adapter
    if not use.shortfall:
        return None
    short = ", ".join(f"{gib(size)} on `{device}`" for device, size in use.shortfall.items())
    message = f"{use.name} at batch {use.batch} and length {use.length} is short of {short}"
    hint = f"what fits: length {use.max_length} at batch 1, batch {use.max_batch} at length {use.length}"
    return Diagnostic("M075", message, hint=hint)


def _idle_budgets(rules: RuleSet, host: Host) -> Iterator[Diagnostic]:
    """Yield a warning (M069) for each budget of a GPU that is not there."""
    blocks = (block for unit in rules.units for block in unit.module.declarations if isinstance(block, syntax.Block))
    spans = {setting.key.text: setting.key.span for block in blocks for setting in block.settings}
    for device in rules.plan:
        if device.startswith("cuda:") and int(device.removeprefix("cuda:")) >= len(host.gpus):
            gpus = f"{len(host.gpus)} GPU{'s' * (len(host.gpus) != 1)}"
            message = f"the budget of `{device}` has no effect: this host has {gpus}"
            hint = "leave it out, or describe the target machine with `--host FILE`"
            yield Diagnostic("M069", message, spans.get(device), hint=hint, severity="warning")


# Weights -------------------------------------------------------------------------------------------------------------
def _weights(draft: PlanDraft) -> dict[str, dict[str, int]]:
    """Return bytes by device and kind. A tensor that several modules share is on the device of the first."""
    devices = {**draft.devices, **{linear.fqn: "cpu" for linear in draft.streams}}
    devices |= {draft.table.fqn: "cpu"} if draft.table else {}
    kinds, experts, linears = _kinds(draft.captured), draft.experts, draft.packed_linears
    totals: dict[str, dict[str, int]] = {}

    def add(device: str, kind: str, size: int) -> None:
        of_device = totals.setdefault(device, dict.fromkeys(KINDS, 0))
        of_device[kind] += size

    for fqn, tensor in _tensors(draft.captured):
        owner, _, leaf = fqn.rpartition(".")
        size = tensor.numel() * tensor.element_size()
        if owner in linears and leaf == "weight":
            size = packed_linear_bytes(linears[owner], *tensor.shape)
        treatment = draft.treatment(owner)
        if treatment.masters:
            size = tensor.numel() * _BYTES[treatment.masters]
        if owner not in experts or treatment.masters or treatment.merged:  # what a kernel packs is counted as packed
            add(device_of(owner, devices), next(kinds[path] for path in from_inside(owner) if path in kinds), size)
    for spec in experts.values():
        add("cpu", "experts", packed_bytes(spec))
    return {device: {kind: size for kind, size in sizes.items() if size} for device, sizes in totals.items()}


def _tensors(captured: CapturedModel) -> Iterator[tuple[str, Tensor]]:
    yield from captured.model.named_parameters()
    yield from captured.model.named_buffers()


def _kinds(captured: CapturedModel) -> dict[str, str]:
    """Return the kind of the modules by FQN; a module has the kind of its nearest ancestor here."""
    kinds = {"": "other", **dict.fromkeys(captured.towers, "towers")}
    for site in captured.sites:
        block = captured.block(site.block)
        kinds[site.fqn] = _kind_of(block)
        for name in _experts_of(block):
            kinds[f"{site.fqn}.{name}".rstrip(".")] = "experts"
    table, head = captured.ends
    return {**kinds, **({head: "lm_head"} if head else {}), **({table: "embeddings"} if table else {})}


def _kind_of(block: BlockGraph) -> str:
    """Attention has a core, perhaps a recurrent one; a dense or shared MLP has neither that nor a memory of its own."""
    if block.graph is None:
        return "other"
    names = {ops.operator(node) for node in nodes_of(block.graph)}
    if "sdpa" in names:
        return "attention"
    if "recurrence" in names:
        return "attention"
    return "other" if names & _RECURRENT else "mlp"


# Parameters ----------------------------------------------------------------------------------------------------------
def _adapters(draft: PlanDraft) -> dict[str, int]:
    """Bytes by device: PEFT keeps LoRA in fp32 at least, beside its base layer; Adam needs four of each number.

    A module that trains is copied by PEFT, with its packed weights, or with the weight that it rounds.
    """
    nbytes: dict[str, int] = {}
    lora, model, devices, experts = draft.lora, draft.captured.model, draft.devices, draft.experts
    if lora is None:
        return nbytes

    def add(device: str, size: int) -> None:
        nbytes[device] = nbytes.get(device, 0) + size

    item = max(4, model.dtype.itemsize)
    for path in lora.targets:
        rows, columns = model.get_submodule(path).get_parameter("weight").shape
        add(device_of(path, devices), 4 * item * lora.rank_pattern.get(path, lora.r) * (rows + columns))
    for path in draft.trained_modules:
        masters = _BYTES.get(draft.treatment(path).masters)
        for parameter in model.get_submodule(path).parameters():
            kept = parameter.numel() * (model.dtype.itemsize if masters and path not in experts else 0)
            trained = 4 * (masters or parameter.element_size()) * parameter.numel()
            add(device_of(path, devices), trained + kept)
        if path in experts:
            add("cpu", packed_bytes(experts[path]))
    return nbytes


def _sums(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {*first, *second}}


def _expert_adapters(draft: PlanDraft, beside: Mapping[str, int]) -> dict[str, int]:
    """Bytes by device: on the host, where the kernel reads them, or on the GPU that experts are sent to.

    `beside` has the other permanent bytes, which have to fit with them.
    """
    lora, model, sent = draft.lora, draft.captured.model, sent_experts(draft)
    assert lora is not None, "the caller has an adapter"
    nbytes: dict[str, int] = {}
    for path in lora.parameters:
        num_experts, rows, columns = model.get_parameter(path).shape
        factors = max(4, model.dtype.itemsize) * lora.rank_pattern.get(path, lora.r) * num_experts * (rows + columns)
        prefill = next((prefill for fqn, (prefill, _) in sent.items() if path.startswith(f"{fqn}.")), None)
        device = "cpu" if prefill is None else prefill.devices[0]
        nbytes[device] = nbytes.get(device, 0) + trained_bytes(factors)
    gpus = {device: size for device, size in nbytes.items() if device != "cpu"}
    for device, size in gpus.items():
        if not planned_on_gpu(size, budget_of(device, draft.rules, draft.host), beside.get(device, 0)):
            nbytes["cpu"] = nbytes.get("cpu", 0) + nbytes.pop(device)
    return nbytes


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
    shares: dict[str, float] = {}
    for node in nodes_of(block.graph):
        if ops.operator(node) == "experts":
            chosen = int(ops.shape_of(node.args[1])[-1])
            shares[str(node.meta["fqn"])] = chosen / int(ops.attributes(node)["num_experts"])
    return shares

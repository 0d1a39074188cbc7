"""`cpu_moe`: the routed experts of a layer become one node, `FusedMoe`, which a generated kernel runs on the CPU.

LoRA on the experts and their quantisation are carried out in the same node.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from ktc.diagnostics import listing
from ktc.model.targets.fake_quant import FakeQuant
from ktc.model.targets.lora_experts import LoraExperts
from ktc.model.targets.module_target import ModuleTarget, WrongModule
from ktc.model.targets.quantize import Quantize
from ktc.model.targets.settings import EnumName, Format, Isa, PositiveInt, Threads
from ktc.model.targets.target import NodeAction, NodeLora, NodeMemory
from ktc.model.targets.train import Train

if TYPE_CHECKING:
    from torch import Tensor, fx, nn

    from ktc.foundation.host import Host
    from ktc.model.experts.layouts.stock_layout import StockTensor
    from ktc.model.experts.module import FusedMoe
    from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
    from ktc.model.kernels.kernel_library import Kernel
    from ktc.model.kernels.spec import Spec
    from ktc.model.targets.node_plan import CapturedNode, NodePlan
    from ktc.model.targets.target import Prefill


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The config of `FusedMoe`. `form` is an `ExpertsForm`, `grid` an `Int4Grid` as text, None for plain weights.

    Calls of at least `prefill_tokens` tokens run on the devices `prefill`, through `stream_buffer` bytes on each, or
    from weights that stay there (`resident`). `kept`, `bus_share`, `fixed_split`, `divided` and `crowded` are those of
    `Prefill`. `masters` is the dtype of weights that train; `merged` adds an adapter to them before they are rounded.
    """

    num_experts: PositiveInt
    hidden: PositiveInt
    intermediate: PositiveInt
    top_k: PositiveInt
    threads: PositiveInt
    form: str
    activations: Literal["keep", "recompute"]
    numa: Literal["none", "shard"]
    prefill: tuple[str, ...] = ()
    prefill_tokens: PositiveInt = 1
    stream_buffer: PositiveInt = 1
    resident: bool = False
    kept: int | None = None
    bus_share: float = 0.0
    fixed_split: bool = False
    divided: int = 0
    crowded: float = 1.0
    grid: str | None = None
    masters: str | None = None
    merged: bool = False


@dataclass(frozen=True, slots=True)
class CpuMoe(ModuleTarget):
    """`activations`: `keep` saves gate and up for backward, `recompute` recomputes them.

    `numa`: `shard` cuts the weights for the nodes of the machine, each of which multiplies its own. Such weights cannot
    be sent to a GPU, so `auto` cuts those that are not.
    """

    format: Format = "stored"
    isa: Isa = "auto"
    numa: Annotated[Literal["auto", "none", "shard"], EnumName("numa")] = "auto"
    activations: Annotated[Literal["keep", "recompute"], EnumName("activations")] = "keep"
    threads: Threads | None = None

    name: ClassVar = "cpu_moe"
    fixed_facet: ClassVar = "kernel"
    accepts: ClassVar = ("moe", "experts")
    consumes: ClassVar = ("experts",)
    required_devices: ClassVar = {"experts": "cpu"}
    fuses: ClassVar = (LoraExperts.name, Train.name, FakeQuant.name, Quantize.name)
    module: ClassVar = "fused_moe"
    replaces_code: ClassVar = True
    config: ClassVar = ExpertsConfig
    operands: ClassVar = 3

    def num_threads(self, host: Host) -> int:
        """Return the rule's number, or one thread per core that this process may use."""
        return self.threads or host.workers

    def cut(self, prefill: Prefill | None) -> Literal["none", "shard"]:
        """Return how weights with this `prefill` are cut for NUMA nodes."""
        if self.numa == "auto":
            return "shard" if prefill is None else "none"
        return self.numa

    def choose(self, plan: NodePlan, seen: CapturedNode) -> Spec:
        """Return the kernel for the experts' sizes and stored weights."""
        from ktc.model.targets.experts_kernel import choose_fused_moe

        return choose_fused_moe(plan, seen, self.format, self.isa)

    def explain(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> tuple[str, ...]:
        """Return the weights and the kernel; with LoRA in the program also what waits for backward."""
        from ktc.model.kernels.working_memory import slots_of

        spec, host, prefill = cast("FusedMoeSpec", plan.spec), seen.host, plan.prefill
        stored = f"{' and '.join(spec.formats)} weights"
        if prefill is not None and prefill.resident and prefill.tokens <= 1:
            where = f"on {listing(prefill.devices)}, where the weights stay"
            return (f"routed experts as one node {where} ({stored})",)
        better = host.isas[: host.isas.index(spec.isa)] if spec.isa in host.isas else ()
        passed_over = f"; {', '.join(better)}: no kernel in this version" if better else ""
        chosen = f"the best this host can run{passed_over}" if self.isa == "auto" else "requested"
        moved = "" if plan.device == "cpu" else f", hidden states move {plan.device} -> cpu -> {plan.device}"
        if prefill is not None:
            sent = "where the weights stay" if prefill.resident else "where the weights are sent"
            whole = ", not cut for NUMA nodes" * (host.numa > 1)
            moved += f"; from {prefill.tokens} tokens on {listing(prefill.devices)}, {sent}{whole}"
            if prefill.kept is not None:
                moved += f"; in decoding {prefill.in_decoding}"
        how = f"{stored}, {spec.isa} kernel, {chosen}"
        computed = f"routed experts as one node on cpu ({how}){moved}"
        if lora is None:
            return (computed,)
        keeps = self.activations == "keep"
        saved, instead = (slots_of(spec, keep=keep, ranks=lora.ranks).saved for keep in (keeps, not keeps))
        done, other = ("kept", "recompute") if keeps else ("computed again", "keep")
        waiting = f"{saved:,} bytes per token and layer wait for backward: gate and up are {done}"
        return computed, f"{waiting} (`activations = {other}`: {instead:,})"

    def memory(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> NodeMemory:
        """Return what a layer keeps for backward, and the workspace of its kernel."""
        from ktc.model.kernels.working_memory import slots_of

        slots = slots_of(
            cast("FusedMoeSpec", plan.spec),
            keep=self.activations == "keep",
            ranks=lora.ranks if lora else (0, 0),
            threads=self.num_threads(seen.host),
            weights_train=bool(plan.weights.masters) or plan.weights.merged,
            dropout=lora is not None and lora.dropout,
        )
        return NodeMemory(slots=slots)

    def build_reference(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return `FusedMoe` without weights and kernel: its PyTorch reference, which proofs run."""
        import torch

        from ktc.model.experts.module import FusedMoe
        from ktc.model.experts.weights import ExpertsWeights
        from ktc.model.graph import ops
        from ktc.model.kernels.form import ExpertsSizes, parse_form

        assert action.kernel is not None, "the plan chooses a kernel for all experts on the CPU"
        about, top_k = ops.attributes(node), int(ops.shape_of(node.args[1])[-1])
        sizes = ExpertsSizes(int(about["num_experts"]), int(about["hidden"]), int(about["inter"]), top_k)
        with torch.device("meta"):
            return FusedMoe(ExpertsWeights(parse_form(str(about["form"])), sizes, node.meta["val"].dtype, None))

    def recipe(self, action: NodeAction, about: Mapping[str, Any], host: Host) -> ExpertsConfig:
        """Return the config of `FusedMoe` in the loaded model."""
        kernel, weights, prefill = cast("FusedMoeSpec", action.kernel), action.weights, action.prefill
        return ExpertsConfig(
            num_experts=int(about["num_experts"]),
            hidden=int(about["hidden"]),
            intermediate=int(about["inter"]),
            top_k=int(kernel.top_k or 0),
            threads=self.num_threads(host),
            form=str(about["form"]),
            activations=self.activations,
            numa=self.cut(prefill),
            prefill=prefill.devices if prefill else (),
            prefill_tokens=max(1, prefill.tokens) if prefill else 1,
            stream_buffer=prefill.buffer if prefill else 1,
            resident=prefill is not None and prefill.resident,
            kept=prefill.kept if prefill else None,
            bus_share=prefill.share if prefill else 0.0,
            fixed_split=prefill is not None and prefill.fixed_split,
            divided=prefill.divided if prefill else 0,
            crowded=prefill.crowded if prefill else 1.0,
            grid=weights.grid or None,
            masters=weights.masters or None,
            merged=weights.merged,
        )

    @staticmethod
    def realise(old: nn.Module, config: ExpertsConfig, kernel: Kernel | None) -> nn.Module:
        """Return `FusedMoe` with the experts of `old`. On meta tensors the kernel allocates nothing."""
        import torch

        from ktc.model.experts.backends.backend import Kept, Offload
        from ktc.model.experts.called_module import CalledExperts
        from ktc.model.experts.kept.kept_division import Division
        from ktc.model.experts.layouts.packed import PackedExperts
        from ktc.model.experts.layouts.stock_layout import stock_names, stock_shape
        from ktc.model.experts.module import FusedMoe
        from ktc.model.experts.own_module import StockExperts
        from ktc.model.experts.trained.weight_training import WeightTraining
        from ktc.model.experts.weights import ExpertsWeights
        from ktc.model.kernels.form import ExpertsSizes, parse_form

        training = WeightTraining.parse(config.grid, config.masters, merged=config.merged)
        form = parse_form(config.form)
        sizes = ExpertsSizes(config.num_experts, config.hidden, config.intermediate, config.top_k)
        stacked: dict[StockTensor, Tensor] = {}
        for name in stock_names(form):
            tensor, wanted = getattr(old, name, None), stock_shape(form, name, *sizes[:3])
            if not isinstance(tensor, torch.Tensor):
                raise WrongModule(f"a `{type(old).__name__}` without `{name}`")
            if tuple(tensor.shape) != wanted:
                raise WrongModule(f"experts of other sizes: `{name}` {list(tensor.shape)} instead of {list(wanted)}")
            stacked[name] = tensor
        devices = tuple(map(torch.device, config.prefill))
        division = Division(config.divided, config.crowded) if config.divided else None
        kept = None
        if config.kept is not None:
            kept = Kept(config.kept, config.bus_share, config.fixed_split, division)
        sent = config.prefill_tokens, config.stream_buffer, config.resident, kept
        offload = Offload(devices, *sent) if devices else None
        packed = None if kernel is None else PackedExperts(kernel, config.threads, sizes, config.numa)
        weights = ExpertsWeights(form, sizes, stacked["down_proj"].dtype, packed, training)
        is_own = isinstance(old, StockExperts)
        make = functools.partial(CalledExperts, inputs=old.inputs, called=old.called) if is_own else FusedMoe
        made = make(weights, activations=config.activations, offload=offload)
        if not stacked["down_proj"].is_meta:
            _load(made, stacked)
        return made.train(old.training)


def _load(module: FusedMoe, stacked: Mapping[StockTensor, Tensor]) -> None:
    """Hand every expert's matrices to `module`, from the stock tensors of its form."""
    import torch

    from ktc.model.experts.layouts.stock_layout import canonical_parts

    with torch.no_grad():
        for name, tensor in stacked.items():
            for expert, slice_ in enumerate(tensor):
                for part, matrix in canonical_parts(module.form, name, slice_):
                    module.load_expert(expert, part, matrix)

"""`cpu_moe`: the routed experts of a layer become one node, `FusedMoe`, which a generated kernel runs on the CPU.

LoRA on the experts and their quantisation are carried out in the same node.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, cast

from ktc.model.targets.fake_quant import FakeQuant
from ktc.model.targets.lora_experts import LoraExperts
from ktc.model.targets.module_target import Arguments, ModuleTarget, WrongModule
from ktc.model.targets.quantize import Quantize
from ktc.model.targets.settings import EnumName, Format, Isa, Threads
from ktc.model.targets.target import NodeAction, Spec
from ktc.model.targets.train import Train

if TYPE_CHECKING:
    from torch import Tensor, fx, nn

    from ktc.foundation.host import Host
    from ktc.model.experts.module import FusedMoe
    from ktc.model.experts.stock_layout import StockTensor
    from ktc.model.kernels.kernel_library import Kernel


class ExpertsSpec(Spec, Protocol):
    """The fields of a kernel's spec that the recipe records."""

    @property
    def format_gate_up(self) -> str: ...
    @property
    def format_down(self) -> str: ...


@dataclass(frozen=True, slots=True)
class CpuMoe(ModuleTarget):
    """`activations` says whether backward finds gate and up as forward left them, or computes them again."""

    format: Format = "stored"
    isa: Isa = "auto"
    numa: Annotated[Literal["none", "shard", "replicate"], EnumName("numa")] = "shard"
    activations: Annotated[Literal["keep", "recompute"], EnumName("activations")] = "keep"
    threads: Threads | None = None

    name: ClassVar = "cpu_moe"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("moe", "experts")
    absorbs: ClassVar = ("experts",)
    pins: ClassVar = {"experts": "cpu"}
    hosts: ClassVar = (LoraExperts.name, Train.name, FakeQuant.name, Quantize.name)
    available: ClassVar = True
    built: ClassVar = {"numa": ("none", "shard")}  # no copies of the weights for each node
    module: ClassVar = "fused_moe"
    arguments: ClassVar = {
        **dict.fromkeys(
            ("num_experts", "hidden", "intermediate", "top_k", "threads", "prefill_tokens", "stream_buffer"), int
        ),
        **dict.fromkeys(("form", "activations", "numa", "prefill", "streamed", "grid", "masters", "merged"), str),
    }
    operands: ClassVar = 3

    def num_threads(self, host: Host) -> int:
        """Return the rule's number, or one thread per core that this process may use."""
        return self.threads or host.workers

    def put(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return `FusedMoe` without weights and kernel: its PyTorch reference, which proofs run."""
        import torch

        from ktc.model.experts.module import FusedMoe
        from ktc.model.graph import ops

        assert action.kernel is not None, "the plan chooses a kernel for all experts on the CPU"
        about, top_k = ops.attributes(node), int(ops.shape_of(node.args[1])[-1])
        sizes = (int(about["num_experts"]), int(about["hidden"]), int(about["inter"]))
        with torch.device("meta"):
            return FusedMoe(*sizes, top_k, str(about["form"]), dtype=node.meta["val"].dtype)

    def recipe(self, action: NodeAction, node: fx.Node, host: Host) -> Arguments:
        """Return the arguments of `FusedMoe` in the loaded model."""
        from ktc.model.graph import ops

        about, kernel = ops.attributes(node), cast("ExpertsSpec", action.kernel)
        return {
            "num_experts": int(about["num_experts"]),
            "hidden": int(about["hidden"]),
            "intermediate": int(about["inter"]),
            "top_k": int(ops.shape_of(node.args[1])[-1]),
            "form": str(about["form"]),
            "activations": self.activations,
            "threads": self.num_threads(host),
            "numa": self.numa,
            "prefill": ",".join(action.prefill.devices) if action.prefill else "",
            "prefill_tokens": max(1, action.prefill.tokens) if action.prefill else 1,
            "stream_buffer": action.prefill.buffer if action.prefill else 1,
            "streamed": "resident" if action.prefill and action.prefill.resident else "each pass",
            "format_gate_up": kernel.format_gate_up,
            "format_down": kernel.format_down,
            **action.weights.arguments,
        }

    @staticmethod
    def realise(old: nn.Module, arguments: Mapping[str, Any], kernel: Kernel | None) -> nn.Module:
        """Return `FusedMoe` with the experts of `old`. On meta tensors the kernel allocates nothing."""
        import torch

        from ktc.model.experts.backend import Offload
        from ktc.model.experts.called_module import CalledExperts
        from ktc.model.experts.module import FusedMoe
        from ktc.model.experts.own_module import StockExperts
        from ktc.model.experts.stock_layout import stock_names, stock_shape
        from ktc.model.experts.weight_training import WeightTraining
        from ktc.model.kernels.form import parse_form

        training = WeightTraining.parse(arguments["grid"], arguments["masters"], arguments["merged"])
        form = parse_form(arguments["form"])
        sizes = (arguments["num_experts"], arguments["hidden"], arguments["intermediate"])
        stacked: dict[StockTensor, Tensor] = {}
        for name in stock_names(form):
            tensor, wanted = getattr(old, name, None), stock_shape(form, name, *sizes)
            if not isinstance(tensor, torch.Tensor):
                raise WrongModule(f"a `{type(old).__name__}` without `{name}`")
            if tuple(tensor.shape) != wanted:
                found = f"`{name}` {list(tensor.shape)} instead of {list(wanted)}"
                raise WrongModule(f"experts of other sizes: {found}")
            stacked[name] = tensor
        devices = tuple(torch.device(name) for name in arguments["prefill"].split(",") if name)
        tokens, resident = arguments["prefill_tokens"], arguments["streamed"] == "resident"
        own = isinstance(old, StockExperts)
        make = functools.partial(CalledExperts, inputs=old.inputs, called=old.called) if own else FusedMoe
        made = make(
            *sizes,
            arguments["top_k"],
            form,
            kernel=kernel,
            threads=arguments["threads"],
            dtype=stacked["down_proj"].dtype,
            activations=arguments["activations"],
            numa=arguments["numa"],
            offload=Offload(devices, tokens, arguments["stream_buffer"], resident) if devices else None,
            training=training,
        )
        if not stacked["down_proj"].is_meta:
            _load(made, stacked)
        return made.train(old.training)


def _load(module: FusedMoe, stacked: Mapping[StockTensor, Tensor]) -> None:
    """Hand every expert's matrices to `module`, from the stock tensors of its form."""
    import torch

    from ktc.model.experts.stock_layout import canonical_parts

    with torch.no_grad():
        for name, tensor in stacked.items():
            for expert, slice_ in enumerate(tensor):
                for part, matrix in canonical_parts(module.form, name, slice_):
                    module.load_expert(expert, part, matrix)

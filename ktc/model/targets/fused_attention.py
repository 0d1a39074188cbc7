"""`fused_attention`: the core of attention is computed by the kernel that a rule names.

The attention module keeps its own code, projections, masks and cache; `ktc.model.attention.decoding` is the function
that it calls for the core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ktc.model.targets.module_target import ModuleTarget, WrongModule
from ktc.model.targets.settings import AUTO, INT8, AttentionKernel, KvFormat, PositiveInt
from ktc.model.targets.target import NodeAction, NodeLora, Unsuited

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.kernels.kernel_library import Kernel
    from ktc.model.kernels.spec import Spec
    from ktc.model.targets.node_plan import CapturedNode, NodePlan


@dataclass(frozen=True, slots=True)
class DecodingConfig:
    """The threads of the kernel of the CPU, what the cache holds, and whether kernels of a GPU compute there."""

    threads: PositiveInt
    kv: KvFormat
    split: bool


@dataclass(frozen=True, slots=True)
class FusedAttention(ModuleTarget):
    """`kernel` names the core, and `kv` what the cache holds."""

    kernel: AttentionKernel
    kv: KvFormat = "auto"

    name: ClassVar = "fused_attention"
    fixed_facet: ClassVar = "kernel"
    accepts: ClassVar = ("attention", "mla")
    consumes: ClassVar = ("core",)
    module: ClassVar = "decoding_attention"
    config: ClassVar = DecodingConfig

    @property
    def int8_cache(self) -> bool:
        """Whether keys and values are int8 codes."""
        return self.kv == INT8

    @property
    def without_codes(self) -> FusedAttention:
        """The target with keys and values in the model's dtype."""
        return replace(self, kv="auto")

    def cached(self, seen: CapturedNode, per_position: int) -> int:
        """Return the bytes of a position in the layer's cache."""
        from ktc.model.targets.attention_kernel import code_bytes

        return code_bytes(seen) if self.int8_cache else per_position

    def reads_prompts_in_blocks(self, seen: CapturedNode) -> bool:
        """Return whether its modules compute prompts with sinks in blocks of rows, as the model's own function does."""
        from ktc.model.attention.sink_prompts import computes_prompts

        return computes_prompts(seen.stock, seen.dtype)

    def unsuited(self, seen: CapturedNode) -> Unsuited | None:
        """Return why the core keeps its own code (M092): it is a function that ktc does not know."""
        from ktc.model.targets.attention_kernel import unknown_core

        return unknown_core(seen)

    def choose(self, plan: NodePlan, seen: CapturedNode) -> Spec | None:
        """Return the kernel for the model's dtype and the layer's cache. Raises InputRefused (M077)."""
        from ktc.model.targets.attention_kernel import choose_attention

        return choose_attention(plan, seen)

    def explain(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> tuple[str, ...]:
        """Return which calls are the kernel's."""
        from ktc.model.targets.attention_kernel import explained_codes

        blocks = ("prompts by fused attention, with the sinks as a further key",) * self.reads_prompts_in_blocks(seen)
        if plan.spec is None and self.kernel == AUTO and plan.device != "cpu":
            few = f"few new tokens without gradients by kernels of the GPU, all others by sdpa, on {plan.device}"
            return few, *blocks
        if plan.spec is None:
            return f"is run by PyTorch, on {plan.device}", *blocks
        codes = explained_codes(seen) if self.int8_cache else ""
        few = f"few new tokens without gradients by the {plan.spec.isa} kernel, all others by sdpa{codes}, on cpu"
        return few, *blocks

    def build_reference(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return the core with the settings of the node."""
        from ktc.model.graph.sdpa_core import SdpaCore

        scale, causal, window = cast("tuple[float, bool, int]", node.args[3:6])
        return SdpaCore(scale, causal, window, softcap=cast("float | None", node.args[8]))

    def inputs(self, node: fx.Node) -> tuple[Any, ...]:
        """Return queries, keys and values, and where the core has them sinks, a mask and a bias."""
        from ktc.model.graph import ops

        query, keys, values, *_ = node.args
        more = node.args[ops.SDPA_SINKS], node.args[ops.SDPA_MASK], node.args[9]
        while more and more[-1] is None:
            more = more[:-1]
        return query, keys, values, *more

    def recipe(self, action: NodeAction, about: Mapping[str, Any], host: Host) -> DecodingConfig:
        """Return the number of threads, which is the host's, what the cache holds, and whether GPUs have kernels."""
        return DecodingConfig(host.workers, self.kv, self.kernel == AUTO)

    @staticmethod
    def realise(old: nn.Module, config: DecodingConfig, kernel: Kernel | None) -> nn.Module:
        """Return the stock module, of a class that decodes by the kernel."""
        from ktc.model.attention.decoding import decoding
        from ktc.model.attention.int8_decode import decoder

        try:
            return decoding(old, decoder(kernel, config.threads, config.kv, split=config.split))
        except ValueError as error:
            raise WrongModule(f"a `{type(old).__name__}`: {error}") from error

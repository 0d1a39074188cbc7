"""`mla_absorbed`: latent attention works on the compressed cache, with the up-projection of keys and values folded in.

The attention module keeps its own code, projections, masks and cache; `ktc.model.attention.absorbed` answers the calls
between the cache and the output projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, cast

from ktc.model.targets.lora_linear import LoraLinear
from ktc.model.targets.module_target import ModuleTarget, WrongModule
from ktc.model.targets.settings import AUTO, INT8, AttentionKernel, KvFormat, Phase, PositiveInt
from ktc.model.targets.target import NodeAction, NodeLora, Unsuited

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.kernels.kernel_library import Kernel
    from ktc.model.kernels.spec import Spec
    from ktc.model.targets.node_plan import CapturedNode, NodePlan

_SHOWN: Final = (1_024, 16_384)  # positions for which the break-even is reported


@dataclass(frozen=True, slots=True)
class AbsorbedConfig:
    """The sizes of latent attention, the name of the up-projection, and when attention is absorbed.

    `threads` are those of the kernel of the CPU; with `split`, kernels of a GPU compute there.
    """

    heads: PositiveInt
    nope: PositiveInt
    rope: PositiveInt
    value: PositiveInt
    latent: PositiveInt
    kv_b: str
    absorb: Literal["never", "decode", "prefill", "always"]
    move_elision: bool
    kv: KvFormat
    threads: PositiveInt
    split: bool


@dataclass(frozen=True, slots=True)
class MlaAbsorbed(ModuleTarget):
    """`absorb` is the phase that runs absorbed; `move_elision` leaves out copies of what attention only reads.

    `kv` is what the cache holds.
    """

    absorb: Phase = "decode"
    move_elision: bool = True
    kernel: AttentionKernel = "sdpa"
    kv: KvFormat = "auto"

    name: ClassVar = "mla_absorbed"
    fixed_facet: ClassVar = "kernel"
    accepts: ClassVar = ("mla",)
    consumes: ClassVar = ("kv_b", "core")
    fuses: ClassVar = (LoraLinear.name,)
    module: ClassVar = "absorbed_attention"
    config: ClassVar = AbsorbedConfig

    @property
    def int8_cache(self) -> bool:
        """Whether keys and values are int8 codes."""
        return self.kv == INT8

    @property
    def without_codes(self) -> MlaAbsorbed:
        """The target with keys and values in the model's dtype."""
        return replace(self, kv="auto")

    def cached(self, seen: CapturedNode, per_position: int) -> int:
        """Return the bytes of a position in the layer's cache."""
        from ktc.model.targets.attention_kernel import code_bytes

        return code_bytes(seen) if self.int8_cache else per_position

    def unsuited(self, seen: CapturedNode) -> Unsuited | None:
        """Return why attention keeps its own code: an unknown function (M092), or a cache of other values (M081)."""
        from ktc.model.graph.latent import latent_operands
        from ktc.model.hf.latent_cache import caches_latents
        from ktc.model.targets.attention_kernel import unknown_core

        stock = type(seen.stock)
        if unknown := unknown_core(seen):
            return unknown
        reason = f"`{stock.__name__}` caches keys and values, and no latents"
        if caches_latents(stock):
            reason = latent_operands(seen.core).reason
        remedies = "keep the model's own code", "the model's own code stays"
        return Unsuited("M081", reason, *remedies) if reason else None

    def choose(self, plan: NodePlan, seen: CapturedNode) -> Spec | None:
        """Return the kernel for the model's dtype and the layer's cache. Raises InputRefused (M077)."""
        from ktc.model.targets.attention_kernel import choose_attention

        return choose_attention(plan, seen)

    def explain(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> tuple[str, ...]:
        """Return when attention is absorbed."""
        from ktc.model.targets.attention_kernel import explained_codes

        by = f"; a few new tokens without gradients by the {plan.spec.isa} kernel" if plan.spec else ""
        if not plan.spec and self.kernel == AUTO and plan.device != "cpu":
            by = "; a few new tokens without gradients by kernels of the GPU"
        codes = explained_codes(seen) if self.int8_cache else ""
        how = "scores are two products" if self.move_elision else "latents and rotary keys are concatenated"
        if self.absorb in ("never", "always"):
            when = f"{self.absorb} absorbed ({how})"
        else:
            when = self._break_even(seen, how)
        return (f"attention on the compressed cache, {when}{by}{codes}, on {plan.device}",)

    def _break_even(self, seen: CapturedNode, how: str) -> str:
        from ktc.model.attention.latent_sizes import LatentSizes
        from ktc.model.graph.latent import latent_operands

        operands = latent_operands(seen.core)
        sizes = LatentSizes(operands.heads, operands.nope, operands.rope, operands.value, operands.rank)
        limits = " and ".join(f"{sizes.break_even(length):.0f} at {length:,}" for length in _SHOWN)
        side = "fewer" if self.absorb == "decode" else "more"
        than = f"for {side} new tokens than the break-even ({limits} positions)"
        return f"absorbed ({how}) {than}, expanded for others"

    def build_reference(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return the core, with the weight of the up-projection."""
        from ktc.model.attention.core import LatentCore
        from ktc.model.graph import ops
        from ktc.model.graph.latent import latent_operands

        operands, about = latent_operands(node), ops.attributes(node)
        weight = graph.get_parameter(f"{operands.kv_b.meta['fqn']}.weight")
        return LatentCore(
            weight, operands.heads, operands.nope, scale=float(about["scale"]), causal=bool(about["causal"]),
            window=int(about["window"]), elide=self.move_elision,
        )  # fmt: skip

    def inputs(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the query, the latents, the rotary keys and, where the core has them, the mask and the sinks."""
        from ktc.model.graph import ops
        from ktc.model.graph.latent import latent_operands

        operands, mask, sinks = latent_operands(node), node.args[ops.SDPA_MASK], node.args[ops.SDPA_SINKS]
        inputs = node.args[0], operands.latent, operands.k_rope, mask, sinks
        return inputs if sinks is not None else inputs[:4] if mask is not None else inputs[:3]

    def described(self, node: fx.Node) -> dict[str, Any]:
        """Return the attributes of the core, and the sizes of latent attention."""
        from ktc.model.graph import ops
        from ktc.model.graph.latent import latent_operands

        operands = latent_operands(node)
        sizes = {"heads": operands.heads, "nope": operands.nope, "rope": operands.rope, "value": operands.value}
        return {**ops.attributes(node), **sizes, "latent": operands.rank, "kv_b": str(operands.kv_b.meta["fqn"])}

    def recipe(self, action: NodeAction, about: Mapping[str, Any], host: Host) -> AbsorbedConfig:
        """Return the sizes, the name of the up-projection, and when attention is absorbed."""
        return AbsorbedConfig(
            heads=int(about["heads"]),
            nope=int(about["nope"]),
            rope=int(about["rope"]),
            value=int(about["value"]),
            latent=int(about["latent"]),
            kv_b=str(about["kv_b"]),
            absorb=cast("Any", self.absorb),
            move_elision=self.move_elision,
            kv=self.kv,
            threads=host.workers,
            split=self.kernel == AUTO,
        )

    @staticmethod
    def realise(old: nn.Module, config: AbsorbedConfig, kernel: Kernel | None) -> nn.Module:
        """Return the stock module, of a class that absorbs."""
        from ktc.model.attention.absorbed import Absorption, absorb
        from ktc.model.attention.int8_decode import decoder
        from ktc.model.attention.latent_sizes import LatentSizes

        sizes = LatentSizes(config.heads, config.nope, config.rope, config.value, config.latent)
        absorption = Absorption(sizes, config.kv_b, config.absorb, config.move_elision)
        try:
            decode = decoder(kernel, config.threads, config.kv, split=config.split)
            return absorb(old, absorption, decode)
        except AttributeError as error:
            raise WrongModule(f"a `{type(old).__name__}` without `{config.kv_b}`") from error
        except ValueError as error:
            raise WrongModule(f"a `{type(old).__name__}`: {error}") from error

"""`mla_absorbed`: latent attention works on the compressed cache, with the up-projection of keys and values folded in.

The attention module keeps its own code, projections, masks and cache; `ktc.model.attention.absorbed` answers the calls
between the cache and the output projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ktc.model.targets.lora_linear import LoraLinear
from ktc.model.targets.module_target import Arguments, ModuleTarget, WrongModule
from ktc.model.targets.settings import (
    ATTENTION_WITHOUT_BACKWARD,
    FLASH_DECODE,
    AttentionKernel,
    EnumName,
    KvFormat,
    Phase,
)
from ktc.model.targets.target import NodeAction

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.kernels.kernel_library import Kernel


@dataclass(frozen=True, slots=True)
class MlaAbsorbed(ModuleTarget):
    """`absorb` is the phase that runs absorbed; `move_elision` leaves out copies of what attention only reads.

    `kv` is what the cache holds.
    """

    cache: Annotated[Literal["compressed", "expanded"], EnumName("cache")] = "compressed"
    absorb: Phase = "decode"
    move_elision: bool = True
    kernel: AttentionKernel = "sdpa"
    kv: KvFormat = "auto"

    name: ClassVar = "mla_absorbed"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("mla",)
    absorbs: ClassVar = ("kv_b", "core")
    hosts: ClassVar = (LoraLinear.name,)
    available: ClassVar = True
    built: ClassVar = {"cache": ("compressed",), "kernel": ("sdpa", FLASH_DECODE)}
    without_backward: ClassVar = ATTENTION_WITHOUT_BACKWARD
    module: ClassVar = "absorbed_attention"
    may_be_zero: ClassVar = frozenset({"elide"})
    arguments: ClassVar = {
        **dict.fromkeys(("heads", "nope", "rope", "value", "latent", "elide", "threads"), int),
        **dict.fromkeys(("kv_b", "absorb", "kv"), str),
    }

    def put(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return the core, with the weight of the up-projection."""
        from ktc.model.attention.core import LatentCore
        from ktc.model.graph import ops
        from ktc.model.graph.latent import latent_operands

        found, about = latent_operands(node), ops.attributes(node)
        weight = graph.get_parameter(f"{found.kv_b.meta['fqn']}.weight")
        return LatentCore(
            weight, found.heads, found.nope, scale=float(about["scale"]), causal=bool(about["causal"]),
            window=int(about["window"]), elide=self.move_elision,
        )  # fmt: skip

    def inputs(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the query, the latents, the rotary keys and, where the core has them, the mask and the sinks."""
        from ktc.model.graph import ops
        from ktc.model.graph.latent import latent_operands

        found, mask, sinks = latent_operands(node), node.args[ops.SDPA_MASK], node.args[ops.SDPA_SINKS]
        inputs = node.args[0], found.latent, found.k_rope, mask, sinks
        return inputs if sinks is not None else inputs[:4] if mask is not None else inputs[:3]

    def described(self, node: fx.Node) -> dict[str, Any]:
        """Return the attributes of the core, and the sizes of latent attention."""
        from ktc.model.graph import ops
        from ktc.model.graph.latent import latent_operands

        found = latent_operands(node)
        sizes = {"heads": found.heads, "nope": found.nope, "rope": found.rope, "value": found.value}
        return {**ops.attributes(node), **sizes, "latent": found.rank, "kv_b": str(found.kv_b.meta["fqn"])}

    def recipe(self, action: NodeAction, node: fx.Node, host: Host) -> Arguments:
        """Return the sizes, the name of the up-projection, and when attention is absorbed."""
        from ktc.model.graph import ops

        about = ops.attributes(node)
        sizes: Arguments = {name: int(about[name]) for name in ("heads", "nope", "rope", "value", "latent")}
        return {
            **sizes,
            "kv_b": str(about["kv_b"]),
            "absorb": self.absorb,
            "elide": int(self.move_elision),
            "kv": self.kv,
            "threads": host.workers,
        }

    @staticmethod
    def realise(old: nn.Module, arguments: Mapping[str, Any], kernel: Kernel | None) -> nn.Module:
        """Return the stock module, of a class that absorbs."""
        from ktc.model.attention.absorbed import Absorption, absorb
        from ktc.model.attention.int8_decode import decoder
        from ktc.model.attention.latent_sizes import LatentSizes

        sizes = LatentSizes(**{name: arguments[name] for name in ("heads", "nope", "rope", "value", "latent")})
        absorption = Absorption(sizes, arguments["kv_b"], arguments["absorb"], bool(arguments["elide"]))
        try:
            decode = None if kernel is None else decoder(kernel, arguments["threads"], arguments["kv"])
            return absorb(old, absorption, decode)
        except AttributeError as error:
            raise WrongModule(f"a `{type(old).__name__}` without `{arguments['kv_b']}`") from error
        except ValueError as error:
            raise WrongModule(f"a `{type(old).__name__}`: {error}") from error

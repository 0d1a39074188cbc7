"""`fused_attention`: the core of attention is computed by the kernel that a rule names.

The attention module keeps its own code, projections, masks and cache; `ktc.model.attention.decoding` is the function
that it calls for the core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ktc.model.targets.module_target import Arguments, ModuleTarget, WrongModule
from ktc.model.targets.settings import ATTENTION_WITHOUT_BACKWARD, FLASH_DECODE, AttentionKernel, KvFormat
from ktc.model.targets.target import NodeAction

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.kernels.kernel_library import Kernel


@dataclass(frozen=True, slots=True)
class FusedAttention(ModuleTarget):
    """`kernel` names the core, and `kv` what the cache holds."""

    kernel: AttentionKernel
    kv: KvFormat = "auto"

    name: ClassVar = "fused_attention"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("attention", "mla")
    absorbs: ClassVar = ("core",)
    available: ClassVar = True
    built: ClassVar = {"kernel": (FLASH_DECODE,)}
    without_backward: ClassVar = ATTENTION_WITHOUT_BACKWARD
    module: ClassVar = "decoding_attention"
    arguments: ClassVar = {"threads": int, "kv": str}

    def put(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
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

    def recipe(self, action: NodeAction, node: fx.Node, host: Host) -> Arguments:
        """Return the number of threads, which is the host's, and what the cache holds."""
        return {"threads": host.workers, "kv": self.kv}

    @staticmethod
    def realise(old: nn.Module, arguments: Mapping[str, Any], kernel: Kernel | None) -> nn.Module:
        """Return the stock module, of a class that decodes by the kernel."""
        from ktc.model.attention.decoding import decoding
        from ktc.model.attention.int8_decode import decoder

        try:
            return decoding(old, None if kernel is None else decoder(kernel, arguments["threads"], arguments["kv"]))
        except ValueError as error:
            raise WrongModule(f"a `{type(old).__name__}`: {error}") from error

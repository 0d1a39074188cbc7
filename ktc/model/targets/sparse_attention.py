"""`sparse_attention`: few new tokens over a long cache read the positions with the best estimated scores alone.

The attention module keeps its own code, projections, masks and cache; `ktc.model.attention.sparse` chooses the
positions. On latent attention it is `mla_absorbed` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from ktc.model.targets.fused_attention import FusedAttention
from ktc.model.targets.lora_linear import LoraLinear
from ktc.model.targets.mla_absorbed import MlaAbsorbed
from ktc.model.targets.module_target import Arguments, ModuleTarget, WrongModule
from ktc.model.targets.settings import FLASH_DECODE, Bounds, Count, EnumName, Positive
from ktc.model.targets.target import NodeAction

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.attention.sparsity import Sparsity
    from ktc.model.kernels.kernel_library import Kernel

_MOST = 2**20
_SIZES = ("heads", "nope", "rope", "value", "latent")


@dataclass(frozen=True, slots=True)
class SparseAttention(ModuleTarget):
    """Each new token reads the `k` positions that score best, the first `sink` and the last `local` ones.

    The first `dense_layers` layers of the model stay dense. `index` is the format of the keys' codes. `choice` is who
    chooses: each query head, or the query heads of a key head together, as `auto` has it for latents.
    """

    k: Positive = 2048
    sink: Count = 64
    local: Count = 256
    dense_layers: Annotated[int, Bounds(0, 4096)] = 2
    index: Annotated[Literal["int4", "sign"], EnumName("key_index")] = "int4"
    choice: Annotated[Literal["auto", "head", "group"], EnumName("choice")] = "auto"

    name: ClassVar = "sparse_attention"
    fills: ClassVar = "kernel"
    accepts: ClassVar = ("attention", "mla")
    absorbs: ClassVar = ("kv_b", "core")
    hosts: ClassVar = (LoraLinear.name,)
    available: ClassVar = True
    module: ClassVar = "sparse_attention"
    may_be_zero: ClassVar = frozenset({"sink", "local", "shared", *_SIZES})
    arguments: ClassVar = {
        **dict.fromkeys(("k", "sink", "local", "shared", "threads", *_SIZES), int),
        **dict.fromkeys(("index", "kv_b"), str),
    }

    @property
    def as_proven(self) -> SparseAttention:
        """It with room for all positions: what it leaves out by design is not compared."""
        return replace(self, k=_MOST)

    def dense(self, *, latent: bool) -> FusedAttention | MlaAbsorbed:
        """Return the dense rewrite of the same attention."""
        return MlaAbsorbed(kernel=FLASH_DECODE) if latent else FusedAttention(FLASH_DECODE)

    def sparsity(self, *, latent: bool) -> Sparsity:
        """Return the settings of the operator."""
        from ktc.model.attention.sparsity import Sparsity

        shared = self.choice == "group" or (self.choice == "auto" and latent)
        return Sparsity(self.k, self.sink, self.local, self.index, shared)

    def put(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return the dense core: over the positions of one call."""
        return self.dense(latent=_is_latent(node)).put(graph, node, action)

    def inputs(self, node: fx.Node) -> tuple[Any, ...]:
        """Return what the dense core takes."""
        return self.dense(latent=_is_latent(node)).inputs(node)

    def described(self, node: fx.Node) -> dict[str, Any]:
        """Return the attributes of the core, and what it reads."""
        latent = _is_latent(node)
        settings = {name: self.settings[name] for name in ("k", "sink", "local", "index")}
        return {**self.dense(latent=latent).described(node), **settings, "shared": self.sparsity(latent=latent).shared}

    def recipe(self, action: NodeAction, node: fx.Node, host: Host) -> Arguments:
        """Return what a query reads; of latent attention the sizes and the name of the up-projection too."""
        from ktc.model.graph import ops

        about = ops.attributes(node)
        sizes: Arguments = {name: int(about.get(name, 0)) for name in _SIZES}
        names: Arguments = {"index": self.index, "kv_b": str(about.get("kv_b", ""))}
        budget = {"k": self.k, "sink": self.sink, "local": self.local, "shared": int(about["shared"])}
        return {**sizes, **names, **budget, "threads": host.workers}

    @staticmethod
    def realise(old: nn.Module, arguments: Mapping[str, Any], kernel: Kernel | None) -> nn.Module:
        """Return the stock module, of a class that decodes sparsely."""
        from ktc.model.attention.absorbed import Absorption, absorb
        from ktc.model.attention.decode import DecodeAttention
        from ktc.model.attention.decoding import decoding
        from ktc.model.attention.latent_sizes import LatentSizes
        from ktc.model.attention.sparse import Sparse
        from ktc.model.attention.sparsity import IndexFormat, Sparsity
        from ktc.model.hf.indexer import positions_of_indexer

        k, sink, local, shared = (int(arguments[name]) for name in ("k", "sink", "local", "shared"))
        sparsity = Sparsity(k, sink, local, cast("IndexFormat", arguments["index"]), bool(shared))
        decode = None if kernel is None else DecodeAttention(kernel, arguments["threads"])
        sparse = Sparse(sparsity, decode, positions_of_indexer(old) > 0)
        try:
            if not arguments["kv_b"]:
                return decoding(old, decode, sparse)
            sizes = LatentSizes(**{name: arguments[name] for name in _SIZES})
            return absorb(old, Absorption(sizes, arguments["kv_b"], "decode", True), decode, sparse)
        except AttributeError as error:
            raise WrongModule(f"a `{type(old).__name__}` without `{arguments['kv_b']}`") from error
        except ValueError as error:
            raise WrongModule(f"a `{type(old).__name__}`: {error}") from error


def _is_latent(node: fx.Node) -> bool:
    """Return whether the core, before or after its rewrite, is that of latent attention."""
    from ktc.model.graph.latent import is_latent

    return is_latent(node)

"""`sparse_attention`: few new tokens over a long cache read the positions with the best estimated scores alone.

The attention module keeps its own code, projections, masks and cache; `ktc.model.attention.sparse` chooses the
positions. On latent attention it is `mla_absorbed` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ktc.model.targets.fused_attention import FusedAttention
from ktc.model.targets.lora_linear import LoraLinear
from ktc.model.targets.mla_absorbed import MlaAbsorbed
from ktc.model.targets.module_target import ModuleTarget, WrongModule
from ktc.model.targets.settings import FLASH_DECODE, Bounds, Count, EnumName, NaturalInt, Positive, PositiveInt
from ktc.model.targets.target import NodeAction, NodeLora, Target, Unsuited

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.attention.sparsity import Sparsity
    from ktc.model.kernels.kernel_library import Kernel
    from ktc.model.kernels.spec import Spec
    from ktc.model.targets.node_plan import CapturedNode, NodePlan

_MOST = 2**20
_SHOWN = (32_768, 131_072)  # positions for which the bytes of a step are reported


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """The rows that a query reads. Latent attention has sizes and the name of its up-projection, others 0 and None."""

    k: PositiveInt
    sink: NaturalInt
    local: NaturalInt
    shared: bool
    index: Literal["int4", "sign"]
    threads: PositiveInt
    heads: NaturalInt
    nope: NaturalInt
    rope: NaturalInt
    value: NaturalInt
    latent: NaturalInt
    kv_b: str | None


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
    fixed_facet: ClassVar = "kernel"
    accepts: ClassVar = ("attention", "mla")
    consumes: ClassVar = ("kv_b", "core")
    fuses: ClassVar = (LoraLinear.name,)
    varies_by_step: ClassVar = True
    module: ClassVar = "sparse_attention"
    config: ClassVar = SparseConfig

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

    def at_layer(self, layer: int, seen: CapturedNode, device: str) -> Target | None:
        """Return the rewrite of a layer: of the first ones a dense one, None where it has no kernel of the CPU."""
        from ktc.model.targets.linear_kernel import DTYPES

        if layer >= self.dense_layers:
            return self
        dense = self.dense(latent=_is_latent(seen.core))
        if device != "cpu":
            return replace(dense, kernel="auto")
        if seen.dtype in DTYPES:
            return dense
        return replace(dense, kernel="sdpa") if isinstance(dense, MlaAbsorbed) else None

    def unsuited(self, seen: CapturedNode) -> Unsuited | None:
        """Return why attention stays dense: an unknown function (M092), or more than causal products (M083)."""
        from ktc.model.targets.attention_kernel import unknown_core
        from ktc.model.targets.sparse_facts import not_sparse

        if unknown := unknown_core(seen):
            return unknown
        reason = not_sparse(seen)
        return Unsuited("M083", reason, "stay dense", "this attention stays dense") if reason else None

    def choose(self, plan: NodePlan, seen: CapturedNode) -> Spec | None:
        """Return the kernel; None where PyTorch computes it."""
        from ktc.model.kernels.attention_spec import AttentionSpec, attention_isa
        from ktc.model.targets.linear_kernel import DTYPES

        if plan.device != "cpu" or seen.dtype not in DTYPES:
            return None
        dtype = DTYPES[seen.dtype]
        return AttentionSpec("sparse_attention", dtype, attention_isa(dtype, seen.host))

    def cached(self, seen: CapturedNode, per_position: int) -> int:
        """Return the bytes of a position in the layer's cache, with its codes in the index."""
        from ktc.model.targets.sparse_facts import index_bytes

        return per_position + index_bytes(seen, self.sparsity(latent=_is_latent(seen.core)))

    def explain(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> tuple[str, ...]:
        """Return the positions that an attention reads, and the bytes of a step."""
        from ktc.model.hf.indexer import positions_of_indexer
        from ktc.model.targets.sparse_facts import unfit_keys

        latent, by = _is_latent(seen.core), f"the {plan.spec.isa} kernel" if plan.spec else "PyTorch"
        if plan.device != "cpu" and not positions_of_indexer(seen.stock):
            unfit = unfit_keys(seen)
            by = "kernels of the GPU in recorded steps, by PyTorch in others"
            by = f"PyTorch in steps that are not recorded ({unfit})" if unfit else by
        how = "attention on the compressed cache" if latent else "attention"
        if positions := positions_of_indexer(seen.stock):
            read = (
                f"{positions:,} positions that the model's own trained indexer chooses and no others, by {by}"
            )  # fmt: skip
        else:
            read = self._read(seen, latent, by)
        return (f"{how}; few new tokens without gradients read {'the ' * bool(positions)}{read}, on {plan.device}",)

    def _read(self, seen: CapturedNode, latent: bool, by: str) -> str:
        from ktc.model.targets.sparse_facts import traffic

        sparsity = self.sparsity(latent=latent)
        who = "each query head chooses"
        if sparsity.shared:
            who = "the query heads of a key head choose together"
        steps = {positions: traffic(seen, sparsity, positions) for positions in _SHOWN}
        counted = " and ".join(
            f"{(step.index + step.gathered) / 1e6:.1f} of {step.dense / 1e6:.1f} MB at {positions:,}"
            for positions, step in steps.items()
        )
        return (
            f"{self.k:,} positions by an index of {self.index} codes, the first {self.sink} and the last {self.local} "
            f"({who}), by {by}: {counted} positions; dense up to {self.k + self.sink + self.local:,} positions, and "
            "for many new tokens"
        )

    def build_reference(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return the dense core: over the positions of one call."""
        return self.dense(latent=_is_latent(node)).build_reference(graph, node, action)

    def inputs(self, node: fx.Node) -> tuple[Any, ...]:
        """Return what the dense core takes."""
        return self.dense(latent=_is_latent(node)).inputs(node)

    def described(self, node: fx.Node) -> dict[str, Any]:
        """Return the attributes of the core, and what it reads."""
        latent = _is_latent(node)
        settings = {name: self.settings[name] for name in ("k", "sink", "local", "index")}
        return {**self.dense(latent=latent).described(node), **settings, "shared": self.sparsity(latent=latent).shared}

    def recipe(self, action: NodeAction, about: Mapping[str, Any], host: Host) -> SparseConfig:
        """Return what a query reads; of latent attention the sizes and the name of the up-projection too."""
        return SparseConfig(
            k=self.k,
            sink=self.sink,
            local=self.local,
            shared=bool(about["shared"]),
            index=self.index,
            threads=host.workers,
            heads=int(about.get("heads", 0)),
            nope=int(about.get("nope", 0)),
            rope=int(about.get("rope", 0)),
            value=int(about.get("value", 0)),
            latent=int(about.get("latent", 0)),
            kv_b=about.get("kv_b"),
        )

    @staticmethod
    def realise(old: nn.Module, config: SparseConfig, kernel: Kernel | None) -> nn.Module:
        """Return the stock module, of a class that decodes sparsely."""
        from ktc.model.attention.absorbed import Absorption, absorb
        from ktc.model.attention.decode import DecodeAttention
        from ktc.model.attention.decoding import decoding
        from ktc.model.attention.latent_sizes import LatentSizes
        from ktc.model.attention.sparse import Sparse
        from ktc.model.attention.sparsity import Sparsity
        from ktc.model.attention.split_decode import SplitDecode
        from ktc.model.hf.indexer import positions_of_indexer

        sparsity = Sparsity(config.k, config.sink, config.local, config.index, config.shared)
        of_cpu = None if kernel is None else DecodeAttention(kernel, config.threads)
        sparse = Sparse(sparsity, of_cpu, positions_of_indexer(old) > 0)
        decode = of_cpu or SplitDecode()  # of dense calls
        try:
            if config.kv_b is None:
                return decoding(old, decode, sparse)
            sizes = LatentSizes(config.heads, config.nope, config.rope, config.value, config.latent)
            return absorb(old, Absorption(sizes, config.kv_b, "decode", True), decode, sparse)
        except AttributeError as error:
            raise WrongModule(f"a `{type(old).__name__}` without `{config.kv_b}`") from error
        except ValueError as error:
            raise WrongModule(f"a `{type(old).__name__}`: {error}") from error


def _is_latent(node: fx.Node) -> bool:
    """Return whether the core, before or after its rewrite, is that of latent attention."""
    from ktc.model.graph.latent import is_latent

    return is_latent(node)

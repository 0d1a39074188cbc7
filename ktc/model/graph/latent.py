"""Latent attention in a captured graph: the operands and sizes of the up-projection and the core.

In: the core of an attention that `attn.mla` matched. Out: its latents, rotary keys and sizes. Refused: a core that
computes with values which absorbed attention does not have (`reason`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ktc.model.graph import ops
from ktc.model.graph.typed import input_of, nodes_in

LINEARS = frozenset({"linear", "lora_linear", "kt_linear"})  # a linear layer, before and after its rewrite


@dataclass(frozen=True, slots=True)
class LatentOperands:
    """`core` reads the outputs of `kv_b`, which reads `latent` (b, 1, s, c) or (b, s, c), and `k_rope` (b, h, s, r)."""

    core: fx.Node
    kv_b: fx.Node
    latent: fx.Node
    k_rope: fx.Node
    heads: int
    nope: int
    value: int

    @property
    def rank(self) -> int:
        """The width of a latent."""
        return int(ops.shape_of(self.latent)[-1])

    @property
    def rope(self) -> int:
        """The width of a rotary key."""
        return int(ops.shape_of(self.k_rope)[-1])

    @property
    def reason(self) -> str:
        """Why the core cannot work on latents, "" if it can."""
        options = ops.attributes(self.core)
        used = [name for name in ("softcap", "bias") if options[name]]
        if used:
            return f"its scores have a {used[0]}"
        if ops.operator(self.kv_b) == "linear" and ops.argument(self.kv_b, "bias") is not None:
            return "the up-projection of keys and values has a bias"
        if int(ops.shape_of(self.core.args[1])[1]) != self.heads:
            return "heads share keys"
        return ""


def is_latent(core: fx.Node) -> bool:
    """Return whether a core has keys `cat(k_nope, k_rope)` and values of the same projection as `k_nope`."""
    if ops.operator(core) != "sdpa":
        return "latent" in ops.attributes(core)
    keys = behind(input_of(core, 1))
    if ops.operator(keys) != "cat":
        return False
    projections = [_projection(node) for node in (nodes_in(keys.args[0])[0], input_of(core, 2))]
    return projections[0] is projections[1] and ops.operator(projections[0]) in LINEARS


def _projection(node: fx.Node) -> fx.Node:
    """Return the node that a value is a part of."""
    node = behind(node)
    while ops.operator(node) in ("getitem", "split") or ops.operator(node) in ops.TRANSPARENT:
        node = input_of(node, 0)
    return node


def latent_operands(core: fx.Node) -> LatentOperands:
    """Return the operands of a core with keys `cat(k_nope, k_rope)`, and values of the same projection as `k_nope`."""
    k_nope, k_rope = nodes_in(behind(input_of(core, 1)).args[0])
    value = input_of(core, 2)
    kv_b = _projection(value)
    assert ops.operator(kv_b) in LINEARS, f"the values of `{core.name}` come from `{kv_b.name}`"
    heads = int(ops.shape_of(core.args[0])[1])
    nope, width = int(ops.shape_of(k_nope)[-1]), int(ops.shape_of(value)[-1])
    return LatentOperands(core, kv_b, input_of(kv_b, 0), k_rope, heads, nope, width)


def behind(node: fx.Node) -> fx.Node:
    """Return the node whose values `node` only moves or casts."""
    while ops.operator(node) in ops.TRANSPARENT:
        node = input_of(node, 0)
    return node

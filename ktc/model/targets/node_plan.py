"""`NodePlan`: what the plan decides about one node of a model, and `CapturedNode`: what a target reads to decide it.

Nothing here imports torch, since the rule language reads the targets that use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ktc.diagnostics import Span
from ktc.model.targets.settings import Facet
from ktc.model.targets.target import AS_STORED, NodeAction, NodeWeights, Prefill, Target

if TYPE_CHECKING:
    import torch
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.checkpoint import WeightSource
    from ktc.model.kernels.spec import Spec

# How a checkpoint stores weights: a dtype or a method by name, and the size of groups or of GGUF's blocks that a kernel
# may keep, or 0.
StoredFormat = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Claim:
    """One facet of one node that a rule's action takes. `path` is absolute; `node` is empty for a module."""

    path: str
    node: str
    rule: str
    target: Target
    span: Span
    site: str
    block: str

    @property
    def facet(self) -> Facet:
        """The facet of the node."""
        return self.target.claimed_facet


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The plan of one claim: what else is claimed of its node, where the node is, and by which kernel it runs.

    `siblings` are the claims of other facets of the same node. `spec` is None where PyTorch computes the node.
    """

    claim: Claim
    siblings: Mapping[Facet, Claim] = field(hash=False)
    device: str
    spec: Spec | None = None
    weights: NodeWeights = AS_STORED
    prefill: Prefill | None = None

    @property
    def target(self) -> Target:
        """The rewrite of the node."""
        return self.claim.target

    @property
    def action(self) -> NodeAction:
        """The rewrite of the node within its block. The FQN of a module outside the blocks is that of the model."""
        claim = self.claim
        fqn = claim.path.removeprefix(claim.site).lstrip(".")
        return NodeAction(claim.node, fqn, claim.target, claim.rule, claim.span, self.spec, self.prefill, self.weights)


@dataclass(frozen=True, slots=True)
class CapturedNode:
    """A node as captured, in a model on meta tensors.

    `node` is None outside the captured blocks. `stock` is the module of the node's block, or the module itself.
    `sources` are the rows of the checkpoint for the module's own tensors; `config_format` counts without a checkpoint.
    `trains` is whether the program trains anything; `model_type` is the family in the words of transformers.
    """

    node: fx.Node | None
    stock: nn.Module
    dtype: torch.dtype
    host: Host
    sources: tuple[WeightSource, ...] = ()
    config_format: StoredFormat = ("", 0)
    trains: bool = False
    model_type: str = ""

    @property
    def core(self) -> fx.Node:
        """The node, of a claim within a captured block."""
        assert self.node is not None, "a claim on a node has a graph"
        return self.node

    @property
    def linear_sizes(self) -> tuple[int, int]:
        """The features of a linear layer, in and out."""
        from ktc.model.graph import ops

        if self.node is None:
            outputs, inputs = self.stock.get_parameter("weight").shape
            return inputs, outputs
        about = ops.attributes(self.node)
        return int(about["in_features"]), int(about["out_features"])

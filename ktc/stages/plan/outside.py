"""Linear layers outside the captured blocks, as the head: the claims of `kt_linear` on them, their kernels and devices.

Their modules take the place of the stock ones without a graph: nothing around them is rewritten. Refused (M077): a
layer with code of its own around the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.kernels.linear_spec import LinearSpec, PackedLinearSpec
from ktc.model.kernels.spec import Spec
from ktc.model.linears.plain import is_plain_linear
from ktc.model.targets import KtLinear
from ktc.model.targets.target import NodeAction
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.placement import device_of
from ktc.stages.plan.types import Claim, OutsideLinear
from ktc.stages.plan.working_memory import ProductRows


def outside_linears(
    captured: CapturedModel, claims: Sequence[Claim], chosen: Mapping[Claim, Spec], devices: Mapping[str, str]
) -> tuple[OutsideLinear, ...]:
    """Return the layers in the order of the rules. Raises InputRefused (M077)."""
    return tuple(_outside(captured, claims, chosen, devices))


def _outside(
    captured: CapturedModel, claims: Sequence[Claim], chosen: Mapping[Claim, Spec], devices: Mapping[str, str]
) -> Iterator[OutsideLinear]:
    for claim in claims:
        if claim.node or not isinstance(claim.target, KtLinear):
            continue
        module = captured.model.get_submodule(claim.path)
        if not is_plain_linear(module):
            message = f"`{KtLinear.name}` on `{claim.path}`: it is a `{type(module).__name__}` with code of its own"
            raise InputRefused(Diagnostic("M077", message, claim.span, hint="narrow the rule"))
        action = NodeAction("", claim.path, claim.target, claim.rule, claim.span, chosen.get(claim))
        yield OutsideLinear(action, device_of(claim.path, devices))


def multiplies_many_rows(action: NodeAction) -> bool:
    """Return whether a kernel of ktc computes the layer's product with many rows."""
    if isinstance(action.kernel, PackedLinearSpec):
        return True
    packed = isinstance(action.target, KtLinear) and action.target.prefill in ("packed", "auto")
    return packed and isinstance(action.kernel, LinearSpec)


def widest_product(captured: CapturedModel, outside: Sequence[OutsideLinear], threads: int) -> ProductRows | None:
    """Return the product of the widest of these layers that has a kernel for many rows, for its working memory."""
    widths = [
        max(captured.model.get_submodule(each.action.fqn).get_parameter("weight").shape)
        for each in outside
        if multiplies_many_rows(each.action)
    ]
    return ProductRows(max(widths), threads) if widths else None

"""Choosing a kernel of routed experts: their sizes, how the checkpoint stores them, the host -> its spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.foundation.formats import BLOCKS, CODES, FORMATS, STORED, Codes, WeightFormat
from ktc.foundation.isa import Isa, isa_of
from ktc.model.checkpoint.int4 import Int4Grid
from ktc.model.graph import ops
from ktc.model.kernels.form import parse_form
from ktc.model.kernels.fused_moe_spec import KERNELS, FusedMoeSpec
from ktc.model.targets.node_plan import CapturedNode, Claim, NodePlan, StoredFormat

if TYPE_CHECKING:
    from ktc.foundation.host import Host

# A format counts as built if every instruction set has it, so that no user gets the scalar oracle unawares.
ON_EVERY_ISA = tuple(name for name in FORMATS if all(name in formats for formats in KERNELS.values()))
# All that gate and up are stored as, and all that down is.
StoredFormats = tuple[tuple[StoredFormat, ...], tuple[StoredFormat, ...]]


def choose_fused_moe(plan: NodePlan, seen: CapturedNode, asked: str, isa: str) -> FusedMoeSpec:
    """Return the kernel of routed experts. `asked` is the rule's format, `isa` its instruction set.

    Raises InputRefused (M068) if no kernel multiplies the weights, HostLacks (M064) if the host lacks the instruction
    set.
    """
    claim, node, weights = plan.claim, seen.core, plan.weights
    about = ops.attributes(node)
    hidden, inter = int(about["hidden"]), int(about["inter"])
    if weights.grid:
        gate_up, down, group_size = _on_grid(Int4Grid.parse(weights.grid), hidden, inter)
    elif weights.masters:
        gate_up, down, group_size = "bf16", "bf16", 0  # masters are not what is stored
    else:
        gate_up, down, group_size = _formats(claim, asked, _stored_formats(seen), hidden, inter)
    top_k, num_experts = int(ops.shape_of(node.args[1])[-1]), int(about["num_experts"])
    if not 1 <= top_k <= num_experts:
        message = f"the router of `{claim.path}` chooses {top_k} of {num_experts} experts"
        raise InputRefused(Diagnostic("M074", message, claim.span, hint="check config.json"))
    for weight_format in dict.fromkeys((gate_up, down)):
        if weight_format not in ON_EVERY_ISA:
            stored = " (the checkpoint's own)" if asked == "stored" else ""
            raise _no_format(claim, f"no kernel multiplies `{weight_format}` weights{stored}")
    form = parse_form(str(about["form"]))
    return FusedMoeSpec(
        op="fused_moe",
        hidden=hidden,
        intermediate=inter,
        num_experts=num_experts,
        top_k=top_k,
        dtype="bf16",
        format_gate_up=gate_up,
        format_down=down,
        isa=_isa(claim, isa, seen.host),
        activation=form.activation,
        gated=form.gated,
        biased=form.biased,
        group_size=group_size,
    )


def _stored_formats(seen: CapturedNode) -> StoredFormats:
    """Return how the checkpoint stores the experts' matrices; without a checkpoint, the config's format."""
    stored: tuple[set[StoredFormat], set[StoredFormat]] = (set(), set())
    for source in seen.sources:
        leaf = source.target.rpartition(".")[2]
        if not leaf.endswith("_bias") and not (source.part or "").endswith("_bias"):
            unkept = (source.quantised.method if source.quantised else source.dtype, 0)
            stored[leaf.startswith("down")].add(source.kept_as or unkept)
    gate_up, down = (tuple(sorted(formats)) or (seen.config_format,) for formats in stored)
    return gate_up, down


def _on_grid(grid: Int4Grid | None, hidden: int, inter: int) -> tuple[WeightFormat, WeightFormat, int]:
    """Return the formats of weights that are rounded to a grid, as `_formats` does.

    A scale of a whole row is stored as often as the row has groups. Scales that stay in fp32 are those of no format,
    so their products are stored.
    """
    assert grid is not None, "the plan has its spelling"
    if grid.scale_mode != "scale_first":
        return "bf16", "bf16", 0
    sizes = sorted(CODES["int4"].group_sizes, reverse=True)
    fitting = [size for size in sizes if hidden % size == 0 and inter % size == 0]
    if grid.group in fitting:
        return "int4", "int4", grid.group
    return ("int4", "int4", fitting[0]) if fitting else ("bf16", "bf16", 0)


def _formats(
    claim: Claim, asked: str, stored: StoredFormats, hidden: int, inter: int
) -> tuple[WeightFormat, WeightFormat, int]:
    """Return the formats of gate and up and of down, and the size of their groups, 0 without groups."""
    products = tuple(zip(stored, (("hidden", hidden), ("intermediate", inter)), strict=True))
    chosen = [
        _kept(asked, formats, size) or _converted(claim, asked, formats, name, size)
        for formats, (name, size) in products
    ]
    # A spec has one size of groups for both.
    if len({group for name, group in chosen if name in CODES and len(CODES[name].group_sizes) > 1}) > 1:
        chosen = [_converted(claim, asked, formats, name, size) for formats, (name, size) in products]
    (gate_up, _), (down, _) = chosen
    if gate_up != down and not FORMATS[gate_up].dtype == FORMATS[down].dtype == "bf16":
        raise _unread(claim, " and ".join(sorted((gate_up, down))))
    return gate_up, down, next((group for name, group in chosen if name in CODES), 0)


def _kept(asked: str, stored: tuple[StoredFormat, ...], size: int) -> tuple[WeightFormat, int] | None:
    """Return the format of kernels that multiply rows of `size` as stored, and the size of its groups.

    None for rows that are not quantised, in several formats, or in another format than the program requests.
    """
    (name, group), *others = stored
    if others or asked not in ("stored", name):
        return None
    if name in BLOCKS:
        return None if group != BLOCKS[name].weights or size % group else (name, 0)
    if name not in CODES or group not in CODES[name].group_sizes or (CODES[name].even and size % group):
        return None
    return name, group


def _converted(
    claim: Claim, asked: str, stored: tuple[StoredFormat, ...], name: str, size: int
) -> tuple[WeightFormat, int]:
    """Return the format that the loader converts to, and the size of groups: of rows of `size`, called `name`.

    Raise InputRefused (M068) if no kernel has it, or a row is not a multiple of its groups.
    """
    loaded_as = " and ".join(dict.fromkeys(_loaded(dtype) for dtype, _ in stored))
    method = loaded_as if asked == "stored" else asked
    row = FORMATS.get(method)
    if row is None:
        raise _unread(claim, method)
    if not row.quantises:
        found_as = " and ".join(dict.fromkeys(dtype for dtype, _ in stored))
        message = f"`{method}` weights are taken only as stored, and these experts are stored as `{found_as}`"
        raise _no_format(claim, message)
    if size % row.whole:
        pieces = "groups" if isinstance(row, Codes) else "blocks"
        raise _no_format(claim, f"`{method}` cuts rows into {pieces} of {row.whole}, and {name} is {size}")
    return method, row.group_sizes[0] if isinstance(row, Codes) else 0


def _loaded(stored: str) -> WeightFormat:
    """Return the dtype that the loader passes to a kernel: other codes become bf16, as the plan reports."""
    row = STORED.get(stored)
    if row is None:
        return stored
    return "bf16" if row.coded else row.name


def _unread(claim: Claim, stored: str) -> InputRefused:
    return _no_format(claim, f"the checkpoint stores these experts as `{stored}`, which no single kernel reads")


def _no_format(claim: Claim, message: str) -> InputRefused:
    hint = f"write `format = {ON_EVERY_ISA[0]}`, or `--set format={ON_EVERY_ISA[0]}` if the program has that parameter"
    return InputRefused(Diagnostic("M068", message, claim.span, hint=hint))


def _isa(claim: Claim, asked: str, host: Host) -> Isa:
    if asked == "auto":
        return host.isas[0]
    isa = isa_of(asked)
    if isa not in host.isas:
        hint = f"this host can run: {', '.join(host.isas)}; or write `isa = auto`"
        raise HostLacks(Diagnostic("M064", f"this host cannot run isa `{asked}`", claim.span, hint=hint))
    return isa

"""Choosing a kernel: a `cpu_moe` claim, the experts it stands on and the host -> a KernelSpec, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar, get_args

from torch import fx

from ktc.checkpoint import BLOCK_TYPES
from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.dsl.ruleset import Value
from ktc.experts.form import parse_form
from ktc.graph import ops
from ktc.host import Host
from ktc.isa import Isa
from ktc.plan.kernel_spec import BLOCKS, CODES, IN_BF16, KERNELS, KernelSpec, WeightFormat
from ktc.plan.linear_spec import LinearSpec
from ktc.plan.types import Claim, Plan

ISAS = tuple(KERNELS)
# A format counts as built if every instruction set has it: nobody should land on the scalar oracle unawares.
FORMATS = tuple(name for name in get_args(WeightFormat) if all(name in formats for formats in KERNELS.values()))
# How a checkpoint stores weights: a dtype or a method by name, and the size of groups or of GGUF's blocks that a kernel
# may keep, else 0.
StoredFormat = tuple[str, int]
# All that gate and up are stored as, and all that down is.
StoredFormats = tuple[tuple[StoredFormat, ...], tuple[StoredFormat, ...]]
# What the loader hands to a kernel; codes that none keeps become bf16 on their way, as `plan/stored.py` tells.
_LOADED = {
    "f16": "fp16",
    "f32": "fp32",
    "f64": "fp64",
    **dict.fromkeys(("fp8", "int4", "mxfp4", *BLOCK_TYPES), "bf16"),
}

Name = TypeVar("Name")


def choose_kernel(claim: Claim, node: fx.Node, stored: StoredFormats, host: Host) -> KernelSpec:
    """The kernel for the experts node `node`, whose weights the checkpoint stores as `stored`.

    The format and the ISA may be ones that this version does not build; `availability` tells. Raises InputRefused where
    no kernel reads what is stored, HostLacks where the host lacks the ISA.
    """
    about = ops.attributes(node)
    hidden, inter = int(about["hidden"]), int(about["inter"])
    gate_up, down, group_size = _formats(claim, stored, hidden, inter)
    top_k, num_experts = int(ops.shape_of(node.args[1])[-1]), int(about["num_experts"])
    if not 1 <= top_k <= num_experts:
        message = f"the router of `{claim.path}` chooses {top_k} of {num_experts} experts"
        raise InputRefused(Diagnostic("M074", message, claim.span, hint="check config.json"))
    form = parse_form(str(about["form"]))
    return KernelSpec(
        op="fused_moe",
        hidden=hidden,
        intermediate=inter,
        num_experts=num_experts,
        top_k=top_k,
        dtype="bf16",
        format_gate_up=gate_up,
        format_down=down,
        isa=_isa(claim, host),
        activation=form.activation,
        gated=form.gated,
        biased=form.biased,
        group_size=group_size,
    )


def _formats(claim: Claim, stored: StoredFormats, hidden: int, inter: int) -> tuple[WeightFormat, WeightFormat, int]:
    """The formats of gate and up and of down, and the size of their groups, 0 where they have none."""
    products = tuple(zip(stored, (("hidden", hidden), ("intermediate", inter)), strict=True))
    found = [
        _kept(claim, formats, size) or _converted(claim, formats, name, size) for formats, (name, size) in products
    ]
    # A spec has one size of groups for both.
    if len({group for name, group in found if name in CODES and len(CODES[name].group_sizes) > 1}) > 1:
        found = [_converted(claim, formats, name, size) for formats, (name, size) in products]
    (gate_up, _), (down, _) = found
    if gate_up != down and not {gate_up, down} <= set(IN_BF16):
        raise _unread(claim, " and ".join(sorted((gate_up, down))))
    return gate_up, down, next((group for name, group in found if name in CODES), 0)


def _kept(claim: Claim, stored: tuple[StoredFormat, ...], size: int) -> tuple[WeightFormat, int] | None:
    """The format of kernels that multiply rows of `size` as they are stored, and the size of its groups.

    None where they are not quantised, in several formats, or in another than the program asks for.
    """
    (name, group), *others = stored
    found = _one_of((*CODES, *BLOCKS), name)
    if others or found is None or str(claim.settings["format"]) not in ("stored", found):
        return None
    if found in BLOCKS:
        return None if group != BLOCKS[found].weights or size % group else (found, 0)
    if group not in CODES[found].group_sizes or (CODES[found].even and size % group):
        return None
    return found, group


def _converted(claim: Claim, stored: tuple[StoredFormat, ...], name: str, size: int) -> tuple[WeightFormat, int]:
    """The format that the loader makes of what is stored, and the size of groups: of rows of `size`, called `name`.

    Raises InputRefused (M068) where no kernel has it, or a row is not cut evenly.
    """
    asked = str(claim.settings["format"])
    loaded_as = " and ".join(dict.fromkeys(_LOADED.get(dtype, dtype) for dtype, _ in stored))
    wanted = loaded_as if asked == "stored" else asked
    found = _one_of(get_args(WeightFormat), wanted)
    if found is None:
        raise _unread(claim, wanted)
    group, whole = _cut(found)
    if found in BLOCKS and not BLOCKS[found].quantises:
        found_as = " and ".join(dict.fromkeys(dtype for dtype, _ in stored))
        message = f"`{found}` weights are taken only as stored, and these experts are stored as `{found_as}`"
        raise _no_format(claim, message)
    if whole and size % group:
        message = f"`{found}` cuts rows into {whole} of {group}, and {name} is {size}"
        raise _no_format(claim, message)
    return found, group if found in CODES else 0


def _cut(weight_format: WeightFormat) -> tuple[int, str]:
    """What weights are quantised in: of how many, and what that is called where a row must be whole ones."""
    if weight_format in CODES:
        return CODES[weight_format].group_sizes[0], "groups" if CODES[weight_format].even else ""
    if weight_format in BLOCKS:
        return BLOCKS[weight_format].weights, "blocks"
    return 0, ""


def _unread(claim: Claim, stored: str) -> InputRefused:
    return _no_format(claim, f"the checkpoint stores these experts as `{stored}`, which no one kernel reads")


def _no_format(claim: Claim, message: str) -> InputRefused:
    hint = f"write `format = {FORMATS[0]}`, or `--set format={FORMATS[0]}` if the program has that parameter"
    return InputRefused(Diagnostic("M068", message, claim.span, hint=hint))


def _isa(claim: Claim, host: Host) -> Isa:
    asked = str(claim.settings["isa"])
    if asked == "auto":
        return next(isa for isa in host.isas if isa in ISAS)
    found = _one_of(host.isas, asked)
    if found is None:
        hint = f"this host can run: {', '.join(host.isas)}; or write `isa = auto`"
        raise HostLacks(Diagnostic("M064", f"this host cannot run isa `{asked}`", claim.span, hint=hint))
    return found


def _one_of(options: Iterable[Name], wanted: object) -> Name | None:
    """The option that `wanted` is, None if it is none."""
    return next((option for option in options if option == wanted), None)


def thread_count(settings: Mapping[str, Value], host: Host) -> int:
    """Workers of the kernel's engine: what the rule says, else one per core that this process may use."""
    asked = settings.get("threads")
    return asked if isinstance(asked, int) else max(1, min(host.cores, host.threads))


def kernel_origins(plan: Plan) -> dict[KernelSpec | LinearSpec, str]:
    """The place in the rules that asked for each kernel."""
    actions = [action for rewrite in plan.rewrites for action in rewrite.actions]
    asked = ((action.kernel or action.linear, f"{action.rule} ({action.span})") for action in actions)
    return {spec: origin for spec, origin in asked if spec is not None}

"""Choosing a kernel: a `cpu_moe` claim, the experts it stands on and the host -> a KernelSpec, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar, get_args

from torch import fx

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.dsl.ruleset import Value
from ktc.graph import ops
from ktc.host import Host, Isa
from ktc.plan.kernel_spec import CODES, KERNELS, KernelSpec, WeightFormat
from ktc.plan.types import Claim
from ktc.runtime.experts_form import parse_form

ISAS = tuple(KERNELS)
# A format counts as built if every instruction set has it: nobody should land on the scalar oracle unawares.
FORMATS = tuple(name for name in get_args(WeightFormat) if all(name in formats for formats in KERNELS.values()))
# How a checkpoint stores weights: a dtype or a method by name, and the size of groups that a kernel may keep, else 0.
StoredFormat = tuple[str, int]
# What the loader hands to a kernel; codes that none keeps become bf16 on their way, as `plan/stored.py` tells.
_LOADED = {"f16": "fp16", "f32": "fp32", "f64": "fp64", **dict.fromkeys(("fp8", "int4", "mxfp4"), "bf16")}

Name = TypeVar("Name")


def choose_kernel(claim: Claim, node: fx.Node, stored: tuple[StoredFormat, ...], host: Host) -> KernelSpec:
    """The kernel for the experts node `node`, whose weights the checkpoint stores as `stored`.

    The format and the ISA may be ones that this version does not build; `availability` tells. Raises InputRefused where
    no kernel reads what is stored, HostLacks where the host lacks the ISA.
    """
    about = ops.attributes(node)
    hidden, inter = int(about["hidden"]), int(about["inter"])
    weight_format, group_size = _format(claim, stored, {"hidden": hidden, "intermediate": inter})
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
        format_gate_up=weight_format,
        format_down=weight_format,
        isa=_isa(claim, host),
        activation=form.activation,
        gated=form.gated,
        biased=form.biased,
        group_size=group_size,
    )


def _format(claim: Claim, stored: tuple[StoredFormat, ...], sizes: Mapping[str, int]) -> tuple[WeightFormat, int]:
    """The format of packed weights and the size of their groups, 0 where they have none."""
    asked = str(claim.settings["format"])
    kept = {_kept(name, group, sizes) for name, group in stored}
    one = next(iter(kept)) if len(kept) == 1 else None
    if one is not None and asked in ("stored", one[0]):
        return one
    loaded = dict.fromkeys(_LOADED.get(name, name) for name, _ in stored)
    wanted = " and ".join(loaded) if asked == "stored" else asked
    found = _one_of(get_args(WeightFormat), wanted)
    if found is not None and found in CODES:
        return found, _group(claim, found, sizes)
    if found is None:
        message = f"the checkpoint stores these experts as `{wanted}`, which no one kernel reads"
        hint = f"write `format = {FORMATS[0]}`, or `--set format={FORMATS[0]}` if the program has that parameter"
        raise InputRefused(Diagnostic("M068", message, claim.span, hint=hint))
    return found, 0


def _kept(name: str, group: int, sizes: Mapping[str, int]) -> tuple[WeightFormat, int] | None:
    """The format of kernels that multiply what is stored as it is, if it is quantised and there is one."""
    found = _one_of(CODES, name)
    if found is None or group not in CODES[found].group_sizes:
        return None
    return None if CODES[found].even and any(size % group for size in sizes.values()) else (found, group)


def _group(claim: Claim, weight_format: WeightFormat, sizes: Mapping[str, int]) -> int:
    """The size of groups that weights are quantised in. Raises InputRefused (M068) where a row is not cut evenly."""
    group = CODES[weight_format].group_sizes[0]
    for name, size in sizes.items():
        if CODES[weight_format].even and size % group:
            message = f"`{weight_format}` cuts rows into groups of {group}, and {name} is {size}"
            raise InputRefused(Diagnostic("M068", message, claim.span, hint=f"write `format = {FORMATS[0]}`"))
    return group


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

"""Choosing a kernel: a `cpu_moe` action, the experts it stands on and the host -> a KernelSpec, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.dsl.ruleset import Value
from ktc.graph import ops
from ktc.host import Host
from ktc.plan.kernel_spec import Isa, KernelSpec
from ktc.plan.types import Claim

# What templates/fused_moe.cpp.j2 can instantiate in this version.
ISAS: tuple[Isa, ...] = ("avx512_bf16", "avx2", "scalar")
FORMATS = ("bf16",)
ACTIVATIONS = ("silu", "gelu")
_STORED = {"bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64", "fp8": "fp8"}


def choose_kernel(claim: Claim, node: fx.Node, stored: str, host: Host) -> KernelSpec:
    """The kernel for the experts node `node`, whose weights the checkpoint stores as `stored` (a dtype name).

    Raises InputRefused where no kernel computes this format or activation, HostLacks where the host lacks the ISA.
    """
    about = ops.attributes(node)
    weight_format = _format(claim, stored)
    if about["act"] not in ACTIVATIONS:
        raise InputRefused(Diagnostic("M067", f"no kernel computes the activation `{about['act']}` of `{claim.path}`", claim.span))
    return KernelSpec(
        op="fused_moe",
        hidden=int(about["hidden"]),
        intermediate=int(about["inter"]),
        num_experts=int(about["num_experts"]),
        top_k=int(ops.shape_of(node.args[1])[-1]),
        dtype="bf16",
        format_gate_up=weight_format,  # type: ignore[arg-type]
        format_down=weight_format,  # type: ignore[arg-type]
        isa=_isa(claim, host),
        activation=about["act"],  # type: ignore[arg-type]
    )


def _format(claim: Claim, stored: str) -> str:
    asked = str(claim.settings["format"])
    wanted = _STORED.get(stored, stored) if asked == "stored" else asked
    if wanted in FORMATS:
        return wanted
    shown = f"`stored`, which is `{wanted}` in this checkpoint" if asked == "stored" else f"`{wanted}`"
    raise InputRefused(
        Diagnostic(
            "M068",
            f"`cpu_moe` has no kernel for the format {shown}",
            claim.span,
            hint=f"write `cpu_moe(format = {FORMATS[0]})`, or pass `--set format={FORMATS[0]}` if the program has that parameter",
        )
    )


def _isa(claim: Claim, host: Host) -> Isa:
    asked = str(claim.settings["isa"])
    built = [isa for isa in host.isas if isa in ISAS]
    if asked == "auto" and built:
        return built[0]
    if asked in built:
        return asked  # type: ignore[return-value]
    if asked != "auto" and asked not in ISAS:
        raise InputRefused(
            Diagnostic("M066", f"isa `{asked}` is not available in this version", claim.span, hint=f"available now: {', '.join(ISAS)}")
        )
    raise HostLacks(
        Diagnostic("M064", f"this host cannot run isa `{asked}`", claim.span, hint=f"this host can run: {', '.join(built)}; or write `isa = auto`")
    )


def thread_count(settings: Mapping[str, Value], host: Host) -> int:
    """Workers of the kernel's engine: what the rule says, else one per core that this process may use."""
    asked = settings.get("threads")
    return asked if isinstance(asked, int) else max(1, min(host.cores, host.threads))

"""Whether decoding steps become native programs (`plan { native_step = decode }`), and why not.

In: the captured model, the devices of its modules, and the host. Out: the decision, and the kernel of the programs. A
step is one program where the whole model is on the CPU, and attention reads all positions, and no codes of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from torch import Tensor

from ktc.diagnostics import Diagnostic
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.kernels.linear_spec import ISAS
from ktc.model.kernels.step_spec import StepSpec
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.availability import plan_settings
from ktc.stages.plan.decode_attention import holds_codes
from ktc.stages.plan.decode_graph import DecodeGraph, sparse_attention_in
from ktc.stages.plan.placement import device_of
from ktc.stages.plan.types import Claim, Reason

KEY: Final = "native_step"


@dataclass(frozen=True, slots=True)
class NativeStep:
    """`spec` is the kernel of the programs; `obstacle` is the reason against them, "" for none."""

    spec: StepSpec | None = None
    obstacle: str = ""

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The line of `ktc check`."""
        text = "decoding steps of `generate` are native programs, recorded from the model's own steps"
        return (Reason("model", text),) if self.spec else ()

    def warnings(self, rules: RuleSet) -> Iterator[Diagnostic]:
        """Yield a warning (M084) where the program requests steps that its model cannot have."""
        if self.obstacle:
            span = next((setting.span for setting in plan_settings(rules) if setting.key.text == KEY), None)
            message = f"`plan {{ {KEY} = decode }}` has no effect: {self.obstacle}"
            yield Diagnostic("M084", message, span, hint="see `ktc explain M084`", severity="warning")


def decide_step(
    captured: CapturedModel, claims: Sequence[Claim], devices: Mapping[str, str], graph: DecodeGraph, mode: str,
    rules: RuleSet, host: Host,
) -> NativeStep:  # fmt: skip
    """Return the decision. Steps that are CUDA graphs need no program."""
    if rules.plan.get(KEY) != "decode" or graph.used:
        return NativeStep()
    if mode == "train":
        return NativeStep(obstacle="the program trains")
    names = (name for name, _ in cast("Iterator[tuple[str, Tensor]]", captured.model.named_parameters()))
    elsewhere = next((name for name in names if device_of(name, devices) != "cpu"), "")
    if elsewhere:
        return NativeStep(obstacle=f"`{elsewhere}` is on {device_of(elsewhere, devices)}")
    if sparse := sparse_attention_in(claims):
        return NativeStep(obstacle=sparse)
    if codes := [claim.path for claim in claims if claim.node and holds_codes(claim.target)]:
        return NativeStep(obstacle=f"the cache of `{codes[0]}` holds int8 codes")
    return NativeStep(StepSpec("step", "fp32", next(isa for isa in ISAS if isa in host.isas)))

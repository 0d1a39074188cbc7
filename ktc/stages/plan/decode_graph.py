"""Whether decoding steps become CUDA graphs (`plan { cuda_graph = decode }`), and why not.

In: the captured model, the devices of its modules, and what the rules put on them. Out: the decision. A step is one
graph where everything but routed experts is on one GPU and stays there, and attention reads all positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from torch import Tensor

from ktc.diagnostics import Diagnostic
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.targets import CpuMoe, SparseAttention
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.availability import plan_settings
from ktc.stages.plan.placement import device_of
from ktc.stages.plan.types import Claim, Reason, StreamedLinear

KEY: Final = "cuda_graph"


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """`asked` by the program; `obstacle` is the reason against graphs, "" for none."""

    asked: bool
    obstacle: str = ""

    @property
    def used(self) -> bool:
        """Whether the loaded model captures its decoding steps."""
        return self.asked and not self.obstacle

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The line of `ktc check`."""
        text = "decoding steps of `generate` are CUDA graphs, experts on the CPU are host functions in them"
        return (Reason("model", text),) if self.used else ()

    def warnings(self, rules: RuleSet) -> Iterator[Diagnostic]:
        """Yield a warning (M082) where the program requests graphs that its model cannot have."""
        if self.asked and self.obstacle:
            span = next((setting.span for setting in plan_settings(rules) if setting.key.text == KEY), None)
            message = f"`plan {{ {KEY} = decode }}` has no effect: {self.obstacle}"
            yield Diagnostic("M082", message, span, hint="see `ktc explain M082`", severity="warning")


def decide_graph(
    captured: CapturedModel, claims: Sequence[Claim], devices: Mapping[str, str], streams: Sequence[StreamedLinear],
    rules: RuleSet,
) -> DecodeGraph:  # fmt: skip
    """Return the decision for these devices."""
    if rules.plan.get(KEY) != "decode":
        return DecodeGraph(asked=False)
    on_host = tuple(f"{claim.path}." for claim in claims if isinstance(claim.target, CpuMoe))
    names = (name for name, _ in cast("Iterator[tuple[str, Tensor]]", captured.model.named_parameters()))
    used = {name: device_of(name, devices) for name in names if not name.startswith(on_host)}
    gpus = sorted({device for device in used.values() if device != "cpu"})
    elsewhere = next((name for name, device in used.items() if device == "cpu"), "")
    if not gpus:
        return DecodeGraph(True, "the model is on the CPU")
    if len(gpus) > 1:
        return DecodeGraph(True, f"the model is on {len(gpus)} GPUs")
    if elsewhere:
        return DecodeGraph(True, f"`{elsewhere}` is on the CPU")
    if streams:
        return DecodeGraph(True, f"the weights of `{streams[0].fqn}` are sent to the GPU in each step")
    return DecodeGraph(True, sparse_attention_in(claims))


def sparse_attention_in(claims: Sequence[Claim]) -> str:
    """Return why a step with the attention of `claims` is not captured, "" if it can be."""
    paths = [claim.path for claim in claims if isinstance(claim.target, SparseAttention)]
    return f"`{paths[0]}` is sparse, and chooses other positions in each step" if paths else ""

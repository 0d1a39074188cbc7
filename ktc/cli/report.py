"""The report of a compilation: a line for each finished stage, tables and JSON at the end.

In: the values that the compiler's `observe` reports. Out: the output of a `Session`.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Group
from rich.text import Text

from ktc.cli.amounts import count, relative, size
from ktc.cli.bars import stages_bar
from ktc.cli.session import Session
from ktc.cli.tables import (
    adapter_line,
    devices_table,
    kernels_table,
    needs_table,
    parameters_line,
    proofs_table,
    reasons_table,
    rules_table,
    workloads_table,
)
from ktc.diagnostics import HostLacks
from ktc.foundation.stage_progress import listening

if TYPE_CHECKING:
    from rich.console import Console

    from ktc.language.dsl import RuleSet
    from ktc.model.kernels.kernel_library import KernelLibrary
    from ktc.model.loading.trial import Trial
    from ktc.stages.capture import CapturedModel, ModelSource
    from ktc.stages.capture.weights import WeightMap
    from ktc.stages.codegen.render import KernelSource
    from ktc.stages.match import Matches
    from ktc.stages.plan import Plan
    from ktc.stages.proof import Proof
    from ktc.stages.rewrite import RewrittenBlock


class StageReport:
    """Collects the values of the stages, shows each as it finishes, and turns all of them into tables and JSON."""

    def __init__(self, session: Session, console: Console | None = None) -> None:
        self._session = session
        self._values: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()
        self._next_stage = 0
        self._console = console or session.console  # one console prints lines and draws the bar
        self._running: Callable[[str, int, int | None], None] = lambda stage, done, total: None

    @contextmanager
    def progress(self) -> Generator[None]:
        """Show the running stage on a terminal until the context ends."""
        with stages_bar(self._console, self._session.quiet) as self._running, listening(self._step):
            self._running(STAGES[0], 0, None)
            yield

    def _step(self, done: int, total: int) -> None:
        self._session.raise_if_interrupted()
        self._running(STAGES[self._next_stage], done, total)

    def observe(self, stage: str, value: object) -> None:
        """Record and show the value of a finished stage; this is the compiler's `observe`."""
        now = time.perf_counter()
        if stage == "rules":
            self._session.sources = cast("RuleSet", value).sources
        self._values[stage], self._seconds[stage] = value, now - self._last
        summary = "" if value is None else _SUMMARIES[stage](value)
        line = f"{stage:8s}{self._seconds[stage]:6.1f} s  {summary}"
        self._console.print(f"  {line}", markup=False, soft_wrap=True)
        self._session.note(line)
        self._next_stage = min(STAGES.index(stage) + 1, len(STAGES) - 1)
        self._session.raise_if_interrupted()
        self._running(STAGES[self._next_stage], 0, None)
        self._last = now

    def finish_check(self) -> None:
        """Show the tables of `ktc check`, its warnings and its JSON."""
        self.warn()
        self._session.result({"seconds": self._seconds, "peak_rss": _peak_rss(), **self._json()})
        if "plan" in self._values:
            self._session.show(self._tables())
            seconds = sum(self._seconds.values())
            self._session.tell(f"checked in {seconds:.1f} s, peak memory {size(_peak_rss())}")
        else:
            self._session.show("the rules are valid")

    @property
    def can_be_compiled(self) -> bool:
        """Whether the checked model has weights, and its plan nothing that `ktc compile` refuses."""
        model, plan = cast("ModelSource", self._values["model"]), cast("Plan", self._values["plan"])
        return model.index is not None and not plan.over_budget

    def finish_compile(self, out: Path) -> None:
        """Show the tables of `ktc compile`, its warnings and its JSON."""
        self.warn()
        self._session.result({"out": str(out), "seconds": self._seconds, **self._json()})
        self._session.show(self._tables())
        load = f"import {out.name}; model = {out.name}.load()"
        self._session.show(f"{relative(out)} is ready: `{load}`, or `ktc.load({str(relative(out))!r})`")

    def warn(self) -> None:
        """Show the warnings of the finished stages."""
        rules = cast("RuleSet", self._values["rules"])
        weights = cast("WeightMap | None", self._values.get("weights"))
        plan = cast("Plan | None", self._values.get("plan"))
        of_plan = plan.warnings if plan else rules.warnings
        warnings = (*of_plan, *(weights.warnings if weights else ()))
        over_budget = plan.over_budget if plan else ()
        self._session.diagnose((*warnings, *over_budget))
        if over_budget:
            self._session.exit_code = HostLacks.exit_code

    def _json(self) -> dict[str, Any]:
        if "plan" not in self._values:
            return {}
        from ktc.stages.analysis import decisions_json

        matches, plan = cast("Matches", self._values["match"]), cast("Plan", self._values["plan"])
        proofs = cast("tuple[Proof, ...]", self._values.get("prove", ()))
        return decisions_json(matches.matches, matches.near_misses, plan, proofs)

    def _tables(self) -> Group:
        matches, plan = cast("Matches", self._values["match"]), cast("Plan", self._values["plan"])
        proofs = cast("tuple[Proof, ...] | None", self._values.get("prove"))
        parts: list[Any] = [rules_table(cast("RuleSet", self._values["rules"]), matches, plan)]
        parts += [devices_table(plan), workloads_table(plan), parameters_line(plan)]
        parts += [adapter_line(plan.lora)] if plan.lora else []
        parts += [kernels_table(plan)] if plan.kernels else []
        parts += [Text(plan.memory.tower_pass)] if plan.memory.tower_pass and not self._session.verbose else []
        parts += [proofs_table(proofs)] if proofs else []
        if self._session.verbose or proofs is None:
            parts.append(reasons_table(plan))
        if self._session.verbose:
            parts += [needs_table(plan), Text("\n".join(plan.memory.notes))]
        return Group(*parts)


def _peak_rss() -> int:
    """Return the peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rules(value: RuleSet) -> str:
    counts = count(len(value.rules), "rule"), count(len(value.patterns), "pattern"), count(len(value.units), "file")
    return ", ".join(counts)


def _model(value: ModelSource) -> str:
    if value.index is None:
        return f"{value.config.model_type}, no weights"
    return f"{value.config.model_type}, {count(len(value.index.tensors), 'tensor')}, {size(value.index.bytes)}"


def _capture(value: CapturedModel) -> str:
    opaque = sum(block.graph is None for block in value.blocks)
    blocks = f"{count(len(value.blocks), 'distinct block')} at {count(len(value.sites), 'place')}"
    recurrent = sum(block.recurrent for block in value.blocks)
    further = [f"{opaque} opaque"] * bool(opaque) + [f"{recurrent} with an opaque recurrence"] * bool(recurrent)
    return ", ".join((blocks, *further))


def _weights(value: WeightMap) -> str:
    return f"{count(len(value.sources), 'tensor')} mapped"


def _match(value: Matches) -> str:
    matches = count(len(value.matches), "match", "matches")
    return f"{matches}, {count(len(value.near_misses), 'near miss', 'near misses')}"


def _plan(value: Plan) -> str:
    nodes = sum(len(rewrite.sites) * len({action.node for action in rewrite.actions}) for rewrite in value.rewrites)
    nodes += len(value.uncaptured)
    kernels = count(len(value.kernels), "kernel")
    return f"{count(nodes, 'module')} to rewrite, {kernels}, {count(value.threads, 'thread')}"


def _rewrite(value: tuple[RewrittenBlock, ...]) -> str:
    return count(len(value), "graph")


def _prove(value: tuple[Proof, ...]) -> str:
    holding = [proof for proof in value if proof.holds]
    worst = max((max(proof.forward, proof.worst_gradient) for proof in holding), default=0.0)
    left = len(value) - len(holding)
    proven = f"{count(len(holding), 'rewrite')} proven, worst error {worst:.1e}"
    return f"{proven}; {count(left, 'block')} left, planned again" if left else proven


def _render(value: KernelSource) -> str:
    return f"{count(len(value.units), 'source file')}"


def _build(value: KernelLibrary) -> str:
    return f"self-tested, {size(value.path.stat().st_size)}"


def _trial(value: Trial) -> str:
    of = f" of {value.all_layers}" * (value.layers < value.all_layers)
    kernels = "" if value.kernels == "built" else " by its references"
    run = f"ran {value.layers}{of} layers{kernels}: {count(len(value.ran), 'step')}"
    return "; ".join((*([run] if value.ran else []), *value.notes))


def _link(value: Path) -> str:
    return str(relative(value))


_SUMMARIES: dict[str, Callable[[Any], str]] = {
    "rules": _rules,
    "model": _model,
    "capture": _capture,
    "weights": _weights,
    "match": _match,
    "plan": _plan,
    "rewrite": _rewrite,
    "prove": _prove,
    "render": _render,
    "build": _build,
    "trial": _trial,
    "link": _link,
}
STAGES = tuple(_SUMMARIES)

"""The whole of ktc on one page: MODEL and RULES become the package OUT.

    rules --dsl--> RuleSet -----------------------+
    model --capture--> CapturedModel --match--> Matches --plan--> Plan --rewrite--> graphs --prove--> proofs
                                                 Plan's KernelSpecs --render--> source --build--> library --link--> OUT

Data flows one way. Every stage is a function from frozen value to frozen value, raises `KtcError` with all it has to
say, and is reported to `observe(stage, value)` when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ktc import dsl
from ktc.capture import CapturedModel, capture, open_model
from ktc.capture.weights import map_weights
from ktc.checkpoint import CheckpointIndex
from ktc.codegen.build import build
from ktc.codegen.render import render
from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, KtcError, to_json
from ktc.graph import ops
from ktc.graph.typed import nodes_of
from ktc.host import Host, detect
from ktc.link import assemble, check_out, dump_stage, link
from ktc.match import Match, Matches, NearMiss, match
from ktc.plan import ANY_SIZE, Plan, Point, make_plan
from ktc.plan.kernel_spec import KernelSpec
from ktc.plan.linear_spec import LinearSpec
from ktc.plan.report import plan_json
from ktc.prove import Proof, prove
from ktc.rewrite import RewrittenBlock, rewrite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ktc.pictures.dump import ModelDump, Stage

Observe = Callable[[str, object], None]
Value = TypeVar("Value")
Model: TypeAlias = "str | Path | PreTrainedModel"  # a folder, a hub id, `tiny:NAME`, or a model object


def _unobserved(stage: str, value: object) -> None:
    """Nobody is watching."""


def compile(
    model: Model,
    rules: str | Path,
    out: str | Path,
    *,
    settings: Mapping[str, str] | None = None,
    host: Host | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    observe: Observe = _unobserved,
) -> Path:
    """Compiles `model` by `rules` into the package `out` and returns its path.

    `trust_remote_code` runs the model's own code, where a local folder brings it.
    Raises InputRefused, HostLacks or ProofFailed; whatever it raises, nothing is left at `out`.
    """
    see, host, settings = _seen(observe), host or detect(probe_gpu=True), settings or {}
    check_out(Path(out), force)
    ruleset = see("rules", dsl.load(rules, settings))
    source = see("model", open_model(model, trust_remote_code=trust_remote_code))
    captured = see("capture", _with_experts(capture(source)))
    weights = see("weights", map_weights(captured.model, _index(captured)))
    matches = see("match", match(captured, ruleset, host))
    plan = see("plan", _fitting(make_plan(captured, weights.sources, matches, ruleset, host)))
    blocks = see("rewrite", rewrite(captured, plan))
    proofs = see("prove", prove(captured, blocks))
    kernels = see("render", render((*plan.kernels, *plan.linears), _origins(plan)))
    library = see("build", build(kernels, host) if kernels.specs else None)
    package = assemble(captured, ruleset, settings, weights, matches, plan, blocks, proofs, kernels, library)
    return see("link", link(package, Path(out), force))


@dataclass(frozen=True, slots=True)
class Report:
    """What ktc would do to a model, without doing it. `to_json` gives plain values."""

    matches: tuple[Match, ...]
    near_misses: tuple[NearMiss, ...]
    proofs: tuple[Proof, ...]
    plan: Plan
    diagnostics: tuple[Diagnostic, ...]
    captured: CapturedModel
    blocks: tuple[RewrittenBlock, ...]

    def to_json(self) -> dict[str, Any]:
        """The report without graphs."""
        return {
            "matches": [
                {"rule": m.rule, "pattern": m.root, "path": m.path, "coverage": m.coverage} for m in self.matches
            ],
            "near_misses": [str(miss) for miss in self.near_misses],
            "proofs": [proof.to_json() for proof in self.proofs],
            "plan": plan_json(self.plan),
            "diagnostics": [to_json(d) for d in self.diagnostics],
        }


def inspect(
    model: Model, rules: str | Path, *,
    settings: Mapping[str, str] | None = None, host: Host | None = None, trust_remote_code: bool = False,
    observe: Observe = _unobserved,
) -> Report:  # fmt: skip
    """Runs the stages up to the proof; a config.json is enough and nothing is written. Raises as `compile` does."""
    captured, matches, plan, blocks = analyse(
        model, rules, settings or {}, host, observe, trust_remote_code=trust_remote_code
    )
    proofs = _seen(observe)("prove", prove(captured, blocks))
    diagnostics = (*plan.warnings, *plan.unavailable, *plan.over_budget)
    return Report(matches.matches, matches.near_misses, proofs, plan, diagnostics, captured, blocks)


def check(
    rules: str | Path, model: Model | None = None, *,
    settings: Mapping[str, str] | None = None, host: Host | None = None, trust_remote_code: bool = False,
    observe: Observe = _unobserved,
) -> tuple[Diagnostic, ...]:  # fmt: skip
    """Everything there is to say about `rules`, with `model` also about their fit; empty means good.

    Never raises on bad rules or a bad model: their diagnostics are returned.
    """
    try:
        if model is None:
            return _seen(observe)("rules", dsl.load(rules, settings or {})).warnings
        _, _, plan, _ = analyse(model, rules, settings or {}, host, observe, trust_remote_code=trust_remote_code)
    except (InputRefused, HostLacks) as error:
        return error.diagnostics
    return (*plan.warnings, *plan.unavailable, *plan.over_budget)


def dumps(
    model: Model, rules: str | Path, stages: Sequence[Stage], *, host: Host | None = None,
    trust_remote_code: bool = False,
) -> list[ModelDump]:  # fmt: skip
    """The graphs of `model` at some stages, for inspection. The stage `captured` alone needs no rule to match."""
    if tuple(stages) == ("captured",):
        source = open_model(model, fetch_weights=False, trust_remote_code=trust_remote_code)
        return [dump_stage("captured", capture(source), None, None)]
    captured, matches, plan, blocks = analyse(model, rules, {}, host, _unobserved, trust_remote_code=trust_remote_code)
    return [dump_stage(stage, captured, matches, plan, blocks) for stage in stages]


def analyse(
    model: Model,
    rules: str | Path,
    settings: Mapping[str, str],
    host: Host | None,
    observe: Observe,
    asked: Point = ANY_SIZE,
    *,
    trust_remote_code: bool = False,
) -> tuple[CapturedModel, Matches, Plan, tuple[RewrittenBlock, ...]]:
    """The stages that need no weights and no compiler. Raises as `compile` does, but for a plan over budget.

    `asked` is the size of input that the user wants to fit.
    """
    see, host = _seen(observe), host or detect(probe_gpu=True)
    ruleset = see("rules", dsl.load(rules, settings))
    source = see("model", open_model(model, fetch_weights=False, trust_remote_code=trust_remote_code))
    captured = see("capture", capture(source))
    index = captured.source.index
    weights = see("weights", map_weights(captured.model, index)).sources if index is not None else ()
    matches = see("match", match(captured, ruleset, host))
    plan = see("plan", make_plan(captured, weights, matches, ruleset, host, asked))
    return captured, matches, plan, see("rewrite", rewrite(captured, plan))


def _seen(observe: Observe) -> Callable[[str, Value], Value]:
    """Reports a stage's value and hands it on."""

    def see(stage: str, value: Value) -> Value:
        observe(stage, value)
        return value

    return see


def _with_experts(captured: CapturedModel) -> CapturedModel:
    """Refuses a dense model; a block that could not be captured may hold experts, so the plan says more about it."""
    graphs = [block.graph for block in captured.blocks if block.graph is not None]
    found = any(ops.operator(node) == "experts" for graph in graphs for node in nodes_of(graph))
    if len(graphs) == len(captured.blocks) and not found:
        message = f"this `{captured.source.config.model_type}` model has no routed experts"
        hint = "ktc compiles mixture-of-experts models; `ktc graph MODEL` shows its blocks"
        raise InputRefused(Diagnostic("I105", message, hint=hint))
    return captured


def _index(captured: CapturedModel) -> CheckpointIndex:
    if captured.source.index is None or captured.source.folder is None:
        message = f"`{captured.source.name}` has no weights to compile"
        raise InputRefused(Diagnostic("I106", message, hint="`ktc check RULES MODEL` needs only config.json"))
    return captured.source.index


def _fitting(plan: Plan) -> Plan:
    """The plan, if this version and its host can carry it out."""
    if plan.unavailable:
        raise InputRefused(*(replace(problem, severity="error") for problem in plan.unavailable))
    if plan.over_budget:
        raise HostLacks(*plan.over_budget)
    return plan


def _origins(plan: Plan) -> dict[KernelSpec | LinearSpec, str]:
    """The place in the rules that asked for each kernel."""
    actions = [action for rewrite in plan.rewrites for action in rewrite.actions]
    asked = ((action.kernel or action.linear, f"{action.rule} ({action.span})") for action in actions)
    return {spec: origin for spec, origin in asked if spec is not None}


__all__ = ["KtcError", "Model", "Report", "check", "compile", "dumps", "inspect"]

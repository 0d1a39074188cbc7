"""The whole of ktc on one page: MODEL and RULES become the package OUT.

    rules --dsl--> RuleSet -----------------------+
    model --capture--> CapturedModel --match--> Matches --choose--> Plan --rewrite--> graphs --prove--> proofs
                                    Plan's kernels --render--> source --build--> library --link--> folder --trial--> OUT

Where the rules leave a choice, `choose` plans every candidate, predicts its time and takes the fastest that fits. A
block whose proof fails keeps its own code, and the rest is matched and planned again. A folder is put at OUT once it
was loaded and used.
Data flows one way. Every stage is a function from frozen value to frozen value and raises `KtcError` with everything
that it found. Each finished stage is reported to `observe(stage, value)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, KtcError, ProofFailed
from ktc.foundation.host import Host
from ktc.language import dsl
from ktc.stages.analysis import Analysis, Report
from ktc.stages.capture import TO_INSPECT, CapturedModel, Reading, capture
from ktc.stages.capture.compilable import require_compilable
from ktc.stages.capture.weights import WeightMap, map_weights
from ktc.stages.choose import FORMAT, Chosen, choose_plan, with_ways_out
from ktc.stages.match import Matches, match
from ktc.stages.plan import ANY_SIZE, BatchShape, kernel_origins, require_feasible
from ktc.stages.rewrite import rewrite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ktc.stages.pictures.dump import ModelDump, Stage
    from ktc.stages.proof import Proof

Observe = Callable[[str, object], None]
Model: TypeAlias = "str | Path | PreTrainedModel"  # a folder, a hub id, `tiny:NAME`, or a model object


def _unobserved(stage: str, value: object) -> None:
    """Report nothing."""


def compile(  # noqa: PLR0913 - the public interface, by keyword
    model: Model,
    rules: str | Path,
    out: str | Path,
    *,
    settings: Mapping[str, str] | None = None,
    host: Host | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    random_weights: bool = False,
    text_only: bool = False,
    observe: Observe = _unobserved,
) -> Path:
    """Compile `model` by `rules` into the package `out` and return its path.

    `trust_remote_code` runs the model's own code, where a local folder brings it. With `random_weights` config.json is
    enough, and the package is loaded by `load(random_weights=SEED)`. `text_only` leaves out the towers for
    images and sound.
    Raises InputRefused, HostLacks or ProofFailed; after any error nothing is left at `out`.
    """
    from ktc.stages.link import check_out

    check_out(Path(out), force)
    reading = Reading(trust_remote_code, text_only, random_weights, to_compile=True)
    analysis = analyse(model, rules, settings, host, observe, reading=reading)
    return complete(analysis, out, observe, force=force)


def complete(analysis: Analysis, out: str | Path, observe: Observe = _unobserved, *, force: bool = False) -> Path:
    """Prove and build an analysis of a model read `to_compile`, into the package `out`. Raises as `compile` does."""
    from ktc.model.loading.trial import try_out
    from ktc.stages.codegen.build import build
    from ktc.stages.codegen.render import render
    from ktc.stages.link import assemble, link

    require_feasible(analysis.plan)
    analysis, proofs = proven(analysis, observe)

    kernels = render(analysis.plan.kernels, kernel_origins(analysis.plan))
    observe("render", kernels)
    library = build(kernels, analysis.host) if kernels.specs else None
    observe("build", library)
    package = assemble(analysis, analysis.ruleset.settings, proofs, kernels, library)

    def trial(folder: Path) -> None:
        observe("trial", try_out(folder, has_weights=bool(package.weights)))

    path = link(package, Path(out), force, trial)
    observe("link", path)
    return path


def analyse(
    model: Model, rules: str | Path, settings: Mapping[str, str] | None = None, host: Host | None = None,
    observe: Observe = _unobserved, *, must_fit: BatchShape = ANY_SIZE, reading: Reading = TO_INSPECT,
) -> Analysis:  # fmt: skip
    """Run the stages that read no weight and need no C++ compiler.

    `must_fit` is the size of input that must fit. Raises as `compile` does, but a plan over budget is a value.
    """
    if host is None:
        from ktc.foundation.measured_host import this_host

        host = this_host()
    ruleset, captured, weights = read(model, rules, settings, observe, reading)

    def in_format(name: str) -> dsl.RuleSet:
        return dsl.load(rules, {**(settings or {}), FORMAT: name})

    return _decide(ruleset, captured, weights, host, observe, must_fit, in_format)


def read(
    model: Model, rules: str | Path, settings: Mapping[str, str] | None = None, observe: Observe = _unobserved,
    reading: Reading = TO_INSPECT,
) -> tuple[dsl.RuleSet, CapturedModel, WeightMap]:  # fmt: skip
    """Run the stages that no machine changes: rules, the captured model, and the rows of its checkpoint."""
    ruleset = dsl.load(rules, settings or {})
    observe("rules", ruleset)
    source = reading.of(model)
    observe("model", source)
    captured = capture(source)
    observe("capture", captured)
    if reading.to_compile:
        require_compilable(captured, needs_weights=not reading.random_weights)
    weights = WeightMap((), ())
    if source.index is not None:
        weights = map_weights(captured.model, source.index)
        observe("weights", weights)
    return ruleset, captured, weights


def _decide(
    ruleset: dsl.RuleSet, captured: CapturedModel, weights: WeightMap, host: Host, observe: Observe,
    must_fit: BatchShape = ANY_SIZE, in_format: Callable[[str], dsl.RuleSet] | None = None,
) -> Analysis:  # fmt: skip
    """Run the stages from `match` to `rewrite`. `in_format` is the program with another format of the experts."""
    matches = match(captured, ruleset, host)
    observe("match", matches)

    def choose(ruleset: dsl.RuleSet, matches: Matches) -> Chosen:
        return choose_plan(captured, weights.sources, matches, ruleset, host, must_fit)

    def choose_in(name: str) -> Chosen:
        assert in_format is not None
        return choose(other := in_format(name), match(captured, other, host))

    chosen = choose(ruleset, matches)
    chosen = with_ways_out(chosen, ruleset, choose_in) if in_format else chosen
    observe("plan", chosen.plan)
    blocks = rewrite(captured, chosen.plan)
    observe("rewrite", blocks)
    return Analysis(ruleset, captured, weights, matches, chosen, blocks, host)


def proven(analysis: Analysis, observe: Observe = _unobserved) -> tuple[Analysis, tuple[Proof, ...]]:
    """Prove every rewrite. A block whose rewrite does not hold keeps its own code: the rest is decided again.

    Raises ProofFailed where nothing is left, or less than the rules expect.
    """
    from ktc.stages.proof import prove, refuted

    proofs = prove(analysis.captured, analysis.blocks, analysis.host)
    observe("prove", proofs)
    if left := refuted(proofs):
        captured = analysis.captured.leaving(left)
        try:
            analysis = _decide(analysis.ruleset, captured, analysis.weights, analysis.host, observe)
        except InputRefused as error:
            failures = (Diagnostic(code, f"the rewrite of `{block}` {why}") for block, (code, why) in left.items())
            raise ProofFailed(*failures, *error.diagnostics) from error
    return analysis, proofs


def inspect(
    model: Model, rules: str | Path, *,
    settings: Mapping[str, str] | None = None, host: Host | None = None, trust_remote_code: bool = False,
    text_only: bool = False, observe: Observe = _unobserved,
) -> Report:  # fmt: skip
    """Run the stages up to the proof; a config.json is enough and nothing is written. Raises as `compile` does."""
    analysis = analyse(model, rules, settings, host, observe, reading=Reading(trust_remote_code, text_only))
    return Report.of(*proven(analysis, observe))


def check(
    rules: str | Path, model: Model | None = None, *,
    settings: Mapping[str, str] | None = None, host: Host | None = None, trust_remote_code: bool = False,
    text_only: bool = False, observe: Observe = _unobserved,
) -> tuple[Diagnostic, ...]:  # fmt: skip
    """Return every finding about `rules`, and with `model` about their fit; empty means good.

    Bad rules and a bad model are findings too, not exceptions.
    """
    try:
        if model is not None:
            reading = Reading(trust_remote_code, text_only)
            return analyse(model, rules, settings, host, observe, reading=reading).diagnostics
        ruleset = dsl.load(rules, settings or {})
        observe("rules", ruleset)
    except (InputRefused, HostLacks) as error:
        return error.diagnostics
    return ruleset.warnings


def dumps(
    model: Model, rules: str | Path, stages: Sequence[Stage], *, host: Host | None = None,
    trust_remote_code: bool = False, text_only: bool = False,
) -> list[ModelDump]:  # fmt: skip
    """Return the graphs of `model` at some stages. The stage `captured` alone needs no rule to match."""
    from ktc.stages.link import dump_stage

    reading = Reading(trust_remote_code, text_only)
    if tuple(stages) == ("captured",):
        return [dump_stage("captured", capture(reading.of(model)), None, None)]
    analysis = analyse(model, rules, host=host, reading=reading)
    return [dump_stage(stage, analysis.captured, analysis.matches, analysis.plan, analysis.blocks) for stage in stages]


__all__ = [
    "Analysis", "KtcError", "Model", "Reading", "Report", "analyse", "check", "compile", "dumps", "inspect", "read",
]  # fmt: skip

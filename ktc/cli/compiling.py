"""`ktc compile`, `ktc check` and `ktc graph`: run all or some stages of the compiler on a model and rules.

In: the options. Out: a package, the plan and its reasons, or a picture of a stage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from ktc.cli.early_checks import described_host, require_host, require_model, require_out, require_rules
from ktc.cli.following import after_compiling, checking, compiling, default_out, loading
from ktc.cli.model_and_rules import model_and_rules, rules_and_model
from ktc.cli.options import (
    AUTO,
    Experts,
    ForUse,
    HostFile,
    IsaName,
    Model,
    OptionalModel,
    OptionalRules,
    Output,
    Rules,
    Settings,
    TextOnly,
    Trust,
    Use,
)
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused

Stage = Literal["captured", "matched", "planned", "rewritten"]
Format = Literal["text", "json", "dot", "svg", "html"]
ProvenOn = Literal["witness", "full"]


@in_session(writes=("out",))
def compile_command(
    session: Session,
    model: Model,
    rules: OptionalRules = AUTO,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The package to write: a folder named like a Python module. Default: MODEL's name and `_ktc`.",
        ),
    ] = None,
    use: ForUse = None,
    experts: Experts = False,
    settings: Settings = None,
    isa: IsaName = None,
    host_file: HostFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is a compiled model.")] = False,
    trust: Trust = False,
    pack: Annotated[bool, typer.Option("--pack", help="Store the packed experts in OUT: it loads faster.")] = False,
    text_only: TextOnly = False,
    proven_on: Annotated[
        ProvenOn, typer.Option("--prove", help="Prove on small weights, or also on the real ones as `ktc prove` does.")
    ] = "witness",
) -> None:
    """Compile MODEL with RULES into an importable package; the two may be in either order."""
    model, rules = model_and_rules(model, rules)
    out = out or Path(default_out(model))
    chosen = settings_of(settings, rules, use, experts=experts)
    require_model(model)
    require_out(out, force)
    require_rules(rules, chosen)
    require_host(host_file, isa)
    session.require_versions()
    from ktc import compiler
    from ktc.cli.report import StageReport

    report = StageReport(session)
    with report.progress():
        path = compiler.compile(
            model,
            rules,
            out,
            settings=chosen,
            host=described_host(host_file, isa),
            force=force,
            trust_remote_code=trust,
            text_only=text_only,
            observe=report.observe,
        )
    report.finish_compile(path)
    if pack:
        from ktc.cli.pack import Packing
        from ktc.cli.pack import pack as pack_experts

        pack_experts(session, path, Packing(trusted=trust))
    if proven_on == "full":
        from ktc.cli.prove import prove as prove_weights
        from ktc.inference.prove.run import Request

        if prove_weights(session, Request(path, trust_remote_code=trust)).red:
            session.show(f"{path} stays in place, so that it can be looked into; do not use it")
    session.next(*after_compiling(path, trust=trust))


@in_session()
def check_command(
    session: Session,
    rules: Rules,
    model: OptionalModel = None,
    host_file: HostFile = None,
    use: ForUse = None,
    experts: Experts = False,
    settings: Settings = None,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="Tokens per sequence that must fit in memory.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Sequences per batch that must fit in memory.")
    ] = None,
    text_only: TextOnly = False,
    trust: Trust = False,
) -> None:
    """Check RULES. With MODEL, also show where the rules match, the plan and the memory it needs.

    The two may be in either order. A MODEL alone is checked with the program `auto`.
    """
    rules, model = rules_and_model(rules, model)
    chosen = settings_of(settings, rules, use, experts=experts)
    if model is not None:
        require_model(model)
        require_rules(rules, chosen)
        require_host(host_file)
    session.require_versions()
    from ktc.cli.report import StageReport

    report = StageReport(session)
    if model is None:
        from ktc.language import dsl

        ruleset = dsl.load(rules, chosen)
        report.observe("rules", ruleset)
        report.finish_check()
        session.next(*(checking(ruleset, rules) or ()))
    else:
        from ktc import compiler
        from ktc.stages.plan import BatchShape

        with report.progress():
            compiler.analyse(
                model,
                rules,
                chosen,
                described_host(host_file, None),
                report.observe,
                must_fit=BatchShape(batch, length),
                reading=compiler.Reading(trust, text_only),
            )
        report.finish_check()
        if report.can_be_compiled and host_file is None:
            pairs = [f"{name}={value}" for name, value in chosen.items()]
            session.next(*compiling(model, rules, pairs, trust=trust, text_only=text_only))
        else:
            session.next("ktc", "graph", model, "--rules", rules, *loading(None, trust, text_only=text_only))


@in_session()
def graph_command(
    session: Session,
    model: Annotated[str | None, typer.Argument(help="A compiled model, or a model as `ktc compile` takes it.")] = None,
    rules: Annotated[
        str, typer.Option("--rules", help="A rule file or a bundled name, for a MODEL that is not compiled.")
    ] = "moe-lora",
    stage: Annotated[Stage, typer.Option("--stage", help="The stage to show.")] = "rewritten",
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="Only this layer.")] = None,
    form: Annotated[Format, typer.Option("--format", help="The format of the graph.")] = "text",
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", metavar="A B", help="Compare two compiled models, graph files, or stages of MODEL."),
    ] = None,
    text_only: TextOnly = False,
    trust: Trust = False,
    output: Output = None,
) -> None:
    """Show the graph of a model at a stage, or the difference between two."""
    _check_sides(model, rules, diff)
    session.require_versions()
    from ktc.cli import graph

    color = session.color and output is None
    request = graph.Request(
        model, rules, stage, layer, "json" if session.as_json else form, diff, color, trust, text_only
    )
    with session.console.status("capturing and drawing"):
        text = graph.render(request)
    if session.as_json:
        session.result(json.loads(text))
    if output is not None or not session.as_json:
        session.emit(text, output)
    session.next(*graph.following(request))


def settings_of(
    pairs: list[str] | None, rules: str = "", use: Use | None = None, *, experts: bool = False
) -> dict[str, str]:
    """Turn `["rank=8"]` into `{"rank": "8"}`, and add the settings that the options `--for` and `--experts` name.

    Raises InputRefused: U004 for a setting without `=`, U006 for an option that `rules` has no parameter for.
    """
    split = [pair.partition("=") for pair in pairs or ()]
    faults = [
        Diagnostic("U004", f"`--set` needs NAME=VALUE, found `{name}`")
        for name, equals, _ in split
        if not (name and equals)
    ]
    if faults:
        raise InputRefused(*faults)
    return {name.strip(): value for name, _, value in split} | _of_options(rules, use, experts=experts)


def _of_options(rules: str, use: Use | None, *, experts: bool) -> dict[str, str]:
    """Return the settings of `--for` and `--experts`. Raises InputRefused (U006) where the rules have no such one."""
    given = {"use": ("--for", use or ""), "experts": ("--experts", "true" if experts else "")}
    given = {name: option for name, option in given.items() if option[1]}
    if given and rules != AUTO:
        from ktc.language import dsl

        known = dsl.load(rules).units[0].params
        hint = "leave RULES out: the program `auto` has it; or write a program with this parameter"
        faults = [
            Diagnostic("U006", f"`{option}` sets the parameter `{name}`, which `{rules}` does not have", hint=hint)
            for name, (option, _) in given.items()
            if name not in known
        ]
        if faults:
            raise InputRefused(*faults)
    return {name: value for name, (_, value) in given.items()}


def _check_sides(model: str | None, rules: str, diff: tuple[str, str] | None) -> None:
    """Raise InputRefused for a MODEL, or a side of a difference, that is neither a model, a file nor a stage.

    Without both it raises U010.
    """
    sides = (*(diff or ()), *(() if model is None else (model,)))
    if not sides:
        raise InputRefused(Diagnostic("U010", "`ktc graph` needs a MODEL or `--diff A B`"))
    for side in sides:
        if side in get_args(Stage) or Path(side).is_file() or (Path(side) / "ktc.json").is_file():
            continue
        require_model(side)
        require_rules(rules, {})
